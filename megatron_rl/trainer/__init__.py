"""The program of a rank: data, megatron-core, the loop, and scripts of Megatron-LM."""

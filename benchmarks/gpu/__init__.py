"""The parts of `make gpu-bench`: each measures one thing on one GPU, in a process of its own."""

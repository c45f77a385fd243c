"""Megatron's distributed checkpoints: `checkpointer` saves and loads what a run trains.

What a checkpoint holds is in `state_dict`, how it is written and read in `serialization`, where it lies in `folders`.
When a run saves is for `training.saver` to say.
"""

"""Megatron's distributed checkpoints: `checkpointer` saves and loads what a run trains.

`state_dict` decides the content of a checkpoint, `serialization` how it is written and read, `folders` where it lies,
and `trainer.loop.saver` when a run saves.
"""

"""Weights for engines on hosts that share no folder with the trainer: sent over TCP into a folder of each host's own.

Ranks send what they own, from the files that they have written, in *portions*. A host's receiver writes them into
files of the same names, and counts them as they arrive (`folders.py`), so engines load them as they would load the
trainer's own files. Nothing here imports torch.
"""

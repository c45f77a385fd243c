"""vLLM as an engine: its server, its workers, and the proof of which weights they hold.

The road of weights in a worker:

- `worker` has the remote calls; `parts` picks the folder on the worker's host;
- `held_model` is the one place that loads weights;
- `received` maps what came, checks it before a weight changes, and records the load;
- `learned_order` knows where each tensor goes; `in_place` copies it there, and `patches` lets vLLM load the others;
- `held` digests what the parameters then hold, `derived` what layers made of it, and `adapters` the slot of adapters;
- `updates` tries all this when an engine starts.
"""

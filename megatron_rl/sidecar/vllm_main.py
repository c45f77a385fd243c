"""vLLM's API server as an engine of ours: `python -m megatron_rl.sidecar.vllm_main <flags of vLLM>`.

It differs in two ways: each of its processes ends with the one that started it (vLLM's core and workers live on when
the API server is killed), and what it creates is for this user only.
"""

import os
import runpy

from megatron_rl.sidecar.parent import children_die_with_this_process, die_with_parent


def tie() -> None:
    """Tie this process to its parent, and all that come from it to theirs."""
    os.umask(0o077)
    die_with_parent(int(os.environ.get("MEGATRON_RL_PARENT", os.getppid())))
    children_die_with_this_process()


def tie_spawned() -> None:
    """The same in a process that multiprocessing spawned: it runs this module again, under another name."""
    die_with_parent(os.getppid())
    children_die_with_this_process()


if __name__ == "__mp_main__":
    tie_spawned()

if __name__ == "__main__":
    tie()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")

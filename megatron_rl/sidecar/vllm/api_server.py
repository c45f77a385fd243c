"""vLLM's API server as an engine of ours: `python -m megatron_rl.sidecar.vllm.api_server <flags of vLLM>`.

It differs in three ways: each of its processes ends with the one that started it (vLLM's core and workers live on when
the API server is killed), what it creates is for this user only, and the groups of a worker share one device of gloo:
vLLM makes a dozen, whose threads would wake up a hundred times a second each.
"""

import os
import runpy

from megatron_rl.sidecar.parent import tie

# A process that multiprocessing spawns runs this module again, under this name; not one that is called `__main__`.
if __name__ == "__mp_main__":
    tie()
    # Before torch is imported, vLLM wants to set what torch reads then.
    import vllm  # noqa: F401

    from megatron_rl.platforms.host import share_gloo_device

    share_gloo_device()

if __name__ == "__main__":
    os.umask(0o077)
    tie()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")

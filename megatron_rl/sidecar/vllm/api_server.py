"""vLLM's API server as an engine of ours: `python -m megatron_rl.sidecar.vllm.api_server <flags of vLLM>`.

With `--headless` it is the part of an engine that has no server (`parts.py`). It differs from vLLM's in three ways:

- Each of its processes ends with its parent. vLLM's core and workers would survive an API server that is killed.
- Only this user can open the files that it creates.
- The groups of a worker share one device of gloo. vLLM makes a dozen, and the thread of each would wake up a hundred
  times a second.
"""

import os
import runpy
import sys

from megatron_rl.sidecar.parent import tie

if __name__ == "__main__":
    os.umask(0o077)

# A process that multiprocessing spawns runs this module again, under this name. A forked one has what is done here.
if __name__ in ("__main__", "__mp_main__"):
    tie()
    # vLLM must set variables that torch reads when it is imported.
    import vllm  # noqa: F401

    from megatron_rl.platforms.host import share_gloo_device
    from megatron_rl.sidecar.vllm.parts import HEADLESS, run_headless

    share_gloo_device()

if __name__ == "__main__" and HEADLESS in sys.argv:
    run_headless(sys.argv[1:])
elif __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")

"""python -m megatron_rl.sidecar.agent"""

import os
import sys

from megatron_rl.sidecar import parent
from megatron_rl.sidecar.agent.main import run_from_words

if __name__ == "__main__":
    # An agent that a launcher starts may be tied to it, so that it ends with its allocation.
    if parent.VARIABLE in os.environ:
        parent.tie()
    sys.exit(run_from_words(sys.argv[1:]))

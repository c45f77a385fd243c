"""python -m megatron_rl.sidecar"""

import os
import sys

from megatron_rl.sidecar import parent
from megatron_rl.sidecar.main import main

if __name__ == "__main__":
    # A sidecar that a trainer started ends with that trainer; one that a person started stays.
    if parent.VARIABLE in os.environ:
        parent.tie()
    sys.exit(main(sys.argv[1:]))

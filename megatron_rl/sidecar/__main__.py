"""`python -m megatron_rl.sidecar`."""

import sys

from megatron_rl.sidecar.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

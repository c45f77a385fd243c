"""A process that receives weights on a host of its own, until its input ends. The token comes in the first line."""

import sys
from pathlib import Path

from megatron_rl.shared.weights.delivery.receiver import Receiver

if __name__ == "__main__":
    receiver = Receiver(Path(sys.argv[1]), sys.stdin.readline().strip(), sys.argv[2])
    print(receiver.port, flush=True)
    sys.stdin.read()
    receiver.close()

"""Skip these tests without megatron.training, which comes with megatron-core's wheels for Python 3.12 and newer."""

import sys

collect_ignore_glob = [] if sys.version_info >= (3, 12) else ["test_*.py"]

"""Tests of the environment that `make cuda` installs; `make test-cuda` runs them, with or without a GPU."""

import os

collect_ignore_glob = [] if "CUDA_PYTHON" in os.environ else ["test_*.py"]

"""Tests in the environment of its own that `make test-launch` makes: schemas of Kubernetes, a linter, and Ray."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("kubernetes_validate") else ["test_*.py"]

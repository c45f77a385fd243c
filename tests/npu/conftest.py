"""Tests of the real torch_npu over stand-ins for CANN, in the environment of its own that `make test-npu` makes."""

import os

import pytest

from tests.npu import cann

collect_ignore_glob = [] if cann.PYTHON else ["test_*.py"]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment in which torch_npu finds one device."""
    return cann.build(tmp_path_factory.mktemp("cann"))


@pytest.fixture(scope="session")
def with_mindspeed(environment, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return that environment with MindSpeed, whose sources the variable MINDSPEED names."""
    if "MINDSPEED" not in os.environ:
        pytest.skip("make test-npu MINDSPEED=CLONE runs it")
    return environment | cann.add_mindspeed(os.environ["MINDSPEED"], tmp_path_factory.mktemp("mindspeed"))

"""Flags of vLLM that a person adds, against the parser of the vLLM that is installed."""

import sys
from pathlib import Path

import pytest

from megatron_rl.errors import UsageError
from megatron_rl.sidecar.vllm.flags import check_with_vllm
from megatron_rl.sidecar.vllm.server import link_package

pytestmark = pytest.mark.each_change


def test_vllm_itself_is_asked_about_its_flags_before_an_engine_starts(tmp_path: Path) -> None:
    packages = link_package(tmp_path)
    check_with_vllm(sys.executable, ("--kv-cache-dtype", "auto", "--max_num_batched_tokens=128"), packages)
    with pytest.raises(UsageError, match=r"--rollout-vllm-args: vLLM refuses it: .*--no-such-flag"):
        check_with_vllm(sys.executable, ("--kv-cache-dtype", "auto", "--no-such-flag"), packages)

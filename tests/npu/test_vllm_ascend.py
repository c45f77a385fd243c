"""The names that we call exist in vllm-ascend's sources, if VLLM_ASCEND=/path/to/a/clone is given."""

import ast
import os
from pathlib import Path

import pytest

from megatron_rl.trainer.mcore.publish import senders

if "VLLM_ASCEND" not in os.environ:
    pytest.skip("make test-npu VLLM_ASCEND=CLONE runs it", allow_module_level=True)
MODULE, SETTINGS, ENGINE = senders._LIBRARIES["hccl"]
TREE = ast.parse(Path(os.environ["VLLM_ASCEND"], *MODULE.split(".")).with_suffix(".py").read_text())
CLASSES = {node.name: node for node in TREE.body if isinstance(node, ast.ClassDef)}


def fields(name: str) -> list[str]:
    return [node.target.id for node in CLASSES[name].body if isinstance(node, ast.AnnAssign)]


def test_a_send_is_set_up_and_begun_as_we_do_it() -> None:
    methods = {node.name: node for node in CLASSES[ENGINE].body if isinstance(node, ast.FunctionDef)}
    assert [one.arg for one in methods["trainer_init"].args.args] == ["init_info"]
    assert [one.arg for one in methods["trainer_send_weights"].args.args] == ["iterator", "trainer_args"]
    for name in ("trainer_init", "trainer_send_weights"):
        assert [ast.unparse(one) for one in methods[name].decorator_list] == ["staticmethod"]
    assert {"group", "packed"} <= set(fields(SETTINGS))


def test_an_engine_takes_what_it_is_told() -> None:
    assert fields("HCCLWeightTransferInitInfo") == ["master_address", "master_port", "rank_offset", "world_size"]
    assert {"names", "dtype_names", "shapes", "packed"} <= set(fields("HCCLWeightTransferUpdateInfo"))

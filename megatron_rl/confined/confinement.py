"""The confinement of a worker to the files that it may see, and the Linux system calls for it.

The parent computes the paths (`Confinement`); the worker applies them to itself before it imports any function
(`confine`). Landlock has only rules that allow. To hide a private folder inside an allowed one, each other entry of the
outer folder is allowed separately. No call needs root. Each raises OSError if the kernel, or the container of this
process, does not have it.
"""

import ctypes
import dataclasses
import enum
import os
import platform
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_rl.errors import UsageError

# Variables in the environment of every worker, besides its folders.
_FIXED = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
# Paths that every program needs: libraries, certificates, names of hosts and users; no secrets.
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
NETWORK = "network"
PROCESSES = "processes"


@dataclasses.dataclass(frozen=True)
class Confinement:
    """The paths that a worker may read, those it may only list, and those it may write."""

    read: tuple[str, ...]
    listed: tuple[str, ...]
    write: tuple[str, ...]
    ports: tuple[int, ...] = ()
    """The only TCP ports that it may connect to, on any host; it may use the network in no other way; empty: in any."""


def plan_confinement(
    read: Iterable[Path], private: Iterable[Path], scratch: Path, python_path: Iterable[str]
) -> Confinement:
    """Compute the paths that workers may see: the system, Python and `read`, without those that are private."""
    hidden = [path.resolve() for path in private]
    package = Path(__file__).resolve().parents[1]
    roots = [*map(Path, _SYSTEM), Path(sys.prefix), Path(sys.base_prefix), *map(Path, python_path), package, *read]
    # /proc/self means another folder in every process, so it must not be resolved here.
    allowed: list[Path] = [Path("/proc/self")]
    listed: list[Path] = []
    for root in roots:
        # If our package is not installed, the folder around it is a whole project; the package alone is enough.
        if root.resolve() != package.parent or root.name.endswith("-packages"):
            _keep_out(root.resolve(), hidden, allowed, listed)
    return Confinement(_texts(allowed), _texts(listed), (str(scratch), *_DEVICES))


def _texts(paths: Iterable[Path]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(path) for path in paths))


def _keep_out(root: Path, hidden: list[Path], allowed: list[Path], listed: list[Path]) -> None:
    """Add the entries of `root` outside hidden folders to `allowed`, and the folders between to `listed`."""
    if any(root.is_relative_to(path) for path in hidden):
        return
    if not any(path.is_relative_to(root) for path in hidden):
        allowed.append(root)
        return
    listed.append(root)
    for entry in sorted(root.iterdir()):
        # The target of a link is allowed or hidden by its own path.
        if not entry.is_symlink():
            _keep_out(entry, hidden, allowed, listed)


def confine(limits: Confinement) -> dict[str, str]:
    """Confine the calling process permanently; return the measures that failed, each with the reason."""
    no_new_privileges()
    missing: dict[str, str] = {}

    def attempt(what: str, step: Callable[[], None]) -> None:
        try:
            step()
        except OSError as error:
            missing[what] = str(error)

    attempt(FILES, lambda: _confine_files(limits, missing))
    attempt(SOCKETS, lambda: restrict_sockets(bool(limits.ports)))
    if limits.ports and SOCKETS in missing:
        missing[NETWORK] = missing[SOCKETS]
    drop_capabilities()
    return missing


def _confine_files(limits: Confinement, missing: dict[str, str]) -> None:
    missing[SIGNALS] = "Landlock scopes signals from Linux 6.12 on"
    if limits.ports:
        missing[NETWORK] = "Landlock knows TCP ports from Linux 6.7 on"
    version = landlock_version()
    everything = Access.FIRST_VERSION | Access.REFER | Access.TRUNCATE
    restrict_files(
        version,
        [
            *((path, Access.READ) for path in limits.read),
            *((path, Access.READ_DIR) for path in limits.listed),
            *((path, everything) for path in limits.write),
        ],
        limits.ports,
    )
    if version >= 6:
        del missing[SIGNALS]
    if version >= _FIRST_WITH_PORTS:
        missing.pop(NETWORK, None)


def find_environment_problems(names: Iterable[str]) -> Iterator[str]:
    """Yield each mistake in the names of the variables for functions."""
    for name in names:
        if name in ("HOME", "TMPDIR", "PYTHONPATH", *_FIXED):
            yield f"--reward-environment {name}: functions have a value of their own for it; leave it out"
        elif name not in os.environ:
            yield f"--reward-environment {name}: it is not set here; export it first, or leave it out"


def build_environment(names: Sequence[str], scratch: Path, python_path: Iterable[str]) -> dict[str, str]:
    """Build the whole environment of a worker: the variables that programs need, and those of --reward-environment."""
    if found := list(find_environment_problems(names)):
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


def find_python_path() -> list[str]:
    """Return the folders where a worker finds modules: this process's, except for the current folder."""
    package_parent = str(Path(__file__).resolve().parents[2])
    found = [os.path.abspath(entry) for entry in sys.path if entry and os.path.abspath(entry) != os.getcwd()]
    standard = (sys.base_prefix, sys.prefix)
    extra = [entry for entry in found if not entry.startswith(standard)]
    return list(dict.fromkeys([package_parent, *extra]))


_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
# These numbers are the same on every architecture: newer system calls share one numbering.
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_IO_URING_SETUP = 425
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_MACHINES = {
    "x86_64": {
        "socket": 41,
        "socketpair": 53,
        "listen": 50,
        "setsockopt": 54,
        "sendto": 44,
        "sendmsg": 46,
        "sendmmsg": 307,
    },
    "aarch64": {
        "socket": 198,
        "socketpair": 199,
        "listen": 201,
        "setsockopt": 208,
        "sendto": 206,
        "sendmsg": 211,
        "sendmmsg": 269,
    },
}
"""The numbers of the system calls that are filtered, by the kernel's name of the architecture."""
_CAP_DAC_OVERRIDE = 1
_RULE_OF_PATH, _RULE_OF_PORT = 1, 2
_BIND_TCP, _CONNECT_TCP = 1 << 0, 1 << 1
_FIRST_WITH_PORTS = 4


class Access(enum.IntFlag):
    """Landlock's rights over files, and the versions of its interface that added the later ones."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_FILE = 1 << 5
    MAKE_REG = 1 << 8
    REFER = 1 << 13
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15
    FIRST_VERSION = (1 << 13) - 1
    READ = EXECUTE | READ_FILE | READ_DIR
    OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV


class RefusedCall(NamedTuple):
    """A system call that is refused for the value of an argument."""

    call: str
    argument: int = 0
    """The number of the argument."""
    values: tuple[int, ...] = ()
    is_refused: bool = False
    """True: these values are refused; False: all others are."""
    mask: int = 0xFFFFFFFF
    """The bits of the argument that are compared."""


_TYPE_BITS = 0xF
_FAST_OPEN = 0x20000000
_TCP_ULP = 31
_REFUSALS_OF_ANY = (
    RefusedCall("socket", 0, (socket.AF_UNIX,), True),
    # A datagram socket of a pair can send to any other one.
    RefusedCall("socketpair", 1, (socket.SOCK_STREAM, socket.SOCK_SEQPACKET), False, _TYPE_BITS),
)
_REFUSALS_BUT_TCP = (
    RefusedCall("socket", 0, (socket.AF_INET, socket.AF_INET6), False),
    RefusedCall("socket", 1, (socket.SOCK_STREAM,), False, _TYPE_BITS),
    RefusedCall("socket", 2, (0, socket.IPPROTO_TCP), False),
    RefusedCall("listen", 0, (), False),
    RefusedCall("sendto", 3, (_FAST_OPEN,), True, _FAST_OPEN),
    RefusedCall("sendmsg", 2, (_FAST_OPEN,), True, _FAST_OPEN),
    RefusedCall("sendmmsg", 3, (_FAST_OPEN,), True, _FAST_OPEN),
    # A TCP socket becomes one of SMC with it, whose connections Landlock does not check.
    RefusedCall("setsockopt", 2, (_TCP_ULP,), True),
)


def _libc() -> ctypes.CDLL:
    if sys.platform != "linux":
        raise OSError(f"{sys.platform} is not Linux")
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _prctl(option: int, argument: int, what: str) -> None:
    _check(_libc().prctl(option, ctypes.c_ulong(argument), *[ctypes.c_ulong(0)] * 3), what)


def signal_at_parents_death(number: int) -> None:
    """Have the kernel send this signal to the calling process when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, number, "PR_SET_PDEATHSIG")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, "PR_SET_CHILD_SUBREAPER")


def new_process_namespace() -> None:
    """Make the next child the first process of a namespace: all processes in it end with that child."""
    user, group = os.geteuid(), os.getegid()
    flags = _CLONE_NEWPID if user == 0 else _CLONE_NEWPID | _CLONE_NEWUSER
    _check(_libc().unshare(flags), "unshare")
    if flags & _CLONE_NEWUSER:
        for name, content in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(content)


def no_new_privileges() -> None:
    """Keep this process, and every process that it starts, from gaining privileges."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")


def drop_capabilities() -> None:
    """Give up root's powers, except for reading files of any mode, since root may not own them."""
    keep = 1 << _CAP_DAC_OVERRIDE if os.geteuid() == 0 else 0
    header = struct.pack("=Ii", 0x20080522, 0)
    data = struct.pack("=IIIIII", keep, keep, 0, 0, 0, 0)
    _check(_libc().capset(header, data), "capset")


def landlock_version() -> int:
    """Return the version of Landlock's interface; raise an OSError with the reason if it is missing."""
    return _check(_libc().syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1), "Landlock")


def restrict_files(version: int, allowed: Sequence[tuple[str, Access]], ports: Sequence[int] = ()) -> None:
    """Deny access to all files but these; from version 6 on, also signals and abstract sockets to outside processes.

    With ports, from version 4 on, also TCP connections to all others, and listening.
    """
    newer = {2: Access.REFER, 3: Access.TRUNCATE, 5: Access.IOCTL_DEV}
    handled = Access.FIRST_VERSION
    for since, access in newer.items():
        handled |= access if version >= since else Access(0)
    scoped = 3 if version >= 6 else 0
    handled_ports = _BIND_TCP | _CONNECT_TCP if ports and version >= _FIRST_WITH_PORTS else 0
    size = 24 if version >= 6 else 16 if version >= _FIRST_WITH_PORTS else 8
    attributes = struct.pack("=QQQ", handled, handled_ports, scoped)[:size]
    libc = _libc()
    rules = _check(
        libc.syscall(_LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0), "Landlock's rules"
    )
    try:
        for path, access in allowed:
            _allow(libc, rules, path, access & handled)
        for port in ports if handled_ports else ():
            rule = struct.pack("=QQ", _CONNECT_TCP, port)
            _check(libc.syscall(_LANDLOCK_ADD_RULE, rules, _RULE_OF_PORT, rule, 0), f"Landlock's rule for port {port}")
        _check(libc.syscall(_LANDLOCK_RESTRICT_SELF, rules, 0), "Landlock")
    finally:
        os.close(rules)


def _allow(libc: ctypes.CDLL, rules: int, path: str, access: int) -> None:
    try:
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        # A path that does not exist needs no rule.
        return
    try:
        access = access if os.path.isdir(path) else access & Access.OF_FILES
        rule = struct.pack("=Qi", access, file)
        _check(libc.syscall(_LANDLOCK_ADD_RULE, rules, _RULE_OF_PATH, rule, 0), f"Landlock's rule for {path}")
    finally:
        os.close(file)


def restrict_sockets(is_only_tcp: bool) -> None:
    """Refuse new unix sockets, which Landlock's rules about files do not cover.

    With `is_only_tcp`, also refuse what Landlock's rules about ports do not cover, since these check `connect` and
    `bind` of TCP alone: other families and protocols, data in a connection's first packet, and listening. Connected
    pairs of unix sockets stay allowed. io_uring is refused, because it makes sockets without the filtered calls.
    """
    refusals = _REFUSALS_OF_ANY + (_REFUSALS_BUT_TCP if is_only_tcp else ())
    refuse_calls(refusals, _MACHINES, (_IO_URING_SETUP,))


def refuse_calls(
    refusals: Iterable[RefusedCall], machines: Mapping[str, Mapping[str, int]], missing: Iterable[int]
) -> None:
    """Refuse system calls; `machines` has their numbers, and no number if an architecture lacks the call.

    Those of the numbers `missing` fail as if the kernel lacked them.
    """
    if platform.machine() not in machines:
        raise OSError(f"not written for {platform.machine()}")
    machine = machines[platform.machine()]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    allow, denied, unknown = 0x7FFF0000, 0x00050000 | 13, 0x00050000 | 38
    # Code, steps to skip if true, steps to skip if false, operand. Calls from 0x40000000 on are x86's second numbering.
    program = [
        (load, 0, 0, 4),
        (equal, 1, 0, _ARCHITECTURES[platform.machine()]),
        (answer, 0, 0, denied),
        (load, 0, 0, 0),
        (at_least, 0, 1, 0x40000000),
        (answer, 0, 0, denied),
    ]
    for number in missing:
        program += [(equal, 0, 1, number), (answer, 0, 0, unknown)]
    for refusal in refusals:
        if refusal.call in machine:
            program += _filter(machine[refusal.call], refusal, denied)
    program.append((answer, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    header = struct.pack("@HP", len(program), ctypes.addressof(code))
    libc = _libc()
    _check(libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), header, 0, 0), "seccomp")


def _filter(number: int, refusal: RefusedCall, denied: int) -> list[tuple[int, int, int, int]]:
    """Build the steps of a refusal; they begin and end with the call's number loaded."""
    load, mask, equal, jump, answer = 0x20, 0x54, 0x15, 0x05, 0x06
    values = refusal.values
    # A value that is listed skips the other ones and one step more: the answer, or the jump over it.
    compared = [(equal, len(values) - place, 0, value) for place, value in enumerate(values)]
    skip = [(jump, 0, 0, 1)] if refusal.is_refused else []
    steps = [(load, 0, 0, 16 + 8 * refusal.argument), (mask, 0, 0, refusal.mask), *compared, *skip]
    steps += [(answer, 0, 0, denied), (load, 0, 0, 0)]
    return [(equal, 0, len(steps), number), *steps]

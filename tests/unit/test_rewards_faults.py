"""Reward functions that fail or mean harm: the group fails in time, no other group notices, nothing is left."""

import asyncio
import contextlib
import errno
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import megatron_rl
from megatron_rl.confined.confinement import (
    FILES,
    NETWORK,
    SIGNALS,
    SOCKETS,
    find_python_path,
    landlock_version,
    plan_confinement,
)
from megatron_rl.errors import ExitCode, PlatformError
from megatron_rl.rewards.types import RewardError
from tests.processes import ROOT
from tests.reward_pools import in_event_loop, request, rewarding, score, wait_until

pytestmark = pytest.mark.each_change

FAULTS = {
    "raises": ("raise KeyError('lost')", r"KeyError: 'lost' \(.*mine.py:10\)"),
    "exits politely": ("import sys; sys.exit(7)", "SystemExit: 7"),
    "hangs": ("import time; time.sleep(60)", "did not end within 1 seconds"),
    "spins": ("while True: pass", "did not end within 1 seconds"),
    "ignores signals": (
        "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(60)",
        "did not end within",
    ),
    "gives too few": ("return [1.0]", "returned 1 rewards for 2 completions"),
    "gives too many": ("return [1.0] * 10**6", "returned 1000000 rewards for 2 completions"),
    "gives text": ("return ['1', '2']", r"completion 0 got '1' \(str\)"),
    "gives NaN": ("return [1.0, float('nan')]", "completion 1 got nan"),
    "gives nothing": ("return None", "returned NoneType"),
    "ends its process": ("import os; os._exit(5)", "ended with exit code 5"),
    "is killed": ("import os; os.kill(os.getpid(), 9); import time; time.sleep(9)", "SIGKILL|did not end"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV"),
    "aborts with a last word": (
        "import sys, os; print('goodbye', file=sys.stderr, flush=True); os._exit(1)",
        "exit code 1; its last line: goodbye",
    ),
    "closes everything": ("import os; os.closerange(0, 100)", "ended with exit code|closed the channel"),
    "recurses": ("return fn(completions, bad)", "RecursionError"),
    "writes into the channel": (
        "write_everywhere(b'{}\\n')\n    return [1.0, 1.0]",
        "wrote into the channel",
    ),
    "floods the channel": (
        "write_everywhere(b'x' * (1 << 22))\n    return [1.0, 1.0]",
        "wrote into the channel",
    ),
    "asks for a column that is not there": ("pass", "it asks for gold"),
}
CODE = """
import os
def write_everywhere(data):
    for number in range(3, 20):
        try: os.write(number, data)
        except OSError: pass
def fn(completions, bad=None, **kwargs):
    if not (bad and bad[0]):
        return [float(len(text)) for text in completions]
    {body}
"""


def plant(folder, body, head=""):
    """Write a function that does this for the group that is bad; return its spec."""
    file = folder / "mine.py"
    file.write_text(head + CODE.format(body=body))
    return f"{file}:fn"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_its_group_by_name_in_time_and_no_other(tmp_path, fault):
    body, message = FAULTS[fault]
    spec = plant(tmp_path, body)
    if "asks for" in fault:
        (tmp_path / "mine.py").write_text("def fn(completions, gold): return [1.0, 2.0]")
    groups = [request(index, bad=index == 3, **({"gold": 1} if index != 3 else {})) for index in range(8)]
    results = score([f"{spec}@1"], *groups)
    error = results.pop(3)
    assert isinstance(error, RewardError), error
    assert error.exit_code == ExitCode.RUN
    assert re.search(f"reward fn failed for prompt 3: .*({message})", str(error)), error
    assert [result.rewards for result in results] == [[1.0, 2.0]] * 7


ERRORS = {
    "of several lines": ("raise ValueError('first\\nsecond')", "ValueError: first (FILE:4)"),
    "with a note": (
        "error = ValueError('bad'); error.add_note('</last_exception>'); raise error", "ValueError: bad (FILE:4)",
    ),
    "raised while another was handled": (
        "try: {}['key']\n    except KeyError: int('x')",
        "ValueError: invalid literal for int() with base 10: 'x'; caused by KeyError: 'key' (FILE:5)",
    ),
    "that hides another": (
        "try: {}['key']\n    except KeyError: raise RuntimeError('plain') from None", "RuntimeError: plain (FILE:5)",
    ),
    "in a group": (
        "raise ExceptionGroup('all', [ValueError('inner')])",
        "ExceptionGroup: all (1 sub-exception); caused by ValueError: inner (FILE:4)",
    ),
    "that no tokenizer reads": ("raise ValueError('\\ud83d')", "ValueError: \\ud83d (FILE:4)"),
    "without a text": ("assert completions == []", "AssertionError (FILE:4)"),
    "whose text fails": (
        "class Bad(Exception):\n        def __str__(self): raise TypeError\n    raise Bad", "fn.<locals>.Bad (FILE:6)",
    ),
}  # fmt: skip


def test_an_error_says_class_first_line_and_cause_and_its_traceback_is_in_the_log(tmp_path):
    functions = [f"def fn{number}(completions):\n    {body}" for number, (body, _) in enumerate(ERRORS.values())]
    files = []
    for number, function in enumerate(functions):
        file = tmp_path / f"mine{number}.py"
        file.write_text(f"# A reward.\n\n{function}\n".replace(f"fn{number}", "fn"))
        files.append(file)
    log = tmp_path / "log"
    (result,) = score([f"{file}:fn" for file in files], request(), log=log, on_error=0.0)
    reasons = [*result.errors.values()]
    assert reasons == [said.replace("FILE", str(file)) for (_, said), file in zip(ERRORS.values(), files, strict=True)]
    written = log.read_text()
    assert "ValueError: first\nsecond\n" in written
    assert "ValueError: bad\n</last_exception>\n" in written


@in_event_loop
async def test_a_slow_function_delays_its_own_group_only(tmp_path):
    done = tmp_path / "others-are-done"
    waiting = f"import pathlib, time\n    while not pathlib.Path({str(done)!r}).exists(): time.sleep(0.01)"
    spec = plant(tmp_path, f"{waiting}\n    return [0.0, 0.0]")
    async with rewarding([spec]) as pool:
        slow = asyncio.create_task(pool.score(request(0, bad=True)))
        await asyncio.sleep(0)
        await asyncio.gather(*(pool.score(request(index)) for index in range(1, 20)))
        assert not slow.done()
        done.touch()
        assert (await slow).rewards == [0.0, 0.0]


def test_printing_without_end_neither_blocks_nor_reaches_the_channel(tmp_path):
    spec = plant(tmp_path, "print('{\"job\": 1}\\n' * 2**21); return [0.0, 0.0]")
    log = tmp_path / "log"
    results = score([spec], request(0, bad=True), request(1), log=log)
    assert [result.rewards for result in results] == [[0.0, 0.0], [1.0, 2.0]]
    assert log.stat().st_size < 17 << 20
    assert "what follows is dropped" in log.read_text()


def test_printing_that_finds_no_room_is_dropped_and_said(tmp_path, caplog):
    spec = plant(tmp_path, "print('x' * 2**22); os._exit(3)")
    results = score([spec], request(0, bad=True), request(1), log=Path("/dev/full"))
    assert "exit code 3" in str(results[0])
    assert results[1].rewards == [1.0, 2.0]
    assert caplog.text.count("/dev/full cannot be written: No space left on device") == 1


@in_event_loop
async def test_a_value_for_failures_stands_for_the_whole_group_and_is_counted(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import os, time\n"
        "def dies(completions, how, **kwargs):\n"
        "    if how[0] == 'die': os._exit(1)\n"
        "    if how[0] == 'hang': time.sleep(60)\n"
        "    if how[0] == 'raise': raise ValueError('no')\n"
        "    return [1.0] * len(completions)\n"
        "def other(completions, **kwargs): return [10.0] * len(completions)\n"
    )
    async with rewarding([f"{file}:dies=2@0.5", f"{file}:other"], on_error=-0.5) as pool:
        hows = ["well", "die", "hang", "raise"]
        results = await asyncio.gather(*(pool.score(request(0, how=how)) for how in hows))
        assert pool.errors == {"dies": 3}
    assert results[0].rewards == [12.0, 12.0]
    for result in results[1:]:
        assert result.rewards == [9.0, 9.0]
        assert result.components["dies"] == [-0.5, -0.5]
        assert list(result.errors) == ["dies"]


@pytest.mark.parametrize("later", ["lambda: os._exit(9)", "lambda: write_everywhere(b'{}\\n')"])
@in_event_loop
async def test_what_a_group_does_to_its_worker_later_does_not_fail_the_next_group(tmp_path, later):
    spec = plant(tmp_path, f"threading.Timer(0.1, {later}).start(); return [0.0, 0.0]", "import threading\n")
    async with rewarding([spec], num_workers=1) as pool:
        (process,) = pool._processes
        assert (await pool.score(request(0, bad=True))).rewards == [0.0, 0.0]
        await wait_until(lambda: process.is_worn)
        assert (await pool.score(request(1))).rewards == [1.0, 2.0]


@in_event_loop
async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path):
    spec = plant(tmp_path, "os._exit(1)")
    async with rewarding([spec], num_workers=1) as pool:
        for wait in (0.0, 0.001, 0.005, 0.02, 0.05):
            with pytest.raises(RewardError):
                await pool.score(request(bad=True))
            task = asyncio.create_task(pool.score(request()))
            await asyncio.sleep(wait)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert (await pool.score(request())).rewards == [1.0, 2.0]


@in_event_loop
async def test_a_worker_that_was_killed_while_it_had_nothing_to_do_is_replaced(tmp_path):
    spec = plant(tmp_path, "pass")
    others = set(psutil.Process().children())
    async with rewarding([spec]) as pool:
        for process in set(psutil.Process().children()) - others:
            process.kill()
        await asyncio.sleep(0.3)
        results = await asyncio.gather(*(pool.score(request(index)) for index in range(3)))
    assert [result.rewards for result in results] == [[1.0, 2.0]] * 3


@in_event_loop
async def test_a_worker_that_cannot_be_started_is_named_and_the_next_group_tries_again(tmp_path, monkeypatch):
    spec = plant(tmp_path, "os._exit(1)")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with rewarding([spec], num_workers=1) as pool:
        with pytest.raises(RewardError, match="exit code 1"):
            await pool.score(request(bad=True))
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            with pytest.raises(RewardError) as raised:
                await pool.score(request(5))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        text = str(raised.value)
        assert (await pool.score(request())).rewards == [1.0, 2.0]
    reason = "a process for reward functions cannot be started: Too many open files; make room for it"
    assert text.startswith(f"reward fn failed for prompt 5: {reason}")
    assert "correct the function" not in text

    async def refuse(*arguments, **keywords):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    with pytest.raises(PlatformError, match="cannot be started: Resource temporarily unavailable; make room for it"):
        async with rewarding([spec]):
            pass


def test_memory_beyond_the_limit_fails_the_group(tmp_path):
    spec = plant(tmp_path, "return [float(len(bytearray(1 << 30)))] * 2")
    [error, result] = score([spec], request(0, bad=True), request(1), memory_bytes=512 << 20)
    assert "MemoryError" in str(error)
    assert result.rewards == [1.0, 2.0]


@pytest.fixture
def token(tmp_path, monkeypatch) -> Iterator[Path]:
    """Write a token as the sidecar keeps it: in the run's folder, beside the reward file; and in the environment."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    file = folder / "token"
    file.touch(0o600)
    file.write_text("s3cret")
    (folder / "journal").write_text("groups")
    (tmp_path / "link").symlink_to(file)
    monkeypatch.setenv("MEGATRON_RL_TOKEN", "s3cret")
    with file.open() as held:
        os.set_inheritable(held.fileno(), True)
        yield file


ATTACKS = {
    "reads the token": ("open({token!r}).read()", "PermissionError"),
    "reads the token through a link": ("open({link!r}).read()", "PermissionError"),
    "lists the folder's neighbour": ("__import__('os').listdir('/root/..')", "PermissionError"),
    "reads the token by way of another program": (
        "import subprocess; subprocess.run(['cat', {token!r}], check=True)",
        "CalledProcessError",
    ),
    "links to the token": ("__import__('os').link({token!r}, __import__('os').environ['TMPDIR'] + '/t')", "Error"),
    "changes the journal": ("open({journal!r}, 'a').write('x')", "PermissionError"),
    "removes the journal": ("__import__('os').remove({journal!r})", "PermissionError"),
    "replaces its own file": ("open(__file__, 'w').write('')", "PermissionError"),
    "reads its parent's environment": ("open('/proc/{parent}/environ').read()", "PermissionError"),
    "reads its parent's memory": ("open('/proc/{parent}/mem', 'rb')", "PermissionError"),
    "reads its parent's open files": ("open('/proc/{parent}/fd/{held}').read()", "PermissionError"),
    "may signal its parent": ("import os; os.kill({parent}, 0)", "PermissionError|ProcessLookupError"),
    "kills its keeper": (
        "import os; os.kill(os.getppid(), 9); import time; time.sleep(9)",
        "Error|SIGKILL|did not end",
    ),
    "kills all that it may": (
        "import os; assert os.getpid() == 1, 'only in a namespace'; os.kill(-1, 9); raise OSError('no victim')",
        "ProcessLookupError|no victim|only in a namespace",
    ),
    "continues its parent": ("import os; os.kill({parent}, 18)", "PermissionError|ProcessLookupError"),
    "connects to an engine": (
        "import socket; socket.socket(socket.AF_UNIX).connect({socket!r})",
        "PermissionError",
    ),
    "looks for root's powers": (
        "raise OSError([line for line in open('/proc/self/status') if line.startswith(('CapEff', 'CapPrm'))])",
        r"CapPrm:\\t0+[02]\\n', 'CapEff:\\t0+[02]\\n",
    ),
    "traces its parent": (
        "import ctypes, os\n    c = ctypes.CDLL(None, use_errno=True)\n"
        "    if c.ptrace(16, {parent}, None, None) < 0: raise OSError(ctypes.get_errno(), 'refused')",
        "refused",
    ),
    "leaves by a mount": (
        "import ctypes\n    c = ctypes.CDLL(None, use_errno=True)\n"
        "    if c.mount(b'/', b'/tmp', None, 4096, None) < 0: raise OSError('refused')",
        "refused",
    ),
    "looks for secrets in its environment": (
        "import os; assert not any('s3cret' in v for v in os.environ.values()); raise OSError('none there')",
        "none there",
    ),
    "looks for its parent's files among its own": (
        "import os\n    links = [os.readlink(f'/proc/self/fd/{{n}}') for n in range(50)"
        " if os.path.lexists(f'/proc/self/fd/{{n}}')]\n"
        "    raise OSError(sorted({{link.split(':')[0] for link in links}}))",
        r"OSError: \['/dev/null', 'anon_inode', 'pipe', 'socket'\]",
    ),
}


def needs_landlock():
    try:
        version = landlock_version()
    except OSError as error:
        pytest.skip(f"this kernel: {error}")
    if version < 6:
        pytest.skip(f"this kernel has version {version} of Landlock, which does not scope signals")


@pytest.mark.parametrize("namespace", [True, False])
def test_attacks_of_a_reward_function_are_refused(tmp_path, token, namespace):
    """Run all attacks in one pool, one group each; each reports that it was refused."""
    needs_landlock()
    with token.open() as held:
        os.set_inheritable(held.fileno(), True)
        facts = {
            "token": str(token),
            "link": str(tmp_path / "link"),
            "journal": str(token.parent / "journal"),
            "socket": str(token.parent / "engine.sock"),
            "parent": os.getpid(),
            "held": held.fileno(),
        }
        lines = [f"def attack_{n}():\n    {code.format(**facts)}" for n, (code, _) in enumerate(ATTACKS.values())]
        lines.append(
            "def fn(completions, attack, **kwargs):\n    globals()[f'attack_{attack[0]}']()\n    return [0.0] * 2"
        )
        file = tmp_path / "mine.py"
        file.write_text("\n".join(lines))
        groups = [request(index, attack=index) for index in range(len(ATTACKS))]
        results = score([f"{file}:fn@2"], *groups, private=(token.parent,), namespace=namespace)
    for name, result, (_, message) in zip(ATTACKS, results, ATTACKS.values(), strict=True):
        assert isinstance(result, RewardError), f"{name}: nothing stopped it: {result}"
        assert re.search(message, str(result)), f"{name}: {result}"
    assert token.read_text() == "s3cret"


@in_event_loop
async def test_a_worker_that_is_told_to_end_many_times_still_ends_all_that_it_started(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import os, time\n"
        "def fn(completions, **kwargs):\n"
        "    for _ in range(5):\n"
        "        if os.fork() == 0: os.setsid(); time.sleep(900)\n"
        "    return [1.0] * len(completions)\n"
    )

    others = set(psutil.Process().children())
    async with rewarding([f"{file}:fn"], num_workers=4, namespace=False) as pool:
        await asyncio.gather(*(pool.score(request()) for _ in range(4)))
        for keeper in set(psutil.Process().children()) - others:
            with contextlib.suppress(ProcessLookupError):
                for _ in range(20000):
                    os.kill(keeper.pid, signal.SIGTERM)


def test_a_kernel_without_the_calls_leaves_its_reasons():
    code = """
from megatron_rl.confined import confinement
def refuse(*arguments): raise OSError(38, "Landlock: Function not implemented")
confinement.landlock_version = confinement.restrict_sockets = refuse
limits = confinement.Confinement((), (), (), (80,))
print(confinement.confine(limits))
"""
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(repr(name) in printed for name in (FILES, SIGNALS, SOCKETS, NETWORK))
    assert "Function not implemented" in printed


def test_a_private_folder_inside_a_readable_one_stays_unreadable(tmp_path):
    for name in ("run/private", "run/open", "data"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "shortcut").symlink_to(tmp_path / "run/private")
    limits = plan_confinement([tmp_path], [tmp_path / "run/private"], tmp_path / "data", [])
    mine = [path for path in limits.read if path.startswith(str(tmp_path))]
    assert sorted(mine) == [f"{tmp_path}/data", f"{tmp_path}/run/open"]
    assert limits.listed == (str(tmp_path), f"{tmp_path}/run")
    assert not any(path == str(ROOT) for path in limits.read)


def test_functions_find_and_see_this_package_and_not_the_project_that_it_lies_in(tmp_path):
    package = Path(megatron_rl.__file__).resolve().parent
    assert find_python_path()[0] == str(package.parent)
    limits = plan_confinement([], [], tmp_path, find_python_path())
    assert str(package) in limits.read
    assert not {str(folder) for folder in package.parents} & set(limits.read)

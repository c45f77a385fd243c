"""Code of a policy, as an enemy writes it: ways out of its process, ways to stay, and ways to be paid for nothing."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_rl.errors import PlatformError
from megatron_rl.rewards import sandbox
from megatron_rl.rewards.sandbox import Result, run_python, score_tests
from tests.agents import acting
from tests.processes import ROOT
from tests.reward_pools import in_event_loop, request, rewarding, write
from tests.unit.test_network_confinement import AGENT, Receivers

# Far away: no test waits for it.
SECONDS = 60.0
PRELUDE = """
import ctypes, errno, fcntl, json, os, resource, signal, struct, subprocess, threading, time
LIBC = ctypes.CDLL(None, use_errno=True)
PLACES = json.loads(input())
PARENT, SECRET, OUTSIDE = PLACES["parent"], PLACES["secret"], PLACES["outside"]
QUEUE = f"megatron-rl-{os.getpid()}".encode()

def call(function, *arguments):
    if (result := function(*arguments)) == -1:
        raise OSError(ctypes.get_errno(), "refused")
    return result

def wait(pid):
    if pid == 0: os._exit(0)
    os.waitpid(pid, 0)

def own(descriptor):
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, PARENT)

def make(path):
    with open(path, "x"): pass
    os.unlink(path)

def run_thread():
    thread = threading.Thread(target=print)
    thread.start()
    thread.join()
"""
# Each is done without harm where it is allowed: a signal 0 only asks whether a process may be killed.
WAYS_OUT = {
    "read a file": "open(SECRET).read()",
    "list a folder": "os.listdir(os.path.dirname(SECRET))",
    "list the root": "os.listdir('/')",
    "write a file": "open(SECRET, 'r+')",
    "make a file": "make(OUTSIDE)",
    "make a file in the temporary folder": "make('/tmp/' + os.path.basename(OUTSIDE))",
    "shared memory of a name": "make('/dev/shm/' + os.path.basename(OUTSIDE))",
    "a link to a file": "os.link(SECRET, OUTSIDE); os.unlink(OUTSIDE)",
    "a symbolic link": "os.symlink(SECRET, 'link'); open('link').read()",
    "move a file in": "os.rename(SECRET, 'mine'); os.rename('mine', SECRET)",
    "a folder of its own": "os.mkdir('folder')",
    "remove a file": "make('gone')",
    "replace a file": "open('old', 'x').close(); os.replace('old', 'new')",
    "truncate": "os.truncate(SECRET, os.path.getsize(SECRET))",
    "truncate by opening": "os.close(os.open(SECRET, os.O_RDONLY | os.O_TRUNC))",
    "mode": "os.chmod(SECRET, 0o600)",
    "mode of a library": "os.chmod(os.__file__, os.stat(os.__file__).st_mode & 0o777)",
    "owner": "os.chown(SECRET, os.getuid(), os.getgid())",
    "times": "os.utime(SECRET)",
    "attribute": "os.setxattr(SECRET, 'user.a', b'x')",
    "what a process says": "open(f'/proc/{PARENT}/environ').read()",
    "the memory of a process": "open(f'/proc/{PARENT}/mem', 'rb').read(0)",
    "fork": "wait(os.fork())",
    "a system call's fork": "wait(call(LIBC.syscall, 57))",
    "spawn": "wait(os.posix_spawn('/bin/true', ['true'], {}))",
    "subprocess": "subprocess.run(['/bin/true'])",
    "system": "os.system('true') == 0 or call(lambda: -1)",
    "clone": "wait(call(LIBC.syscall, 56, 17, 0, 0, 0, 0))",
    "clone3": "wait(call(LIBC.syscall, 435, struct.pack('=8Q', 0, 0, 0, 0, 17, 0, 0, 0), 64))",
    "thread": "run_thread()",
    "signal": "os.kill(PARENT, 0)",
    "signal to a group": "os.killpg(os.getpgid(PARENT), 0)",
    "signal to all": "os.kill(-1, 0)",
    "signal with a value": "call(LIBC.sigqueue, PARENT, 0, 0)",
    "signal to a thread": "call(LIBC.syscall, 234, PARENT, PARENT, 0)",
    "signal to any thread": "call(LIBC.syscall, 200, PARENT, 0)",
    "signal by a descriptor": "signal.pidfd_send_signal(os.pidfd_open(PARENT), 0)",
    "signal from a file": "own(0)",
    "limits of a process": "resource.prlimit(PARENT, 7, resource.prlimit(PARENT, 7))",
    "priority": "os.setpriority(os.PRIO_PROCESS, PARENT, os.getpriority(os.PRIO_PROCESS, PARENT))",
    "processors": "os.sched_setaffinity(PARENT, os.sched_getaffinity(PARENT))",
    "outliving its parent": "call(LIBC.prctl, 1, 0, 0, 0, 0)",
    "system V memory of a process": "call(LIBC.shmat, PLACES['memory'], 0, 0)",
    "a lease": "fcntl.fcntl(os.open(SECRET, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "system V memory": "call(LIBC.shmctl, call(LIBC.shmget, 0, 4096, 0o1600), 0, 0)",
    "memory of a file": "os.close(os.memfd_create('a'))",
    "secret memory": "os.close(call(LIBC.syscall, 447, 0))",
    "a file without a name": "os.close(os.open('.', os.O_TMPFILE | os.O_RDWR))",
    "room in a file beyond its size": "call(LIBC.fallocate, os.open('room', os.O_CREAT | os.O_RDWR), 1, 0, 4096)",
    "a queue": "call(LIBC.mq_open, b'/' + QUEUE, 0o100, 0o600, 0); call(LIBC.mq_unlink, b'/' + QUEUE)",
}  # fmt: skip


def list_attacks(attacks: str) -> str:
    """Write a program that does each of the attacks, and prints the names of those that worked."""
    return f"""{PRELUDE}
for name, attack in {attacks}.items():
    try:
        exec(attack)
    except (OSError, RuntimeError):
        continue
    print(name, flush=True)
"""


@pytest.fixture
def places(tmp_path: Path) -> Iterator[str]:
    """Give the places of a secret and of a process that is not the code's, as a program reads them."""
    (tmp_path / "secret").write_text("")
    memory = ctypes.CDLL(None).shmget(0, 4096, 0o1600)
    places = {"secret": str(tmp_path / "secret"), "outside": str(tmp_path / "new"), "memory": memory}
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield json.dumps({**places, "parent": process.pid})
        process.kill()
    ctypes.CDLL(None).shmctl(memory, 0, 0)


def run_open(code: str, stdin: str, folder: Path) -> str:
    """Run code in a process that is not confined."""
    finished = subprocess.run(
        [sys.executable, "-c", code], input=stdin, cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def check(result: Result) -> str:
    assert result.returncode == 0, result
    return result.stdout


def test_no_way_leads_out_of_the_sandbox(places: str, tmp_path: Path) -> None:
    code = list_attacks(repr(WAYS_OUT))
    assert check(run_python(code, stdin=places, seconds=SECONDS)) == ""
    # Each attack works where nothing is confined, so the test can fail; some need a kernel or a system that has them.
    (tmp_path / "open").mkdir()
    worked = run_open(code, places, tmp_path / "open").splitlines()
    of_kernels = {"attribute", "a system call's fork", "clone", "clone3", "a queue", "secret memory"}
    of_disks = {"a file without a name", "room in a file beyond its size"}
    assert set(WAYS_OUT) - set(worked) <= of_kernels | of_disks


def patch_jail(patch: str) -> str:
    """Change the confinement of code before it is confined."""
    run = "runpy.run_module("
    return sandbox.RUN_MODULE.replace(run, f"from megatron_rl.confined import confinement\nconfinement.{patch}\n{run}")


def test_seccomp_refuses_by_itself_what_older_kernels_do_not_scope(
    places: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run each attack that is not about opening files without Landlock, which knows signals from Linux 6.12 on only."""
    names = list(WAYS_OUT)
    attacks = {name: WAYS_OUT[name] for name in names[names.index("truncate") :] if "/proc/" not in WAYS_OUT[name]}
    monkeypatch.setattr(sandbox, "RUN_MODULE", patch_jail("restrict_files = lambda *_: None"))
    assert check(run_python(list_attacks(repr(attacks)), stdin=places, seconds=SECONDS)) == ""


def test_no_socket_leads_out_of_the_sandbox() -> None:
    code = f"""{AGENT}
for name, attack in list_attacks(**json.loads(input())).items():
    try:
        attack()
    except OSError:
        continue
    print(name)
"""
    with contextlib.ExitStack() as stack:
        receivers = Receivers(stack, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="doors-"))))
        assert check(run_python(code, stdin=json.dumps(receivers.places), seconds=SECONDS)) == ""
        assert list(receivers.list_heard()) == []


def test_code_reads_its_input_and_files_and_writes_beside_them() -> None:
    code = """
import os, helper
with open("new", "w") as file: file.write(input() + open("data").read())
print(helper.VALUE, open("new").read(), sorted(os.listdir()))
"""
    result = run_python(code, stdin="a", files={"data": "b", "helper.py": "VALUE = 3"}, seconds=SECONDS)
    assert result == Result(0, "3 ab ['data', 'helper.py', 'main.py', 'new']\n", "", False, False)
    with pytest.raises(ValueError, match=r"files: '../x' must be a name without a folder"):
        run_python("", files={"../x": ""})


def test_code_gets_no_variable_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert "secret" not in check(run_python("import os; print(dict(os.environ))", seconds=SECONDS))


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(600)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        """
import os, signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
try: os.setsid()
except OSError: pass
for stream in range(64):
    try: os.close(stream)
    except OSError: pass
while True: time.sleep(600)
""",
        "import os; os.execv('/bin/sleep', ['sleep', '600'])",
        "import re; re.match('(a+)+$', 60 * 'a' + '!')",
    ],
)  # fmt: skip
def test_code_that_stays_is_ended(code: str) -> None:
    before = {*psutil.Process().children(recursive=True)}
    result = run_python(code, seconds=0.5)
    assert (result.timed_out, result.returncode) == (True, -signal.SIGKILL)
    assert {*psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize(
    ("code", "cut"),
    [
        ("while True: print('x' * 10**6)", True),
        ("import os\nwhile True: os.write(2, b'x' * 10**6)", True),
        ("while True: open(str(id(object())) + str(len(__import__('os').listdir())), 'w').close()", True),
        ("for n in range(10**9): open(str(n), 'w').write('x' * (1 << 20))", True),
        ("x = 'x' * (1 << 40)", False),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", False),
        ("open('x', 'w').write('x' * (1 << 30))", False),
        ("import os\nfor n in range(10**9): os.open('main.py', 0)", False),
        ("f = lambda: f()\nf()", False),
        ("import ctypes; ctypes.string_at(0)", False),
    ],
)
def test_what_code_uses_is_bounded(code: str, cut: bool) -> None:
    result = run_python(code, seconds=SECONDS, memory_mb=256)
    assert result.returncode != 0
    assert not result.timed_out
    assert result.cut == cut
    assert len(result.stdout) + len(result.stderr) <= 8 << 20


def test_code_ends_with_the_process_that_runs_it(tmp_path: Path) -> None:
    code = "from megatron_rl.rewards.sandbox import run_python; run_python('import time; time.sleep(600)', seconds=600)"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as runner:
        while not list_in(tmp_path, "main.py"):
            time.sleep(0.01)
        runner.kill()
    while list_in(tmp_path, ""):
        time.sleep(0.01)


def list_in(folder: Path, word: str) -> list[psutil.Process]:
    """List the processes whose current folder is below this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if Path(process.cwd()).is_relative_to(folder) and word in " ".join(process.cmdline()):
                found.append(process)
    return found


CODE = """
import json, urllib.request
from megatron_rl.rewards.sandbox import run_python, score_tests

def use():
    code = "import os, sys; print(input())\\ntry: os.fork()\\nexcept OSError: sys.exit(7)"
    result = run_python(code, stdin="in", seconds=60)
    assert (result.stdout, result.returncode) == ("in\\n", 7), result
    return score_tests("def f(x): return x + 1", ["assert f(1) == 2", "assert f(2) == 2"], seconds=60)

def score(completions, **columns):
    return [use() for _ in completions]

def act(base_url, api_key, model):
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "7 8"}]}).encode()
    call = urllib.request.Request(base_url + "/chat/completions", body, {"Authorization": "Bearer " + api_key})
    urllib.request.urlopen(call).read()
    return use()
"""


@in_event_loop
async def test_a_confined_reward_and_a_confined_agent_run_code(tmp_path: Path) -> None:
    async with rewarding([f"{write(tmp_path, CODE)}:score"], timeout=300) as pool:
        assert (await pool.score(request())).rewards == [0.5, 0.5]
    async with acting(tmp_path, CODE, agent_timeout=300.0) as world:
        (response,) = await world.act()
        assert response.reward == 0.5, response


RIGHT = "def f(x):\n    return [x, str(x + 1)]\n"
ASSERTS = ["assert f(1) == [1, '2']", "assert f(41) == [41, '42']"]


def test_tests_give_the_share_that_the_code_passes() -> None:
    assert score_tests(RIGHT, ASSERTS, seconds=SECONDS) == 1.0
    assert score_tests(RIGHT, [*ASSERTS, "assert f(1) == 2", "assert g(1) == 2"], seconds=SECONDS) == 0.5
    assert score_tests("def f(x):\n    print('?', end='')\n    return [x, str(x + 1)]", ASSERTS, seconds=SECONDS) == 1.0
    pairs = [["1 2\n", "3"], ["20 22", "42 \n\n"], ["1 1", "3"]]
    assert score_tests("print(sum(map(int, input().split())))", pairs, seconds=SECONDS) == pytest.approx(2 / 3)
    assert score_tests("print(input())\nraise SystemExit(1)", [["3", "3"]], seconds=SECONDS) == 0.0


def test_a_test_fails_no_other_test() -> None:
    code = "import os, sys\ndef f(x): return [str, list, sys.exit, id, os._exit][x](x)\nlist = print = repr = dict"
    tests = ["assert f(2) == 2", "assert f(0) == '0'", "assert g(0) == 1", "assert f(4) == 4", "assert f(0) == '0'"]
    assert score_tests(code, tests, seconds=SECONDS) == 0.2


EQUAL = {
    "Counter('aab')": "{'a': 2, 'b': 1}",
    "[defaultdict(list, {1: OrderedDict(a=frozenset('x'))})]": "[{1: {'a': {'x'}}}]",
    "namedtuple('Point', 'x y')(1, np.int64(2))": "(1, 2)",
    "{np.str_('a'): (np.float32(0.5), np.bool_(True))}": "{'a': (0.5, True)}",
    "[float('inf'), -np.inf, 'inf']": "[float('inf'), float('-inf'), 'inf']",
    "float('-inf')": "-math.inf",
    "set()": "set()",
}


def test_a_value_without_a_literal_passes_if_it_equals_one() -> None:
    code = f"import numpy as np\nfrom collections import *\nf = lambda n: [{', '.join(EQUAL)}][n]"
    tests = [f"assert f({n}) == {literal}" for n, literal in enumerate(EQUAL.values())]
    assert score_tests(code, tests, seconds=SECONDS) == 1.0
    others = ["assert f(0) == {'a': 2}", "assert f(2) == [1, 2]", "assert f(5) == float('inf')", "assert f(5) == 'inf'"]
    assert score_tests(code, others, seconds=SECONDS) == 0.0


def test_tests_end_at_the_first_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = []

    def run(code: str, stdin: str = "", **settings: object) -> Result:
        inputs.append(stdin)
        return Result(0, stdin, "", stdin == "loop", False)

    monkeypatch.setattr(sandbox, "run_python", run)
    assert score_tests("", ["assert f(1) == 1", ["a", "a"], ["loop", "loop"], ["b", "b"]]) == 0.25
    assert inputs == ["a", "loop"]


def test_only_white_space_at_the_ends_of_lines_and_of_the_output_is_ignored() -> None:
    expected = "  *\n\n ***"
    assert score_tests("print('  * \\n\\t\\n *** \\n\\n')", [["", expected]], seconds=SECONDS) == 1.0
    for output in ("*\n\n ***", "\n  *\n\n ***", "  *\n ***", "  *\n\n***"):
        assert score_tests(f"print({output!r})", [["", expected]], seconds=SECONDS) == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "",
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "def f(x",
        "class Equal:\n    __eq__ = lambda *_: True\n    __repr__ = lambda _: 'Equal()'\nf = lambda x: Equal()",
        "print('@answer 0 True\\n@answer 1 True\\n2 passed'); import os; os._exit(0)",
        "import builtins; builtins.repr = lambda _: 'True'\nf = 1",
        "f = lambda x: eval(open('main.py').read().split('==')[1])",
        "f = lambda x: [n for n in range(10**9)]",
        "f = lambda x: '(' * 10**5",
        "import atexit; atexit.register(print, '@answer 0', '-' * 10**5)\nf = id",
    ],
)
def test_code_that_computes_nothing_is_paid_nothing(code: str) -> None:
    assert score_tests(code, ASSERTS, seconds=2.0) == 0.0


def test_an_answer_of_any_length_is_not_parsed() -> None:
    assert sandbox._equals("1" + 100 * " ", 1)
    assert not sandbox._equals("1" + 1000 * " ", 1)


def test_what_is_expected_never_enters_the_process_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(code: str, **settings: object) -> Result:
        seen.append((code, settings))
        return run_python(code, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(sandbox, "run_python", run)
    assert score_tests("f = abs\nprint(6172839450)", ["assert f(-4) == 6172839450"], seconds=SECONDS) == 0.0
    assert score_tests("print(input())", [["a", "6172839451"]], seconds=SECONDS) == 0.0
    assert "6172839450" not in repr(seen).replace("print(6172839450)", "")
    assert "6172839451" not in repr(seen)


@pytest.mark.parametrize(
    "test", ["assert f(1)", "f(1) == 2", "assert f(1) == g(1)", "assert 1 < f(1) == 3", ["a"], [1, 2]]
)
def test_a_test_that_cannot_be_kept_outside_is_refused(test: object) -> None:
    with pytest.raises(ValueError, match=r"must be \[input, expected output\], or 'assert EXPRESSION == LITERAL'"):
        score_tests("", [test])


@pytest.mark.parametrize(
    "expression", ["isinstance(f(1), str)", "f(1)[0]", "(f(1) is None)", "math.isclose(f(1), 2)", "type(f(1)).mro()"]
)
def test_a_boolean_that_code_can_forge_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"compare the value itself, as in 'assert f\(2\) == 4', or with True a call"):
        score_tests("import builtins; builtins.isinstance = lambda *_: True\nf = id", [f"assert {expression} == True"])


def test_a_boolean_of_the_codes_own_function_is_compared() -> None:
    code = "def is_even(x): return x % 2 == 0\nclass Solution:\n    is_even = staticmethod(is_even)"
    tests = ["assert is_even(7) == False", "assert Solution().is_even(8) == True", "assert is_even(8) == False"]
    assert score_tests(code, tests, seconds=SECONDS) == pytest.approx(2 / 3)


def test_a_system_without_landlock_runs_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise OSError(38, "Landlock: Function not implemented")

    monkeypatch.setattr(sandbox, "landlock_version", fail)
    with pytest.raises(PlatformError, match=r"cannot be confined here: .*not implemented; it needs .* Linux 5.13"):
        run_python("print(1)")
    monkeypatch.undo()
    monkeypatch.setattr(sandbox, "RUN_MODULE", patch_jail("platform.machine = lambda: 'this machine'"))
    with pytest.raises(PlatformError, match=r"cannot be confined here: not written for this machine"):
        run_python("print(1)")


def test_a_start_that_is_slow_is_not_called_a_lack_of_confinement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "RUN_MODULE", "import time; time.sleep(600)")
    monkeypatch.setattr(sandbox, "_START_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match=r"did not start within 0.1 seconds, .* busy: lower --reward-workers"):
        run_python("print(1)")

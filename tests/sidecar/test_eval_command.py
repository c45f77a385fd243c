"""A program that evaluates the policy through a gateway: its calls, its figures, and the reasons why it has none."""

import contextlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from megatron_rl.config.rollout import RewardConfig, RolloutConfig
from megatron_rl.shared.protocol import wire
from megatron_rl.sidecar import launcher, parent
from megatron_rl.sidecar.engines import GroupRequest
from megatron_rl.sidecar.engines.scripted import ScriptedEngine
from megatron_rl.sidecar.eval_command import open_command
from megatron_rl.sidecar.evaluation import EvaluationFailed, Figures
from megatron_rl.sidecar.processes import read_process
from megatron_rl.sidecar.service import Conflict
from megatron_rl.sidecar.settings import SidecarSettings
from tests.processes import ROOT
from tests.reward_pools import wait_until
from tests.sidecar.scripted_service import Engines, engine, evaluation, serving, weights
from tests.sidecar.test_evaluation import decoded

PROGRAM = """
import json, os, urllib.error, urllib.request

def call(path, body):
    headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
    url = os.environ["OPENAI_BASE_URL"] + path
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code

def ask(text, **changes):
    chat = [{{"role": "user", "content": text}}]
    return call("/chat/completions", json.dumps({{"model": "policy", "messages": chat, **changes}}).encode())

def write(figures):
    with open(os.environ["EVAL_FIGURES"], "w") as file:
        json.dump(figures, file)

def read(answer):
    return answer["choices"][0]["message"]["content"]

{code}
"""


def make_command(folder: Path, code: str) -> str:
    file = folder / "program.py"
    file.write_text(PROGRAM.format(code=code))
    return shlex.join([sys.executable, str(file)])


async def measure(folder: Path, command: str, one: ScriptedEngine | None = None, **changes) -> Figures:
    """Evaluate version 0 on an engine, with a command; return its figures."""
    one = one or engine()
    rollout = RolloutConfig(engine="scripted", folder=folder, max_model_len=64)
    settings = SidecarSettings("cpu", None, 64, rollout, RewardConfig(), eval_command=command)
    async with contextlib.AsyncExitStack() as stack:
        run = await open_command(settings, Engines(one), stack)
        service = await stack.enter_async_context(serving(one, measure=run))
        await service.evaluate(evaluation(**changes))
        # The version stays until the command has ended.
        with pytest.raises(Conflict, match="evaluation of version 0 is running"):
            await service.publish(weights(1))
        return decoded(await service.evaluated(0, 60)).figures


async def test_each_call_of_a_program_is_a_rollout_of_the_evaluated_version_with_a_seed_of_its_own(tmp_path) -> None:
    requests: list[GroupRequest] = []
    one = engine(delay=lambda request: float(bool(requests.append(request))))
    code = """
answers = [read(ask("5 6 7")), read(ask("5 6 7")), read(ask("5 6 7", max_tokens=1))]
figures = {"version": int(os.environ["EVAL_VERSION"]), "different": len(set(answers)), "cut": len(answers[2].split())}
figures |= {"long": ask(" ".join(["5"] * 64)), "bad": call("/completions", b"{"), "warm": ask("5", temperature=0.5)}
ask("8")
write(figures)
"""
    figures = await measure(tmp_path, make_command(tmp_path, code), one)
    expected = {"version": 0, "different": 3, "cut": 1, "long": 400, "bad": 400, "warm": 400}
    # A program may count a refused call as a wrong answer.
    assert figures == expected | {"refused_calls": 3}
    calls = [request for request in requests if request.request_id.startswith("run-0-command-")]
    assert [tuple(call.prompt_tokens) for call in calls] == [(5, 6, 7)] * 3 + [(8,)]
    assert len({call.seed for call in calls}) == 4
    assert all(call.can_wait and call.sampling.temperature == 0 for call in calls)
    assert [call.sampling.max_tokens for call in calls] == [61, 61, 1, 63]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("echo $OPENAI_API_KEY; exit 3", "it ended with exit code 3; its output is in .*/logs/eval-command.log$"),
        ("true", "it must write a JSON object of numbers to the file that EVAL_FIGURES names: .*No such file"),
        ("echo none > $EVAL_FIGURES", "it must write a JSON object of numbers .*malformed"),
        ('echo \'{"a": "0"}\' > $EVAL_FIGURES', "it must write a JSON object of numbers .*Expected `float`, got `str`"),
        ("echo '{\"a\": NaN}' > $EVAL_FIGURES", "it must write a JSON object of numbers .*malformed"),
        ('echo \'{"a": 1, "b": 1e999}\' > $EVAL_FIGURES', "its figures must be finite numbers, and b$|out of range"),
        ("echo {} > $EVAL_FIGURES", "its figures must be finite numbers, and there are none$"),
    ],
)
async def test_a_program_without_figures_is_reported_by_one_sentence(tmp_path, command: str, reason: str) -> None:
    figures = await measure(tmp_path, command)
    assert isinstance(figures, str)
    assert re.search(reason, figures), figures
    assert "\n" not in figures
    if "exit code" in reason:
        assert (tmp_path / "logs" / "eval-command.log").read_text().startswith("mrl-")


async def test_a_fault_of_the_sidecar_is_a_reason_and_ends_the_evaluation(tmp_path) -> None:
    async def measure(evaluation: wire.Evaluation) -> Figures:
        raise OSError("no room")

    async with serving(measure=measure) as service:
        await service.evaluate(evaluation())
        answer = decoded(await service.evaluated(0, 60))
    assert answer.figures == "the sidecar failed: OSError('no room'); its log has the traceback"
    assert len(answer.groups) == 6


async def test_a_program_that_is_late_is_ended_with_what_it_started(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 1.0)
    command = f"sleep 600 & echo $! > {tmp_path}/child; wait"
    figures = await measure(tmp_path, command, deadline_seconds=2.0)
    assert figures == "it took more than 1 s: shorten it, or raise --rollout-deadline-minutes; its output is in " + str(
        tmp_path / "logs" / "eval-command.log"
    )
    child = read_process(int((tmp_path / "child").read_text()))
    assert child is None or child.state in "ZX"


async def test_a_call_that_an_engine_fails_or_answers_with_other_weights_leaves_no_figures(tmp_path) -> None:
    code = "ask('5')\nwrite({'accuracy': 0.0})"
    failing = engine(group_faults={"run-0-command-0": "refuse"})
    figures = await measure(tmp_path, make_command(tmp_path, code), failing)
    assert str(figures).startswith("1 of its calls were not answered, the first because no engine")

    class Stale(ScriptedEngine):
        async def generate(self, request: GroupRequest) -> list[wire.Response]:
            responses = await super().generate(request)
            if "command" not in request.request_id:
                return responses
            return [msgspec.structs.replace(one, fingerprint="weights-other") for one in responses]

    figures = await measure(tmp_path, make_command(tmp_path, code), Stale("0"))
    assert "answered with version 0 and the fingerprint weights-othe, and version 0" in str(figures)


async def test_an_evaluation_that_fails_or_is_stopped_ends_its_program(tmp_path) -> None:
    command = f"echo $$ > {tmp_path}/pid; exec sleep 600"
    rollout = RolloutConfig(engine="scripted", folder=tmp_path, max_model_len=64)
    settings = SidecarSettings("cpu", None, 64, rollout, RewardConfig(), eval_command=command)
    async with contextlib.AsyncExitStack() as stack:
        one = engine()
        run = await open_command(settings, Engines(one), stack)
        service = await stack.enter_async_context(serving(one, measure=run))
        await service.evaluate(evaluation())
        await wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        await service.take_lease("run")
        process = read_process(int((tmp_path / "pid").read_text()))
        assert process is None or process.state in "ZX"
        with pytest.raises(EvaluationFailed, match="was started again"):
            await service.evaluated(0, 10)


async def test_all_processes_of_a_program_end_with_it_and_with_the_sidecar(tmp_path) -> None:
    noted = tmp_path / "pids"
    stay = f"sleep 600 & echo $! >> {noted}"
    await measure(tmp_path, f"{stay}; echo '{{\"a\": 1}}' > $EVAL_FIGURES")
    words = ["-m", parent.__name__, f"{stay}; wait"]
    code = f"import os, subprocess, sys, time; subprocess.Popen([sys.executable, *{words}, str(os.getpid())])\n"
    code += f"while len(open({str(noted)!r}).read().split()) < 2: time.sleep(0.01)\nos._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
    for pid in map(int, noted.read_text().split()):
        await wait_until(lambda pid=pid: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")

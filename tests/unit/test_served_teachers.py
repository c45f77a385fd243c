"""Teachers of `--teacher NAME=engines:FOLDER`: questions, answers, the batches that have them, and wrong flags."""

import asyncio
import contextlib
import dataclasses
import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from megatron_rl.errors import InputError, UsageError
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.turns import mask_sampled
from megatron_rl.sidecar import settings as sidecar_settings
from megatron_rl.sidecar.engines import EngineRefused
from megatron_rl.sidecar.side_server import SideServer
from megatron_rl.sidecar.teachers import Teachers, open_teachers
from megatron_rl.trainer.data.batch import Batcher
from tests.command_lines import QWEN3, RUN, error, folder, parse, run_problems
from tests.unit.test_forest import PROMPT, respond

SIDECAR = "--rollout-engine scripted --reward exact --seq-length 64 --rollout-folder"


def grade(sequence: list[int]) -> float:
    """Return the log-prob of a sequence's last token, which float32 has exactly."""
    return -sum((place + 1) * token for place, token in enumerate(sequence)) / 8


class StandInServer:
    """Answers as vLLM does, and remembers the sequences and how many were open at once."""

    def __init__(self, change=lambda entries: entries) -> None:
        self.change, self.asked, self.num_open, self.most_open = change, [], 0, 0

    async def post(self, step: str, route: str, content: dict) -> dict:
        assert (route, content["model"]) == ("/v1/completions", "teacher.math")
        assert (content["prompt_logprobs"], content["max_tokens"], content["temperature"]) == (0, 1, 0)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await asyncio.sleep(0)
        self.num_open -= 1
        self.asked.append(sequence := content["prompt"])
        entries = [None] + [
            {str(sequence[end]): {"logprob": grade(sequence[: end + 1]), "rank": 1}} for end in range(1, len(sequence))
        ]
        return json.loads(json.dumps({"choices": [{"prompt_logprobs": self.change(entries)}]}))


def make_group(*responses: wire.Response, teacher: str = "math") -> wire.Group:
    prompt = wire.Prompt(index=3, row="rows:3", tokens=wire.encode_tokens(PROMPT), columns={"teacher": teacher})
    return wire.Group(prompt=prompt, responses=list(responses))


def teach(server: StandInServer, group: wire.Group) -> wire.Group:
    asked = SideServer("teacher.math", None, 1.0)
    asked._connection = server
    return asyncio.run(Teachers({"teacher.math": asked}, {"teacher.math": "hash"}).teach(group))


def read(response: wire.Response) -> list[float]:
    return wire.decode_log_probs(response.teacher_log_probs).tolist()


def test_each_response_is_asked_about_once_and_none_beside_another() -> None:
    unscored = msgspec.structs.replace(respond((0, [], [9])), reward=None)
    group = make_group(respond((0, [], [1, 2])), unscored, respond((0, [4, 5], [3])))
    server = StandInServer()
    taught = teach(server, group)
    assert server.asked == [[*PROMPT, 1, 2], [*PROMPT, 4, 5, 3]]
    assert server.most_open == 1
    first, other, last = taught.responses
    assert read(first) == [grade([*PROMPT, 1]), grade([*PROMPT, 1, 2])]
    assert read(last) == [0, 0, grade([*PROMPT, 4, 5, 3])]
    assert other is unscored
    assert teach(server, make_group(*group.responses, teacher="code")).responses == group.responses
    assert len(server.asked) == 2


def test_each_branch_is_asked_about_once_after_all_that_it_follows() -> None:
    response = respond((0, [], [1, 2, 3]), (2, [4], [5]), (-len(PROMPT), [6], [7]), (4, [8], [9]))
    server = StandInServer()
    (taught,) = teach(server, make_group(response)).responses
    assert server.asked == [[*PROMPT, 1, 2, 3], [*PROMPT, 1, 2, 4, 5], [6, 7], [*PROMPT, 1, 2, 4, 8, 9]]
    sampled = [[*PROMPT, 1], [*PROMPT, 1, 2], [*PROMPT, 1, 2, 3], *server.asked[1:]]
    assert wire.decode_log_probs(taught.teacher_log_probs)[mask_sampled(taught)].tolist() == [*map(grade, sampled)]


def set_last(value: object):
    return lambda entries: [*entries[:-1], value]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_last({"2": {"logprob": None}}), "no finite log-prob of token 1"),
        (set_last({"2": {"logprob": math.nan}}), "no finite log-prob of token 1"),
        # As vLLM writes minus infinity.
        (set_last({"2": {"logprob": -9999.0}}), "no finite log-prob of token 1"),
        (set_last({"8": {"logprob": -1.0}}), "no finite log-prob of token 1"),
        (set_last(None), "no finite log-prob of token 1"),
        (lambda entries: entries[:-1], f"log-probs of {len(PROMPT) + 1} tokens, and {len(PROMPT) + 2} were asked for"),
        (lambda entries: None, f"log-probs of 0 tokens, and {len(PROMPT) + 2} were asked for"),
    ],
)
def test_an_answer_without_a_tokens_log_prob_ends_the_run_by_name(change, said) -> None:
    with pytest.raises(EngineRefused) as raised:
        teach(StandInServer(change), make_group(respond((0, [], [1, 2]))))
    assert str(raised.value) == f"teacher.math: for a response to prompt 3 (rows:3) it gave {said}"


def make_slot(*teachers: str) -> wire.Slot:
    """Make a slot of a group for each teacher, with two responses each."""
    parts = []
    for number, name in enumerate(teachers):
        responses = [
            msgspec.structs.replace(
                respond((0, [4], [1, 2])),
                teacher_log_probs=wire.encode_log_probs([0, -1 - number, -5 - place]),
                teacher_hash="hash",
            )
            for place in range(2)
        ]
        parts.append(
            wire.GroupPart(
                prompt_index=number, row="rows:0", prompt_tokens=wire.encode_tokens(PROMPT), first_response=0,
                responses=responses, rewards=[0.0, 1.0], teacher=name,
            )
        )  # fmt: skip
    return wire.Slot(run="run", version=3, fingerprint="weights-3", replica=0, index=0, parts=parts)


def make_batcher(*served: str, is_chosen: bool = True) -> Batcher:
    choose = (lambda part: f"teacher.{part.teacher}") if is_chosen else None
    return Batcher(lambda part: np.zeros(2), served=dict.fromkeys(served, "hash"), choose=choose)


def test_a_batch_has_the_log_probs_of_targets_and_no_numbers_for_those_of_other_teachers() -> None:
    batch = make_batcher("teacher.a", "teacher.c").batch(make_slot("a", "b"))
    (name, known_N), *others = batch.known_N.items()
    assert (name, others) == ("teacher.a", [])
    assert known_N[:4].tolist() == [-1, -5, -1, -6]
    assert known_N[4:].isnan().all()
    assert len(known_N) == batch.num_targets
    alone = make_batcher("teacher", is_chosen=False)
    assert alone.batch(make_slot("b")).known_N["teacher"].tolist() == [-1, -5, -1, -6]
    assert alone.batch(make_slot()).known_N["teacher"].tolist() == []
    assert make_batcher().batch(make_slot("a")).known_N == {}


@pytest.mark.parametrize(
    ("data", "of"),
    [
        (msgspec.UNSET, "hash"),
        (wire.encode_log_probs([0, -1]), "hash"),
        (wire.encode_log_probs([0, -1, math.nan]), "hash"),
        (wire.encode_log_probs([0, -1, -2]), "of another folder"),
    ],
)
def test_a_batch_with_a_target_that_its_teacher_has_not_graded_is_refused(data, of) -> None:
    message = r"the group of prompt 1 \(rows:0\), engine 0, has no finite log-prob of teacher.b for each token: start"
    batcher = make_batcher("teacher.b")
    slot = make_slot("a", "b")
    for response in slot.parts[1].responses:
        msgspec.structs.force_setattr(response, "teacher_log_probs", data)
        msgspec.structs.force_setattr(response, "teacher_hash", of)
    with pytest.raises(InputError, match=message):
        batcher.batch(slot)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Return the words of a policy and of a teacher that engines compute, whose folder looks like a model's."""
    teacher = folder(tmp_path / "teacher", QWEN3)
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / "teacher" / name).write_text("{}")
    return ["--platform cpu --hf-model", folder(tmp_path / "policy", QWEN3), "--teacher", f"a=engines:{teacher}"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--opd-divergence reverse", "--opd-divergence reverse and --teacher a=engines:"),
        ("--opd-divergence forward --opd-top-k 4", "engines give log-probs of sampled tokens alone: write sampled"),
        ("--opd-divergence jsd", "--opd-divergence jsd and --teacher a=engines:"),
        ("--rollout-temperature 0.7", "--rollout-temperature 0.7 and --teacher a=engines:"),
        ("--seq-length 256", "--seq-length 256 must be below its longest sequence, 256: write less"),
        ("engines:x", "several need a name each, none of them twice; write NAME=FOLDER"),
    ],
)
def test_flags_that_do_not_fit_a_teacher_in_engines_are_named(more, said, words) -> None:
    assert said in error(*words, more)


def test_a_teacher_in_engines_is_no_model_of_the_pass(words, tmp_path) -> None:
    settings = parse(*words, "b=" + words[1], "--seq-length 128")
    assert settings.frozen.keys() == {"teacher.b"}
    smaller = folder(tmp_path / "smaller", dataclasses.replace(QWEN3, vocab_size=190))
    said = "its vocabulary has 190 rows, and the policy's 200"
    assert f"--teacher engines:{smaller}: {said}" in error(*words[:3], f"engines:{smaller}")
    offloaded = run_problems(*words, *RUN, "--frozen-offload --train-iters 0")
    assert any("--frozen-offload has no model to keep in host memory" in problem for problem in offloaded)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "cpu --teacher-devices 1",
            "--teacher-devices names accelerators, and the teacher computes on the CPU",
        ),
        ("cuda", "--teacher-devices is missing: name the teacher's accelerators"),
        ("cuda --teacher-devices 3 3 2 1", "--teacher-devices 3 3 2 1 must be different numbers, none negative"),
        (
            "cuda --teacher-devices 1 4",
            "--teacher-devices 1 4 must be below 4, the number of devices that are visible here",
        ),
        (
            "cuda --teacher-devices 1 2 --rollout-devices 1",
            "--teacher-devices: engines compute on 1 (--rollout-devices)",
        ),
        (
            "cuda --teacher-devices 1 2 3",
            "--teacher-devices must name as many devices for each of 2 teachers, and names 3",
        ),
    ],
)
def test_devices_that_teachers_cannot_have_are_one_error(more, said, words, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10,11")
    given = f"{SIDECAR} /nowhere/run {words[2]} {words[3]} b{words[3][1:]} --platform {more}"
    with pytest.raises(UsageError) as raised:
        sidecar_settings.parse(given.split())
    (found,) = raised.value.problems
    assert found.startswith(said)


def test_a_teachers_flags_need_a_teacher_and_its_folder_a_model(tmp_path) -> None:
    for more, said in (
        ("cuda --teacher-devices 1", "--teacher-devices needs --teacher NAME=engines:FOLDER: add it, or drop the flag"),
        (f"cpu --teacher engines:{tmp_path}", f"--teacher engines:{tmp_path}: {tmp_path} has no config.json"),
    ):
        with pytest.raises(UsageError) as raised:
            sidecar_settings.parse(f"{SIDECAR} /nowhere/run --platform {more}".split())
        assert any(problem.startswith(said) for problem in raised.value.problems)


@pytest.mark.parametrize("flag", ["--teacher-devices", "--judge-devices"])
def test_no_server_apart_from_the_engines_computes_on_a_ranks_device(flag, words, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10,11")
    given = f"{SIDECAR} {tmp_path}/run --platform cuda --teacher {words[3]} --teacher-devices 2"
    settings = sidecar_settings.parse(given.split())
    devices = {"--teacher-devices": [2], "--judge-devices": [3]} | {flag: [1]}
    settings = dataclasses.replace(
        settings,
        rollout=dataclasses.replace(settings.rollout, engine="vllm", teacher_devices=devices["--teacher-devices"]),
        reward=dataclasses.replace(settings.reward, judge_devices=devices["--judge-devices"]),
    )
    assert [*sidecar_settings.check_sharing(settings, 1)] == []
    (problem,) = sidecar_settings.check_sharing(settings, 2)
    assert problem == f"{flag}: ranks compute on 1: name devices from 2 on"


def test_a_server_for_each_teacher_has_its_share_of_devices_and_takes_one_sequence_at_a_time(
    words, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10,11")
    given = f"{SIDECAR} {tmp_path}/run --platform cuda --rollout-dtype bfloat16 --teacher-devices 3 1"
    given += f" --teacher {words[3]} b{words[3][1:]} c=/in/the/pass"
    settings = sidecar_settings.parse(given.split())
    assert settings.rollout.devices is None
    with contextlib.ExitStack() as stack:
        opened = open_teachers(settings, 1, stack)
    processes = {name: server._process for name, server in opened._servers.items()}
    assert {name: one.environment["CUDA_VISIBLE_DEVICES"] for name, one in processes.items()} == {
        "teacher.a": "11",
        "teacher.b": "9",
    }
    for name, one in processes.items():
        flags = " ".join(one.command)
        assert f"--served-model-name {name} " in flags
        assert "--max-num-seqs 1 " in flags
        assert "--max-model-len 65 --max-num-batched-tokens 2048 --skip-tokenizer-init --dtype bfloat16" in flags
        assert "--no-enable-prefix-caching" in one.command
    of_policy = dataclasses.replace(
        settings,
        hf_model=tmp_path / "policy",
        rollout=dataclasses.replace(settings.rollout, dtype=None),
    )
    with contextlib.ExitStack() as stack:
        (server, _) = open_teachers(of_policy, 1, stack)._servers.values()
    assert " --dtype float32" in " ".join(server._process.command)
    (tmp_path / "teacher" / "model.safetensors").write_text("{ }")
    with contextlib.ExitStack() as stack:
        assert open_teachers(settings, 1, stack).identity != opened.identity

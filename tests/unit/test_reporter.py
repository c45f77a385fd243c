"""The loop's messages to people about an iteration: warnings, and samples of its groups."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_rl.algorithm.advantages import GroupAdvantages
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.config.settings import CheckpointConfig, ObserveConfig
from megatron_rl.observe.progress import Progress
from megatron_rl.shared.protocol.turns import ENVIRONMENT
from megatron_rl.shared.records.append_file import read_lines
from megatron_rl.trainer.loop.reporter import SamplesReporter, build_reporter
from tests.unit.test_turns import respond


class Said(Progress):
    """The messages."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(autouse=True)
def _decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode tokens to their numbers."""
    decode = lambda rows: [" ".join(map(str, ids)) for ids in rows]  # noqa: E731
    monkeypatch.setattr("megatron_rl.trainer.loop.reporter.build_decoder", lambda folder: decode)


def reporter(
    folder: Path,
    engine: str = "vllm",
    algorithm: AlgorithmConfig | None = None,
    experts: Mapping[str, float] | None = None,
    **observe: Any,
) -> SamplesReporter:
    algorithm = algorithm or AlgorithmConfig(advantage="mean")
    settings: Any = SimpleNamespace(
        name="run",
        folder=folder,
        model=SimpleNamespace(hf_model="model"),
        training=SimpleNamespace(train_iters=1),
        environment=SimpleNamespace(on_error="exclude"),
        sizes=SimpleNamespace(plan=SimpleNamespace(num_prompts=2)),
        observe=ObserveConfig(progress="none", **observe),
        checkpoint=CheckpointConfig(),
        rollout=SimpleNamespace(dtype=None, engine=engine, hosts=None),
        publish=SimpleNamespace(dtype=None),
        architecture=SimpleNamespace(dtype="float32", experts=experts),
        algorithm=algorithm,
        transformer=SimpleNamespace(**{"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None, **(experts or {})}),
    )
    built = build_reporter(settings, 0, GroupAdvantages(algorithm))
    assert isinstance(built, SamplesReporter)
    return built


def packed(*ids: int) -> bytes:
    return np.array(ids, "<i4").tobytes()


def part(prompt: int, first: int, count: int) -> SimpleNamespace:
    """Build some responses of a group, each with its place in the group as its token and its reward."""
    responses = [
        SimpleNamespace(
            tokens=packed(place),
            reward=float(place),
            components={"exact": 1.0, "absent": None},
            finish_reason="stop",
            failure="",
            log_probs=np.array([-place / 4], "<f4").tobytes(),
            spans=[],
            branches=[],
            turn_rewards=[],
        )
        for place in range(first, first + count)
    ]
    return SimpleNamespace(
        prompt_index=prompt, row=f"row {prompt}", prompt_tokens=packed(7, prompt), first_response=first,
        responses=responses, rewards=[0.0, 1.0, 2.0, 3.0], components={},
    )  # fmt: skip


def slots(*batches: list[SimpleNamespace]) -> list[Any]:
    return [SimpleNamespace(parts=parts) for parts in batches]


def test_responses_to_held_out_prompts_are_samples_of_an_evaluation(tmp_path):
    to = reporter(tmp_path, log_samples=3)
    groups = [
        SimpleNamespace(prompt=SimpleNamespace(row=f"row {row}", tokens=packed(7, row)), responses=responses)
        for row, responses in enumerate([part(0, 0, 2).responses, part(1, 0, 2).responses, part(2, 0, 2).responses])
    ]
    to.evaluation(4, groups)
    to.close()
    lines = read_lines(tmp_path / "samples.jsonl")
    assert [(line["version"], line["kind"], line["row"], line["prompt"]) for line in lines] == [
        (4, "evaluation", "row 0", "7 0"),
        (4, "evaluation", "row 1", "7 1"),
    ]
    assert [len(line["responses"]) for line in lines] == [2, 1]
    assert lines[0]["responses"][1] == {
        "text": "1", "reward": 1.0, "components": {"exact": 1.0}, "num_tokens": 1, "finish_reason": "stop",
        "advantage": None,
    }  # fmt: skip


@pytest.mark.parametrize(("engine", "given", "difference", "is_warned"), [
    ("vllm", None, 5e-4, False), ("vllm", None, 2e-3, True), ("vllm", 0.0, 5e-4, True), ("vllm", 0.0, 0.0, False),
    ("vllm", 0.1, 2e-3, False),
    # Log-probs of scripted engines differ by chance.
    ("scripted", None, 5.0, False), ("scripted", 0.1, 5.0, True),
])  # fmt: skip
def test_a_mismatch_above_the_given_or_the_precisions_bound_is_warned_of(
    tmp_path, engine, given, difference, is_warned
):
    to = reporter(tmp_path, engine=engine, mismatch_warning=given, log_samples=0)
    to._progress = said = Said()
    metrics = {"version": 0, "mismatch": {"mean": difference}, "groups": 2, "reward": {"all_equal_groups": 0}}
    to.iteration(0, metrics, slots(), {})
    to.close()
    assert any("--rollout-mismatch-warning" in line for line in said.lines) == is_warned
    assert any("--rl-inference-logprobs-is-correction" in line for line in said.lines) == is_warned


@pytest.mark.parametrize(("quantized", "difference", "correction", "num_said"), [
    (True, 2e-2, False, 1), (True, 5e-4, False, 0), (True, 2e-2, True, 0), (False, 2e-2, False, 0),
])  # fmt: skip
def test_the_correction_is_suggested_once_if_engines_quantize(tmp_path, quantized, difference, correction, num_said):
    algorithm = AlgorithmConfig(advantage="mean", importance_correction=correction)
    to = reporter(tmp_path, algorithm=algorithm, mismatch_warning=5e-2, log_samples=0)
    to._progress = said = Said()
    metrics = {"mismatch": {"mean": difference}, "groups": 2, "reward": {"all_equal_groups": 0}}
    for version in range(2):
        to.iteration(version, {"version": version, "publish": {"quantized": quantized}, **metrics}, slots(), {})
    to.close()
    assert sum("the engines quantize" in line for line in said.lines) == num_said == len(said.lines)


def report_equal_groups(to: SamplesReporter, counts: Sequence[int]) -> list[str]:
    """Report iterations of two groups, of which `counts` have equal rewards; return the warnings about rewards."""
    to._progress = said = Said()
    for version, count in enumerate(counts):
        metrics = {"version": version, "mismatch": {"mean": 0.0}, "groups": 2, "reward": {"all_equal_groups": count}}
        to.iteration(version, metrics, slots(), {})
    to.close()
    return [line for line in said.lines if "reward" in line]


def test_a_streak_of_iterations_without_a_signal_is_said_when_it_begins_and_when_it_ends(tmp_path):
    said = report_equal_groups(reporter(tmp_path, log_samples=0), [0, 2, 2, 2, 1, 2, 0, 2, 2])
    assert [line.partition(":")[2].partition(" (repeated only")[0].strip() for line in said] == [
        "in all 2 groups every response got the same reward: the gradient is zero",
        "rewards within groups differ again, after 3 iterations in which none did",
        # A single iteration must not count as a streak.
        "in all 2 groups every response got the same reward: the gradient is zero",
        "in all 2 groups every response got the same reward: the gradient is zero",
        "in each of the last 2 iterations every response of a group got the same reward",
    ]


@pytest.mark.parametrize(
    ("algorithm", "experts", "sources"),
    [
        ({}, {}, ()),
        ({"advantage": "batch"}, {}, ()),
        ({"advantage": "global"}, {}, ("--grpo-advantage global",)),
        ({"advantage": "gdpo"}, {}, ("--grpo-advantage gdpo",)),
        ({"kl_beta": 0.1}, {}, ("--grpo-kl-beta",)),
        ({"kl_beta": 0.1, "kl_in": "reward", "advantage": "global"}, {}, ("--grpo-advantage global", "--grpo-kl-beta")),
        ({"entropy_coef": 0.1}, {}, ("--grpo-entropy-coef",)),
        ({}, {"moe_aux_loss_coeff": 0.01}, ("auxiliary losses",)),
        ({}, {"moe_z_loss_coeff": 0.01}, ("auxiliary losses",)),
    ],
)
def test_equal_rewards_are_said_to_leave_the_gradient_that_the_algorithm_has_besides(
    algorithm, experts, sources, tmp_path
):
    to = reporter(tmp_path, algorithm=AlgorithmConfig(**algorithm), experts=experts, log_samples=0)
    (said,) = report_equal_groups(to, [2])
    assert ("the gradient is zero" in said) == (not sources)
    every = (
        "--grpo-advantage global", "--grpo-advantage gdpo", "--grpo-kl-beta", "--grpo-entropy-coef", "auxiliary losses",
    )  # fmt: skip
    assert tuple(source for source in every if source in said) == sources


def test_a_group_that_several_slots_held_is_one_line_of_the_samples(tmp_path):
    to = reporter(tmp_path, log_samples=7)
    to._write_samples(0, slots([part(3, 0, 2)], [part(3, 2, 2)], [part(1, 0, 2)], [part(1, 2, 2)], [part(2, 0, 4)]), {})
    to.close()
    lines = read_lines(tmp_path / "samples.jsonl")
    assert [(line["row"], line["prompt"], len(line["responses"])) for line in lines] == [
        ("row 3", "7 3", 4),
        ("row 1", "7 1", 3),
    ]
    assert [response["text"] for response in lines[0]["responses"]] == ["0", "1", "2", "3"]
    assert lines[0]["responses"][2]["components"] == {"exact": 1.0}
    assert [response["advantage"] for response in lines[0]["responses"]] == [-1.5, -0.5, 0.5, 1.5]


def test_advantages_that_the_whole_update_divides_are_left_out_of_samples(tmp_path):
    to = reporter(tmp_path, algorithm=AlgorithmConfig(advantage="batch"), log_samples=4)
    to._write_samples(0, slots([part(3, 0, 4)]), {})
    to.close()
    (line,) = read_lines(tmp_path / "samples.jsonl")
    assert [response["advantage"] for response in line["responses"]] == [None] * 4


def test_turns_with_credit_of_their_own_have_their_advantages_in_samples(tmp_path):
    to = reporter(tmp_path, algorithm=AlgorithmConfig(advantage="mean", turn_credit=True), log_samples=4)
    of_group = part(3, 0, 4)
    talk = respond(("3", [10]), (ENVIRONMENT, [50]), ("3", [11]), reward=3.0, turn_rewards=[1.0, 2.0])
    of_group.responses[1:3] = [talk, msgspec.structs.replace(talk, reward=-1.0, turn_rewards=[-1.0, 0.0])]
    of_group.turn_rewards = [[0.0], [1.0, 2.0], [-1.0, 0.0], [2.0]]
    to._write_samples(0, slots([of_group]), {})
    to.close()
    (line,) = read_lines(tmp_path / "samples.jsonl")
    # From the first turns on the rewards are 0, 3, -1 and 2, and their mean is 1; from the second ones 0, 2, 0 and 0.
    assert [response["advantage"] for response in line["responses"]] == [-1.0, None, None, 1.0]
    turns = [[turn.get("advantage") for turn in response.get("turns", ())] for response in line["responses"]]
    assert turns == [[], [2.0, None, 1.5], [-2.0, None, -0.5], []]


def test_logged_tokens_have_the_log_probs_of_engine_and_trainer(tmp_path):
    to = reporter(tmp_path, log_samples=6, log_sample_tokens=True)
    of_trainer = {0: np.array([-1.0, -1.25], np.float32), 1: np.array([-1.123456789, math.inf], np.float32)}
    to._write_samples(2, slots([part(3, 0, 2)], [part(3, 2, 2)], [part(1, 0, 2)]), of_trainer)
    to.evaluation(
        2, [SimpleNamespace(prompt=SimpleNamespace(row="r", tokens=packed(7)), responses=part(0, 1, 1).responses)]
    )
    to.close()
    whole, unknown, evaluated = read_lines(tmp_path / "samples.jsonl")
    assert [response["tokens"] for response in whole["responses"]] == [
        {"texts": ["0"], "engine": [0.0], "trainer": [-1.0]},
        {"texts": ["1"], "engine": [-0.25], "trainer": [-1.25]},
        {"texts": ["2"], "engine": [-0.5], "trainer": [-1.12346]},
        {"texts": ["3"], "engine": [-0.75], "trainer": [None]},
    ]
    assert whole["nonfinite"] == ["responses/3/tokens/trainer/0"]
    assert [response["tokens"]["trainer"] for response in unknown["responses"]] == [None, None]
    assert evaluated["responses"][0]["tokens"] == {"texts": ["1"], "engine": [-0.25], "trainer": None}

"""Losses, advantages and metrics of a user's own file: the checks of them, and their times."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.advantages import GroupAdvantages
from megatron_rl.algorithm.declaration import Surrogate
from megatron_rl.algorithm.library import LOSSES
from megatron_rl.algorithm.plug_in_checks import find_plug_in_problems
from megatron_rl.algorithm.plug_ins import check_agreement, compare_plug_ins, describe_plug_ins, find_loss
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.command_line.describe import describe_objective, describe_run, print_config
from megatron_rl.errors import InputError, UsageError
from megatron_rl.shared.records.audit_events import list_changes
from tests.command_lines import CPU, DENSE, QWEN3, RUN, error, folder, parse, parse_run
from tests.processes import ROOT
from tests.unit.test_losses import compute, draw_batch

EXAMPLE = ROOT / "examples" / "algorithms" / "ce_gppo.py"
LIBRARY = ROOT / "megatron_rl" / "algorithm" / "library"
FLUENCY = f"{ROOT / 'examples/algorithms/fluency.py'}:FLUENCY"
REINFORCE = "return -targets.advantages_N * targets.policy_N"


@pytest.fixture
def write(tmp_path):
    """Write a function into a file, and return FILE.py:FUNCTION."""

    def write(body: str, head: str = "def f(targets, settings):", name: str = "own.py") -> str:
        path = tmp_path / name
        path.write_text(f"import torch\nimport numpy as np\n{head}\n    {body}\n")
        return f"{path}:f"

    return write


def find(written: set[str] | None = None, **settings: object) -> list[str]:
    return [*find_plug_in_problems(AlgorithmConfig(**settings), written or set(), {})]  # type: ignore[arg-type]


ROLE = """
from megatron_rl.algorithm.declaration import LossRole, Term
r = LossRole({name!r}, is_used=lambda settings: True, compute=lambda log_probs, sequences, settings: {term})
"""


@pytest.mark.parametrize(
    ("name", "term", "said"),
    [
        ("own", "Term(advantages_N=log_probs.others['own'])", ""),
        ("own", "Term(loss_N=log_probs.others['own'] * log_probs.policy_N)", ""),
        ("own", "Term()", "compute must return a Term with advantages_N or loss_N"),
        ("own", "log_probs.old_N", "compute must return a Term"),
        ("own", "Term(loss_N=log_probs.others['other'])", "fails on a trial micro-batch on the CPU"),
        ("own", "Term(loss_N=log_probs.old_N.sum())", "returned a tensor of shape ()"),
        ("own", "Term(loss_N=log_probs.old_N - log_probs.old_N.mean())", "depend on the other responses"),
        ("teacher", "Term(loss_N=log_probs.old_N)", "the role is called 'teacher'; give it another name"),
        ("a role", "Term(loss_N=log_probs.old_N)", "the role is called 'a role'; give it another name"),
    ],
)
def test_a_role_is_tried_before_the_run(name, term, said, tmp_path) -> None:
    file = tmp_path / "own.py"
    file.write_text(ROLE.format(name=name, term=term))
    problems = find(roles=[f"{file}:r={tmp_path}"])
    assert [said in problem for problem in problems] == [True] * bool(said), problems


def test_words_of_roles_that_name_none_are_refused(tmp_path, write) -> None:
    for word, said in (
        (f"{write('return 1')}=folder", "is not a role: give the file a LossRole of that name"),
        (write("return 1"), "must name a role and its model: write FILE.py:ROLE=FOLDER"),
        ("folder", "must name a role and its model"),
        (f"{tmp_path}/none.py:r=folder", "none.py cannot be read"),
    ):
        [problem] = find(roles=[word])
        assert said in problem
    policy = ["--platform cpu --hf-model", folder(tmp_path / "policy", QWEN3), "--grpo-role"]
    other = folder(tmp_path / "other", dataclasses.replace(QWEN3, vocab_size=190))
    assert f"--grpo-role {other}: its vocabulary has 190 rows" in error(*policy, f"{FLUENCY}={other}")
    assert parse(*policy, f"{FLUENCY}={tmp_path / 'policy'}").frozen.keys() == {"fluency"}
    assert len((ROOT / "examples/algorithms/fluency.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_the_library_gives_the_same_bits_as_a_plug_in(name) -> None:
    file = next(
        path for path in LIBRARY.glob("*.py") if f'"{name}",' in path.read_text() and "Loss(" in path.read_text()
    )
    config, batch = AlgorithmConfig(loss=name, clamp_eps_lower=0.1), draw_batch([5, 9, 1], seed=3)
    own = dataclasses.replace(config, loss=f"{file}:compute_loss")
    assert find(loss=own.loss) == []
    for ours, theirs in zip(compute(own, batch)[:2], compute(config, batch)[:2], strict=True):
        assert torch.equal(ours, theirs)


def test_the_example_passes_its_trial_and_equals_its_formula() -> None:
    config = AlgorithmConfig(
        loss=f"{EXAMPLE}:ce_gppo", metrics=[f"{EXAMPLE}:kept"], clamp_eps_lower=0.1, clamp_eps_upper=0.15
    )
    assert [*find_plug_in_problems(config, {"clamp_eps_lower", "clamp_eps_upper"}, {})] == []
    batch = draw_batch([40, 30, 7], seed=2, spread=0.4)
    total, gradient, statistics = compute(config, batch)
    policy, old, advantage = (batch[name].numpy() for name in ("policy", "old", "advantages"))
    ratio = np.exp(policy - old)
    is_low, is_high = (ratio < 0.9) & (advantage < 0), (ratio > 1.15) & (advantage > 0)
    used = np.where(is_low, 0.75 * 0.9, np.where(is_high, 1.0 * 1.15, ratio))
    assert float(total) == pytest.approx(-(used * advantage).mean(), rel=1e-9)
    assert np.allclose(gradient.numpy(), -used * advantage / len(policy), rtol=1e-9)
    assert statistics.sums["metric.kept"] == (is_low | is_high).sum() > 10


def test_an_advantage_of_a_plug_in_is_that_of_its_function() -> None:
    source = f"{EXAMPLE}:centered_ranks"
    assert find(advantage=source) == []
    advantages = GroupAdvantages(AlgorithmConfig(advantage=source, reward_max=3.0))
    assert advantages(SimpleNamespace(rewards=[0.0, 9.0, 1.0, 5.0], components={})).tolist() == [
        -1,
        2 / 3,
        -1 / 3,
        2 / 3,
    ]
    assert not advantages.is_divided
    assert not advantages.has_baseline


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return (-targets.advantages_N * targets.policy_N).mean()", "neither summed nor averaged"),
        ("return 1.0", "returned a value of type float: return the losses of the targets"),
        ("return targets.policy_N > 0", "torch.bool for 12 targets"),
        ("return -targets.advantages_N * targets.old_N", "its losses have no gradient by targets.policy_N"),
        ("return -targets.advantages_N * targets.policy_N.detach()", "so nothing would be learned"),
        ("return targets.policy_N / 0", "12 of 12 losses are not finite: bound the values that grow"),
        (
            "return (targets.policy_N - targets.policy_N).abs().sqrt()",
            "12 gradients by targets.policy_N are not finite",
        ),
        ("return targets.policy_N * targets.policy_N.detach().mean()", "depend on how responses are packed"),
        ("return targets.policy_N * torch.rand(())", "two calls with the same input give different values"),
        ("return targets.reward_N", "own.py:4: AttributeError: 'Targets' object has no attribute 'reward_N'"),
    ],
)
def test_a_loss_that_would_break_a_promise_is_refused_before_the_run(body, said, write) -> None:
    (problem,) = find(loss=write(body))
    assert problem.startswith("--grpo-loss /")
    assert said in problem


def test_a_loss_that_is_not_proportional_to_advantages_is_refused_beside_those_that_a_deviation_divides(write) -> None:
    source = write("return (targets.advantages_N.clamp(max=0.7) * -targets.policy_N)")
    assert find(loss=source) == []
    (problem,) = find(loss=source, advantage="batch")
    assert "is not proportional to targets.advantages_N, and --grpo-advantage batch divides" in problem
    assert find(loss=write(REINFORCE, name="plain.py"), advantage="batch") == []


def test_a_flag_that_the_loss_does_not_read_is_refused(write) -> None:
    source = write("return -(targets.ratio_N.clamp(1 - settings.clamp_eps_lower, 2) * targets.advantages_N)")
    assert error(*DENSE, f"--grpo-loss {source} --grpo-dual-clip 3") == (
        f"--grpo-loss {source} does not read settings.dual_clip: drop the flag that sets it"
    )
    assert parse(*DENSE, f"--grpo-loss {source} --grpo-clamp-eps-lower 0.1").algorithm.loss == source


@pytest.mark.parametrize(
    ("body", "more", "said"),
    [
        ("return group.rewards_K[:2]", {}, "returned an array of shape (2,): return one number for each of the 4"),
        ("return None", {}, "returned an array of shape (): return one number for each of the 4"),
        ("return group.rewards_K / 0", {}, "every advantage must be finite"),
        ("return group.rewards_K * np.arange(len(group.rewards_K))", {}, "depends on its place in the group"),
        ("return group.rewards_K * np.random.rand()", {}, "two calls with the same input"),
        ("return group.rewards_K", {"filter_groups": True}, "so the gradient would be biased: drop one of them"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_advantage_that_would_break_a_promise_is_refused_before_the_run(body, more, said, write) -> None:
    problems = find(advantage=write(body, "def f(group, settings):"), **more)
    assert said in problems[0]


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--grpo-loss own.py", "--grpo-loss own.py: not one of the choices"),
        ("--grpo-loss own.py:", "not one of the choices"),
        ("--grpo-loss clipp", "(the nearest is clip); write --grpo-loss {clip,"),
        ("--grpo-loss missing.py:f", "missing.py cannot be read: No such file or directory; name a readable file"),
        ("--grpo-metric kl", "--grpo-metric kl must name a function: write FILE.py:FUNCTION"),
        ("--grpo-loss own.py:g", "own.py has no function g; name one of f"),
        ("--grpo-advantage broken.py:f", "broken.py:2: SyntaxError: invalid syntax; correct the file"),
        ("--grpo-loss raising.py:f", "raising.py:1: ModuleNotFoundError: No module named 'nowhere'"),
        ("--grpo-loss three.py:f", "takes (a, b, c), and is called with (targets, settings): write def f(targets"),
        ("--grpo-metric own.py:f twin.py:f", "--grpo-metric names 2 functions f: give each a name of its own"),
    ],
)
def test_a_mistake_in_a_plug_in_is_an_error_of_the_command_line(flag, said, write, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, head in (("own.py", "def f(a, b):"), ("twin.py", "def f(a, b):"), ("three.py", "def f(a, b, c):")):
        write(REINFORCE.replace("targets", "a"), head, name)
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "raising.py").write_text("import nowhere\n")
    assert said in error(*DENSE, flag)


def test_the_file_is_read_once_so_that_what_was_checked_runs(write) -> None:
    source = write(REINFORCE)
    assert find(loss=source) == []
    before = describe_plug_ins(AlgorithmConfig(loss=source))
    write("return 1 / 0")
    batch = draw_batch([4, 5])
    own, known = (compute(AlgorithmConfig(loss=name), batch) for name in (source, "reinforce"))
    assert torch.equal(own[0], known[0])
    assert describe_plug_ins(AlgorithmConfig(loss=source)) == before


def test_the_first_micro_batch_of_a_run_is_checked_again(write) -> None:
    """Give a ratio above 3, unlike those of the trial, which are near 1."""
    source = write("return -targets.advantages_N * targets.policy_N * torch.where(targets.ratio_N > 3, math.inf, 1.0)")
    Path(source.rpartition(":")[0]).write_text(
        Path(source.rpartition(":")[0]).read_text().replace("import torch", "import math, torch", 1)
    )
    assert find(loss=source) == []
    batch = draw_batch([4, 5])
    batch["policy"] = batch["policy"] + 2
    with pytest.raises(InputError, match="9 of 9 losses are not finite"):
        compute(AlgorithmConfig(loss=source), batch)


def test_each_micro_batch_must_have_a_loss_for_each_target(write) -> None:
    loss = find_loss(write("return targets.policy_N if len(targets.policy_N) > 5 else targets.policy_N.sum()"))
    policy_N = torch.zeros(6, requires_grad=True)
    targets = SimpleNamespace(policy_N=policy_N, ratio_N=policy_N.exp())
    assert isinstance(loss.compute(targets, AlgorithmConfig()), Surrogate)
    with pytest.raises(InputError, match=r"a tensor of shape \(\) and torch.float32 for 3 targets"):
        loss.compute(SimpleNamespace(policy_N=policy_N[:3], ratio_N=policy_N[:3]), AlgorithmConfig())


def test_a_trial_leaves_random_numbers_as_they_were(write) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    find(loss=write("return targets.policy_N * torch.rand(())"))
    assert torch.equal(torch.rand(3), expected)


def test_the_configuration_of_a_run_names_each_plug_in_with_the_hash_of_its_file(tmp_path) -> None:
    words = f"--grpo-loss {EXAMPLE}:ce_gppo --grpo-metric {EXAMPLE}:kept"
    settings = parse_run(*CPU, *RUN, "--hf-model", folder(tmp_path, QWEN3), *words.split(), "--print-config")
    recorded = describe_run(settings).sections["plug-ins"]
    assert {name: value.text for name, value in recorded.items()} == describe_plug_ins(settings.algorithm)
    (sha256,) = {value.text for value in recorded.values()}
    assert f"--grpo-loss {EXAMPLE}:ce_gppo" in print_config(settings)
    assert len(sha256) == 64


def test_the_objective_is_described_by_its_flags_and_by_the_files_of_its_functions(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def reward(completions, **columns): return [0.0] * len(completions)")

    def describe(words: str) -> dict[str, str]:
        settings = parse_run(*CPU, *RUN, "--hf-model", model, f"--reward {file}:reward=2", *words.split())
        return describe_objective(settings)

    model = folder(tmp_path, QWEN3)
    before = describe("--grpo-kl-beta 0.05")
    assert before["--reward"] == f"{file}:reward=2"
    assert before["--rollout-env"] == "not given"
    file.write_text("def reward(completions, **columns): return [1.0] * len(completions)")
    changes = list_changes(before, describe("--grpo-kl-beta 0.5 --rl-inference-logprobs-is-correction"))
    assert changes[:2] == ["--grpo-kl-beta 0.05 -> 0.5", "--rl-inference-logprobs-is-correction off -> on"]
    (of_file,) = changes[2:]
    assert of_file.startswith(f"{file} sha256 ")
    assert {"--reward-model-device", "--judge-max-num-seqs", "--judge-vllm-args"} < before.keys()


def test_a_checkpoint_does_not_resume_with_another_text_of_the_same_file() -> None:
    with pytest.raises(InputError, match=r"the file has changed since ckpt was saved .* restore the file, or give the"):
        compare_plug_ins({"--grpo-loss a.py:f": "1" * 64}, {"--grpo-loss a.py:f": "2" * 64}, "ckpt")
    assert compare_plug_ins({"--grpo-loss a.py:f": "1"}, {"--grpo-loss a.py:f": "1"}, "ckpt") == []
    assert compare_plug_ins({"--grpo-loss a.py:f": "1"}, {"--grpo-loss b.py:f": "2"}, "ckpt") == [
        "ckpt was trained without --grpo-loss b.py:f, which counts from here on",
        "ckpt was trained with --grpo-loss a.py:f, which this run leaves out",
    ]


def test_ranks_that_read_different_files_are_refused() -> None:
    check_agreement([{}, {}])
    with pytest.raises(InputError, match="--grpo-loss a.py:f: rank 1 read another file than rank 0"):
        check_agreement([{"--grpo-loss a.py:f": "1"}, {"--grpo-loss a.py:f": "2"}])


def test_a_misspelled_choice_is_still_an_error() -> None:
    with pytest.raises(UsageError, match="not one of the choices"):
        parse(*DENSE, "--grpo-advantage gropo")
    assert math.isinf(parse(*DENSE).algorithm.reward_max)

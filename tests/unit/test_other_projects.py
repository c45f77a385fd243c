"""Flags of other projects are rewritten to ours before the parser reads them, with the notes that say so."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_rl.command_line import flags
from megatron_rl.command_line.other_projects import Rewritten, find_project, read_values, rewrite, split_words
from megatron_rl.flag import Flag, index_by_name
from tests.command_lines import DENSE, keep_one_parser, parse, without
from tests.launch_scripts import read_blocks

SLIMES = "--rollout-batch-size 8 --n-samples-per-prompt 8"
CORRECTED = "--rl-inference-logprobs-is-correction"
CAP = "--rl-importance-sampling-truncation-coef"


@pytest.fixture(scope="module")
def known() -> Mapping[str, Flag]:
    parse(*DENSE)
    return index_by_name(flags.list_flags())


@pytest.fixture(autouse=True)
def _one_parser(monkeypatch: pytest.MonkeyPatch, known: Mapping[str, Flag]) -> None:
    keep_one_parser(monkeypatch)


@pytest.mark.parametrize(
    ("words", "rewritten", "said"),
    [
        ("stray --num-rollouts 3 --lr 1", "stray --num-rollouts 3 --lr 1", ""),
        ("--eps-clip 0.3", "--grpo-clamp-eps-lower 0.3 --grpo-clamp-eps-upper 0.3", "is taken as --grpo-clamp-eps-low"),
        ("--eps-clip=0.3 --eps-clip-high 0.28", "--grpo-clamp-eps-lower 0.3 --grpo-clamp-eps-upper 0.28", ""),
        ("--eps-clip-high 0.28 --eps-clip 0.3", "--grpo-clamp-eps-upper 0.28 --grpo-clamp-eps-lower 0.3", ""),
        (
            "--grpo-group-size 4 --rl-prompts-per-eval 3 --grpo-default-temperature 0.5",
            "--eval-num-prompts 3 --rollout-temperature 0.5 --grpo-group-size 4",
            "--grpo-default-temperature 0.5 is taken as --rollout-temperature 0.5: Megatron-LM's own RL loop's",
        ),
        (
            "--kl-loss-coef 0.1 --grpo-kl-beta 0.2",
            "--grpo-kl-beta 0.2",
            "--kl-loss-coef 0.1 is overruled by --grpo-kl-beta 0.2, which is written itself",
        ),
        (
            "--inference-max-requests 4 --inference-max-batch-size 8",
            "--rollout-max-num-seqs 8",
            "--inference-max-requests 4 is overruled by --inference-max-batch-size 8, which comes later",
        ),
        ("--advantage-estimator grpo", "--grpo-loss clip", "--advantage-estimator grpo is taken as --grpo-loss clip"),
        ("--disable-grpo-std-normalization", "--grpo-advantage mean", "is taken as --grpo-advantage mean: slime's"),
        (
            "--advantage-estimator ppo --lambd 0.95 --num-critic-only-steps 5 --critic-lr 1e-5",
            "--grpo-advantage gae --gae-lambda 0.95 --critic-warmup-iters 5 --critic-lr 1e-5 --critic-clip 0.2 "
            "--critic policy",
            "slime's flags imply --critic-clip 0.2, --critic policy",
        ),
        ("--lambd 0.95", "", "--lambd 0.95 has no effect without --advantage-estimator ppo, as in slime"),
        (
            "--use-opd --opd-type megatron --opd-teacher-load T --opd-kl-coef 0.5",
            "--teacher T --opd-coef 0.5",
            "--opd-teacher-load T is taken as --teacher T",
        ),
        ("--opd-teacher-load T", "", "--opd-teacher-load T has no effect without --use-opd, as in slime"),
        ("--use-tis", f"{CORRECTED} {CAP} 2", f"slime's flags imply {CAP} 2"),
        ("--use-tis --tis-clip 3", f"{CORRECTED} {CAP} 3", ""),
        (f"--use-tis {CAP} 5", f"{CORRECTED} {CAP} 5", ""),
        # slime's divergence counts only with --use-kl-loss, and its estimator only with a weight.
        ("--kl-loss-coef 0.1", "", "--kl-loss-coef 0.1 has no effect without --use-kl-loss, as in slime"),
        ("--kl-loss-coef 0.1 --kl-loss-type k2", "", "--kl-loss-type k2 has no effect without a weight above 0"),
        ("--use-kl-loss --kl-loss-coef 0 --kl-loss-type k1", "--grpo-kl-beta 0", "has no effect without a weight"),
        ("--use-kl-loss --kl-loss-coef 0.1", "--grpo-kl-beta 0.1 --grpo-kl-estimator k1", ""),
        (
            "--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type low_var_kl",
            "--grpo-kl-beta 0.1 --grpo-kl-estimator k3",
            "--kl-loss-coef 0.1 is taken as --grpo-kl-beta 0.1",
        ),
        (
            "--use-kl-loss --kl-loss-coef 0.1 --use-unbiased-kl --kl-loss-type k3",
            "--grpo-kl-beta 0.1 --grpo-kl-estimator unbiased",
            "",
        ),
        ("--use-kl-loss --grpo-kl-beta 0.1", "--grpo-kl-beta 0.1", ""),
        ("--sglang-mem-fraction-static 0.7 --colocate", "", ""),
    ],
)
def test_words_of_other_projects_become_ours(known: Mapping[str, Flag], words: str, rewritten: str, said: str) -> None:
    found = rewrite(words.split(), known)
    assert found.words == rewritten.split()
    assert found.refusals == []
    assert not said or any(said in note for note in found.notes), found.notes


IMPLIED = (
    "--bf16 --use-distributed-optimizer --ckpt-fully-parallel-load --eval-temperature 1 --grpo-aggregation sequence "
    "--lr 1e-6 --no-shuffle-prompts --prompt-key input"
)


@pytest.mark.parametrize(
    ("words", "left_out", "instead"),
    [
        ("", "", ""),
        ("--fp16", "--bf16", ""),
        ("--calculate-per-token-loss", "--grpo-aggregation sequence", ""),
        ("--grpo-aggregation constant", "--grpo-aggregation sequence", ""),
        ("--lr 1e-5", "--lr 1e-6", ""),
        ("--rollout-shuffle", "--no-shuffle-prompts", ""),
        ("--rollout-shuffle --prompts a", "--no-shuffle-prompts --prompt-key input", ""),
        ("--rollout-temperature 0.8", "--eval-temperature 1", "--eval-temperature 0.8"),
        ("--rollout-temperature 0.8 --eval-temperature 0.6", "--eval-temperature 1", ""),
    ],
)
def test_a_script_of_slime_implies_what_it_does_not_write(
    known: Mapping[str, Flag], words: str, left_out: str, instead: str
) -> None:
    expected = IMPLIED
    for name in filter(None, left_out.split("--")):
        expected = expected.replace(f"--{name.strip()}", instead).replace("  ", " ").strip()
    found = rewrite([*SLIMES.split(), *words.split()], known)
    assert " ".join(found.words).endswith(
        f"{words} {expected}".strip() if "--rollout-shuffle" not in words else expected
    )
    assert [
        note for note in found.notes if note == f"taken as slime's, whose runs have {expected.replace(' --', ', --')}"
    ]
    assert all(not found.origins[name].name for name, _ in map(read_values, split_words(expected.split())))


def test_no_flag_of_another_project_reaches_the_parser_and_each_is_named(
    known: Mapping[str, Flag], tmp_path: Path
) -> None:
    lost: dict[str, list[str]] = {}
    for block in read_blocks():
        words = block.complete(tmp_path)
        found = rewrite(words, known)
        theirs = [name for name, _ in map(read_values, split_words(words)) if is_foreign(name, known)]
        lost[block.name] = [name for name in theirs if not is_named(name, found)]
        assert not any(is_foreign(name, known) for name, _ in map(read_values, split_words(found.words)))
        own = [" ".join(flag) for flag in split_words(words) if not is_foreign(read_values(flag)[0], known)]
        assert " ".join(own) in " ".join(found.words)
    assert not any(lost.values()), lost


def is_foreign(name: str, known: Mapping[str, Flag]) -> bool:
    return name not in known and find_project(name) is not None


def is_named(name: str, found: Rewritten) -> bool:
    refused = {refusal.name for refusal in found.refusals}
    of_loss = name in ("--use-kl-loss", "--use-unbiased-kl")
    ignored = {ignored for names in found.ignored.values() for ignored in names}
    is_used = name in {origin.name for origin in found.origins.values()}
    return (
        of_loss or is_used or name in (refused | ignored | {*found.idle}) or any(name in note for note in found.notes)
    )


@pytest.mark.parametrize(
    ("words", "loss", "advantage", "aggregation"),
    [
        ("", "clip", "grpo", "sequence"),
        ("--advantage-estimator gspo --eps-clip 4e-4", "gspo", "grpo", "sequence"),
        ("--advantage-estimator cispo --eps-clip 1 --calculate-per-token-loss", "cispo", "grpo", "token"),
        ("--advantage-estimator grpo --disable-grpo-std-normalization", "clip", "mean", "sequence"),
        # An algorithm that is named goes before what a project implies.
        ("--algorithm dapo", "clip", "grpo", "token"),
    ],
)
def test_a_slime_run_minimizes_what_it_does_there(words: str, loss: str, advantage: str, aggregation: str) -> None:
    algorithm = parse(*DENSE, SLIMES, words).algorithm
    assert (algorithm.loss, algorithm.advantage, algorithm.aggregation) == (loss, advantage, aggregation)


def test_values_that_are_rewritten_have_the_written_flag_as_their_source() -> None:
    settings = parse(*without(DENSE, "--lr"), SLIMES, "--eps-clip 0.3")
    assert settings.sources["algorithm.clamp_eps_upper"] == "--eps-clip 0.3"
    assert settings.sources["optimizer.lr"] == "slime implies --lr 1e-6"
    assert any("without effect here: --colocate" in note for note in parse(*DENSE, "--colocate").notes)

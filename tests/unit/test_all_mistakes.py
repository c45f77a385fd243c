"""All mistakes of a command line are reported at once: one error a line, and none that only follows from another."""

import itertools
import json
import random
from pathlib import Path

import pytest

from megatron_rl.command_line import flags
from megatron_rl.errors import InputError
from megatron_rl.flag import Kind, find_nearest, find_related, index_by_name, suggest_nearest
from megatron_rl.shared.weights import families
from megatron_rl.types import Architecture
from tests.command_lines import CPU, RUN, folder, keep_one_parser, parse, parse_run, run_problems, without

MODEL = Architecture(
    family="qwen3", num_layers=8, hidden_size=64, ffn_hidden_size=128, num_attention_heads=8, num_query_groups=4,
    kv_channels=32, vocab_size=200, max_position_embeddings=256, qk_layernorm=True,
)  # fmt: skip
# Words that are wrong by themselves, with their errors. Those of one row are not to be combined.
MISTAKES = (
    {"--nonsense-of-mine": "unknown flag --nonsense-of-mine"},
    {"--micro-batch-sizes 4": "unknown flag --micro-batch-sizes (the nearest is --micro-batch-size)"},
    {"--mtp-num-layers 1": "--mtp-num-layers 1 is refused"},
    {"--fp8-format hybrid": "--fp8-format hybrid is refused"},
    {"--normalization LayerNorm": "--normalization LayerNorm is not supported"},
    {"--clip-grad much": "--clip-grad much: not a valid value", "--clip-grad -1": "--clip-grad -1 must be at least 0"},
    {"--seed": "--seed: expected one argument"},
    {"--no-shuffle-prompts yes": "unexpected 'yes'"},
    {"--num-layers 32": "--num-layers 32 contradicts num_hidden_layers = 8"},
    {"--rotary-base 7": "--rotary-base 7 contradicts rope_theta"},
    {"--tensor-model-parallel-size 3": "--tensor-model-parallel-size 3 does not divide the 8 attention heads"},
    {"--pipeline-model-parallel-size 3": "--pipeline-model-parallel-size 3 does not divide the 8 layers"},
    {"--context-parallel-size 0": "--context-parallel-size 0 must be at least 1"},
    {"--expert-model-parallel-size 2": "--expert-model-parallel-size 2 needs a model with experts"},
    {"--bf16 --fp16": "--bf16 and --fp16 cannot be given together"},
    {"--recompute-granularity full": "--recompute-granularity full needs --recompute-method"},
    {"--overlap-param-gather --use-distributed-optimizer": "--overlap-param-gather needs --overlap-grad-reduce"},
    {"--adam-beta1 2": "--adam-beta1 2 must be at least 0 and below 1"},
    {"--lr-warmup-fraction 3": "--lr-warmup-fraction 3 must be at least 0"},
    {"--start-weight-decay 1": "need --weight-decay-incr-style"},
    {"--ckpt-step 3": "--ckpt-step needs --load"},
    {"--grpo-clamp-eps-lower 4": "--grpo-clamp-eps-lower 4 must be between 0 and 1"},
    {"--rollout-patience-seconds -1": "--rollout-patience-seconds -1 must be a finite duration"},
    {"--rollout-num-threads 0": "--rollout-num-threads 0 must be at least 1"},
    {"--rollout-listen here": "--rollout-listen here must be HOST:PORT"},
    {"--reward-on-error perhaps": "--reward-on-error perhaps"},
    {"--rollout-temperature 0": "--rollout-temperature 0 must be finite and at least"},
    {"--eval-num-samples 0": "--eval-num-samples 0 must be at least 1"},
    {"--grpo-ref-interval 2": "--grpo-ref-interval 2 needs a reference"},
    {"--max-prompt-tokens 100": "--max-prompt-tokens 100 and --rollout-max-tokens 64 together are above"},
    {"--overlap-p2p-communication-warmup-flush": "--overlap-p2p-communication-warmup-flush needs virtual"},
    {"--frozen-offload": "--frozen-offload has no model"},
    {"--prompts /nowhere.jsonl": "--prompts /nowhere.jsonl does not exist"},
    {"--save-hf /dev/null/here": "--save-hf /dev/null/here cannot be made or written: /dev/null is not a folder"},
)  # fmt: skip
# Flags that a run cannot do without, with the error if one is missing.
MISSING = {
    "--hf-model": "--hf-model is missing",
    "--lr": "--lr is missing",
    "--train-iters": "--train-iters is missing",
    "--grpo-prompts-per-step": "--grpo-prompts-per-step is missing",
    "--rollout-folder": "--rollout-folder is missing",
    "--reward": "--reward is missing",
    "--prompts": "--prompts is missing",
}


@pytest.fixture(autouse=True)
def _one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_one_parser(monkeypatch)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*CPU, "--hf-model", folder(tmp_path_factory.mktemp("model"), MODEL), *RUN]


def check(words: list[str], said: list[str]) -> None:
    """Check that these are the errors, and no others.

    The number of ranks is not known: it would be one more.
    """
    problems = run_problems(*words, "--print-config")
    for text in said:
        assert sum(text in problem for problem in problems) == 1, f"{text} in {problems}"
    assert len(problems) == len(said), problems
    assert all("\n" not in problem for problem in problems)


def test_the_command_line_without_a_planted_mistake_is_accepted(base: list[str]) -> None:
    assert parse_run(*base).sizes.plan.num_prompts == 16


def test_each_mistake_is_one_error(base: list[str]) -> None:
    for row in MISTAKES:
        for words, said in row.items():
            check([*base, words], [said])
    for flag, said in MISSING.items():
        check(without(base, flag), [said])


def test_a_wrong_endpoint_and_a_missing_token_file_are_two_errors(base: list[str]) -> None:
    said = ["--rollout-endpoint here must be an address", "--rollout-token-file run/token does not exist"]
    check([*base, "--rollout-endpoint here"], said)


@pytest.mark.each_change
def test_any_two_mistakes_are_two_errors(base: list[str]) -> None:
    for first, second in itertools.combinations([next(iter(row.items())) for row in MISTAKES], 2):
        check([*base, first[0], second[0]], [first[1], second[1]])


def test_each_of_many_mistakes_and_missing_flags_is_an_error(base: list[str]) -> None:
    draw = random.Random(5)
    for _ in range(60):
        rows = draw.sample(MISTAKES, draw.randint(3, len(MISTAKES)))
        mistakes = [draw.choice([*row.items()]) for row in rows]
        # Missing lengths are not compared either.
        missing = draw.sample(["--lr", "--train-iters", "--rollout-folder"], draw.randint(1, 3))
        words = base
        for flag in missing:
            words = without(words, flag)
        check([*words, *(text for text, _ in mistakes)], [text for _, text in mistakes] + [MISSING[f] for f in missing])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # The unknown flags were meant for the missing ones.
        ("--train-iter 3", "unknown flag --train-iter (the nearest is --train-iters)"),
        ("--train-iters many", "--train-iters many: not a valid value"),
        ("--train-iters 2 --train-iters 0", "--train-iters 0 must be at least 1"),
    ],
)
def test_a_problem_that_follows_from_another_one_is_left_out(base: list[str], words: str, said: str) -> None:
    check([*without(base, "--train-iters"), words], [said])


def test_problems_of_batch_sizes_are_said_once_the_number_of_ranks_is_known(base: list[str]) -> None:
    words = [*base, "--micro-batch-size", "16", "--global-batch-size", "48"]
    problems = run_problems(*words, world_size=5)
    assert any(
        "--global-batch-size 48 is not a multiple of --micro-batch-size 16 times 5 replicas" in text
        for text in problems
    )
    divided = [*base, "--grpo-prompts-per-step", "16", "--micro-batch-size", "8"]
    assert parse_run(*divided, "--print-config").sizes.plan.num_replicas == 1
    assert "16 groups an update do not divide over 5 replicas" in run_problems(*divided, world_size=5)[0]
    assert parse_run(*divided, world_size=4).sizes.plan.num_replicas == 4


def test_without_a_launcher_a_run_has_one_rank(base: list[str]) -> None:
    assert "1 ranks are not a multiple of" in run_problems(*base, "--tensor-model-parallel-size 2")[0]
    assert parse_run(*base, "--tensor-model-parallel-size 2 --print-config").world_size is None


def test_a_family_that_is_not_supported_is_said_before_all_else_of_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "rope_scaling": 7, "hidden_size": -1}))
    with pytest.raises(InputError, match="^model_type 'gpt2' is not supported"):
        parse(*CPU, "--hf-model", str(tmp_path), "--num-layers 4")
    with pytest.raises(InputError, match="^model_type 'gpt2' is not supported"):
        parse_run(*CPU, "--hf-model", str(tmp_path), *RUN)


def test_an_unreadable_model_folder_is_said_together_with_other_mistakes(tmp_path: Path) -> None:
    words = [*CPU, "--hf-model", str(tmp_path), *without([*RUN], "--lr"), "--adam-beta1 2 --nonsense-of-mine"]
    check(
        words,
        [f"{tmp_path}/config.json does not exist", "unknown flag --nonsense", "--lr is missing", "--adam-beta1 2"],
    )


# A slip of the pen, and the flag that was meant; and flags of other programs, which are near none.
SLIPS = {
    "--tensor-model-paralel-size": "--tensor-model-parallel-size",
    "--tensor_model_parallel_size": "--tensor-model-parallel-size",
    "--micro_batch_size": "--micro-batch-size",
    "--global-batchsize": "--global-batch-size",
    "--train-iter": "--train-iters",
    "--grpo-kl-betta": "--grpo-kl-beta",
    "--seqlength": "--seq-length",
    "--hf-modell": "--hf-model",
    "--use-distributed-optimiser": "--use-distributed-optimizer",
    "--rollout-num-engine": "--rollout-num-engines",
    "--sequence-paralel": "--sequence-parallel",
    "--recompute-granularty": "--recompute-granularity",
    "--bf-16": "--bf16",
}
STRANGERS = (
    "--nonsense", "--learning-rate", "--advantage-estimator", "--actor-num-nodes", "--colocate", "--use-kl-loss",
    "--n-samples-per-prompt", "--rm-type", "--sglang-mem-fraction-static", "--input-key", "--debug-rollout-only",
    "--entropy-coef", "--num-gpus-per-node", "--deepspeed", "--report-to", "--output-dir", "--gamma", "--peft",
    "--model-name-or-path", "--accelerator", "--npu-fusion-attention",
)  # fmt: skip
RELATED = {
    "--kl-beta": ["--grpo-kl-beta"],
    "--entropy-coef": ["--grpo-entropy-coef"],
    "--grpo-kl-coef": ["--grpo-kl-beta", "--grpo-kl-estimator", "--grpo-kl-in"],
    "--grpo-nonsense": [],
    "--beta": [],
}


def test_a_model_named_as_on_the_hub_is_answered_with_how_to_download_it(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B, then"):
        families.read_config("Qwen/Qwen3-0.6B")
    for place in ("models/of/mine", "./model", "model"):
        with pytest.raises(InputError, match="does not exist") as raised:
            families.read_config(place)
        assert "hf download" not in str(raised.value)


def test_an_unknown_flag_is_answered_with_the_nearest_one_or_with_flags_that_have_its_words() -> None:
    known = index_by_name(flag for flag in flags.list_flags() if flag.kind is not Kind.REFUSED)
    assert {name: find_related(name, known) for name in RELATED} == RELATED
    assert suggest_nearest("--kl-beta", known) == " (flags with these words: --grpo-kl-beta)"
    assert {slip: find_nearest(slip, known) for slip in SLIPS} == SLIPS
    assert {name: find_nearest(name, known) for name in STRANGERS} == dict.fromkeys(STRANGERS)

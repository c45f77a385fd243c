"""Every flag of Megatron that is listed as used has an effect: another value changes the result, or is an error.

A flag without a row fails. So does a flag whose row shows no change: it belongs to those without effect.
tests/distributed/test_fields.py checks that the fields of megatron-core's configurations are read when a model is
trained.
"""

import dataclasses
import functools
import importlib.metadata
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from packaging.version import Version

from megatron_rl.command_line import flags, resolve
from megatron_rl.command_line import parse as command_line
from megatron_rl.errors import UsageError
from megatron_rl.flag import Flag, Kind
from megatron_rl.types import Architecture, Experts, LinearAttention, Rope, RopeKind
from tests.command_lines import CPU, DENSE, RUN, SPARSE, folder, keep_one_parser, parse, parse_run, without
from tests.effects import effect

MODEL = Architecture(
    family="qwen3", num_layers=8, hidden_size=64, ffn_hidden_size=128, num_attention_heads=8, num_query_groups=4,
    kv_channels=32, vocab_size=200, max_position_embeddings=256, rope=Rope(base=1e6), qk_layernorm=True,
)  # fmt: skip
FOLDERS = {
    "run": MODEL,
    "expert run": dataclasses.replace(
        MODEL, family="qwen3_moe", experts=Experts(num_experts=8, num_active=2, ffn_hidden_size=32)
    ),
    "sigmoid run": dataclasses.replace(
        MODEL,
        family="glm4_moe",
        experts=Experts(8, 2, 32, score="sigmoid", has_bias=True, shared_ffn_hidden_size=32),
    ),
    "linear run": dataclasses.replace(
        MODEL,
        family="qwen3_5_text",
        linear=LinearAttention(4, 8, 16, 16, full_interval=2),
        attention_gate=True,
        zero_centered_norms=True,
    ),
    "yarn run": dataclasses.replace(
        MODEL, rope=Rope(base=1e6, kind=RopeKind.YARN, factor=4.0, original_max_positions=64)
    ),
}
NUM_RANKS = 8


DESCRIBED = {
    "dense": [*DENSE],
    "sparse": [*SPARSE],
    "sigmoid": [
        *SPARSE, "--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias",
        *["--moe-shared-expert-intermediate-size", "48"],
    ],
    "biased": without(DENSE, "--disable-bias-linear"),
    "yarn": [
        *without(DENSE, "--position-embedding-type"), "--position-embedding-type", "yarn",
        *["--rotary-scaling-factor", "4", "--yarn-original-max-position-embeddings", "64"],
    ],
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """The words that show a flag's effect."""

    words: str
    """The flag with another value than the one that holds without it."""
    sees: str
    """The value that differs from the same command line without these words.

    "error" if they are an error that names the flag.
    """
    on: str = "run"
    """The command line: a run of a model, or a model that flags describe."""
    beside: str = ""
    """Words that both command lines have, too."""
    drops: str = ""
    """A flag of the description that is left out, because the row's contradicts it."""
    elsewhere: bool = False
    """A flag for effects on other platforms alone: there a field differs, and here a note or an error names it."""

    @property
    def flag(self) -> str:
        return (self.words or self.drops).split()[0]


def see(sees: str, words: str, replaces: bool = False, **others: Any) -> Iterator[Row]:
    """Make a row of each flag in the words; the value has the name of the flag if `sees` has no name after the dot."""
    for text in re.split(" (?=--)", words):
        flag = text.split()[0]
        field = re.sub("^--(no-|ddp-)?", "", flag).replace("-", "_")
        yield Row(text, sees if "." in sees or sees == "error" else f"{sees}.{field}",
                  drops=flag if replaces else "", **others)  # fmt: skip


PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
WSD = "--lr-decay-style WSD --lr-wsd-decay-iters 2"
UNROUNDED = "--no-yarn-correction-range-round-to-int"
LINEAR_ENGINES = "--rollout-dtype bfloat16 --publish-dtype bfloat16"
GROWING = "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1"
DISTRIBUTED = "--use-distributed-optimizer"
PRECISE = f"{DISTRIBUTED} --use-precision-aware-optimizer"
OFFLOADED = f"{PRECISE} --optimizer-cpu-offload"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
ROWS = {
    row.flag: row
    for row in (
        *see("model.vocab_size", "--make-vocab-size-divisible-by 7 --padded-vocab-size 512"),
        *see("model.share_embeddings_and_output_weights", "--untie-embeddings-and-output-weights", on="dense"),
        *see("model.max_sequence_length", "--max-position-embeddings 64", on="dense", replaces=True),
        *see("model", "--vocab-size 300", on="dense", replaces=True),
        *see("model.stages", "--num-virtual-stages-per-pipeline-rank 4", beside=PP2),
        *see(
            "iteration.sizes",
            "--micro-batch-size 4 --global-batch-size 64 --grpo-group-size 4 --grpo-filter-groups-with-same-reward",
        ),
        *see("iteration.sizes", "--seq-length 96 --grpo-prompts-per-step 8", replaces=True),
        *see("schedule.rates", "--train-iters 5 --lr 2e-6", replaces=True),
        *see(
            "schedule.rates",
            "--lr-decay-style cosine --lr-decay-iters 4 --lr-warmup-iters 1 --lr-warmup-fraction 0.5 "
            "--lr-decay-samples 512 --lr-warmup-samples 128 --min-lr 1e-7",
        ),
        *see("schedule.rates", "--lr-warmup-init 1e-7", beside="--lr-warmup-fraction 0.5"),
        *see("schedule.rates", "--lr-wsd-decay-style linear", beside=WSD),
        *see("schedule.rates", "--lr-wsd-decay-iters 4", beside=WSD, replaces=True),
        *see(
            "schedule.decays",
            "--start-weight-decay 0.5 --end-weight-decay 2 --weight-decay-incr-style cosine",
            beside=GROWING,
            replaces=True,
        ),
        *see("schedule.of_checkpoint", "--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler"),
        *see("schedule.decays", "--weight-decay 0.5"),
        *see("session", "--seed 5"),
        *see("session.timeout", "--distributed-timeout-minutes 3"),
        *see("session.sizes", "--num-layers-per-virtual-pipeline-stage 2", beside=PP2),
        *see(
            "session.sizes", "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2"
        ),
        *see("session.sizes", "--expert-model-parallel-size 2", on="expert run"),
        *see("checkpoints.calls", "--save out --load in"),
        *see("checkpoints.due", "--save-interval 2", beside="--save out"),
        *see("checkpoints.calls", "--save-retain-interval 4", beside="--save out --save-interval 2"),
        *see("checkpoints.calls", "--ckpt-step 3 --exit-on-missing-checkpoint", beside="--load in"),
        *see("checkpoints.version", "--finetune", beside="--load in --ckpt-step 3"),
        *see(
            "checkpoints.calls",
            "--no-save-optim --no-save-rng --async-save --no-ckpt-fully-parallel-save",
            beside="--save out",
        ),
        *see(
            "checkpoints.calls",
            "--no-load-optim --no-load-rng --ckpt-fully-parallel-load --dist-ckpt-strictness raise_all",
            beside="--load in --ckpt-step 3",
        ),
        *see("making.use_gloo_process_groups", "--disable-gloo-process-groups"),
        *see("roles.temperature", "--rollout-temperature 0.5"),
        *see(
            "objective.loss",
            "--grpo-clamp-eps-lower 0.3 --grpo-clamp-eps-upper 0.3 --grpo-kl-beta 0.1 "
            "--rl-inference-logprobs-is-correction",
        ),
        *see(
            "objective.loss",
            "--rl-importance-sampling-truncation-coef 1",
            beside="--rl-inference-logprobs-is-correction",
        ),
        *see("evaluations.due", "--eval-interval 3", beside="--prompts-held-out 1"),
        *see("observed.lines", "--log-interval 3"),
        *see("observed.dashboards", "--tensorboard-dir board --wandb-project p"),
        *see(
            "observed.dashboards", "--wandb-exp-name e --wandb-save-dir . --wandb-entity me", beside="--wandb-project p"
        ),
        *see("error", "--use-rotary-position-embeddings", on="yarn"),
        *see("error", "--rotary-scaling-factor 8", on="yarn run"),
        *see("error", "--yarn-correction-range-round-to-int", on="yarn", beside=UNROUNDED),
        *see(
            "error",
            "--rope-type yarn --rotary-interleaved --multi-latent-attention --q-lora-rank 8 --kv-lora-rank 8 "
            "--qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 --mscale 2 --mscale-all-dim 1 "
            "--softmax-type learnable --quick-geglu --glu-linear-offset 1 --activation-func-clamp-value 7 "
            "--window-attn-skip-freq 2 --enable-gpt-oss",
            on="dense",
        ),
        *see("error", "--norm-topk-prob", on="sparse", beside="--moe-router-pre-softmax"),
        *see("error", "--accumulate-allreduce-grads-in-fp32", beside="--bf16 --grad-reduce-in-bf16"),
        *see(
            "error",
            "--num-distributed-optimizer-instances 2 --hidden-dropout 0.1 --attention-dropout 0.1 "
            "--attention-output-gate --apply-layernorm-1p --experimental-attention-variant gated_delta_net "
            "--spec my_layers layer_spec",
        ),
        *see(
            "error",
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-group-topk 2 "
            "--moe-shared-expert-gate --moe-token-dispatcher-type none",
            on="expert run",
        ),
        *see(
            "error",
            "--linear-attention-freq 4 --linear-conv-kernel-dim 3 --linear-key-head-dim 8 --linear-value-head-dim 8 "
            "--linear-num-key-heads 8 --linear-num-value-heads 4",
            on="linear run",
            beside=LINEAR_ENGINES,
        ),
        *see(
            "positions.frequencies",
            "--rotary-base 500000 --rotary-seq-len-interpolation-factor 2 --use-rope-scaling "
            "--rope-scaling-type llama3",
            on="dense",
        ),
        *see("positions.frequencies", "--rotary-percent 0.5", on="sigmoid"),
        *see(
            "positions.frequencies",
            "--rope-scaling-factor 32 --original-max-position-embeddings 64 --low-freq-factor 2 --high-freq-factor 8",
            on="dense",
            beside="--use-rope-scaling",
        ),
        *see("positions.frequencies", "--yarn-original-max-position-embeddings 32", on="yarn", replaces=True),
        *see("positions.frequencies", "--yarn-beta-fast 2 --yarn-beta-slow 0.1", on="yarn", beside=UNROUNDED),
        *see("positions.frequencies", "--no-yarn-correction-range-round-to-int", on="yarn"),
        *see("transformer", "--window-size 31,0 --kv-channels 16 --add-qkv-bias --qk-layernorm", on="dense"),
        *see("transformer.window_size", "--sliding-window 32", on="dense"),
        *see("transformer.num_moe_experts", "--num-experts 4", on="sparse", replaces=True),
        *see(
            "transformer",
            "--moe-layer-freq [0]*2+[1]*6 --moe-router-topk-scaling-factor 2 --moe-router-num-groups 2",
            on="sigmoid",
        ),
        *see(
            "transformer",
            "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1 --moe-router-dtype fp64 "
            "--moe-z-loss-coeff 0.1",
            on="expert run",
        ),
        *see("transformer.num_layers_in_first_pipeline_stage", "--decoder-first-pipeline-num-layers 3", beside=PP2),
        *see("transformer.num_layers_in_last_pipeline_stage", "--decoder-last-pipeline-num-layers 3", beside=PP2),
        *see(
            "transformer",
            "--cp-comm-type a2a --recompute-granularity selective --no-clone-scatter-output-in-embedding "
            "--config-logger-dir logs",
        ),
        *see("transformer.recompute_granularity", "--recompute-activations"),
        *see("transformer.params_dtype", "--bf16 --fp16"),
        *see(
            "transformer",
            "--no-gradient-accumulation-fusion --batch-invariant-mode --deterministic-mode --transformer-impl local",
            elsewhere=True,
        ),
        *see("transformer.bias_activation_fusion", "--no-bias-swiglu-fusion", elsewhere=True),
        *see("transformer", "--no-bias-dropout-fusion", on="biased", elsewhere=True),
        *see("transformer.apply_rope_fusion", "--no-rope-fusion", elsewhere=True),
        *see("transformer", "--sequence-parallel", beside="--tensor-model-parallel-size 2"),
        *see(
            "transformer",
            "--expert-tensor-parallel-size 2 --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion",
            on="expert run",
            elsewhere=True,
        ),
        *see("transformer.overlap_p2p_comm_warmup_flush", "--overlap-p2p-communication-warmup-flush", beside=VPP2),
        *see(
            "transformer.microbatch_group_size_per_vp_stage",
            "--microbatch-group-size-per-virtual-pipeline-stage 4",
            beside=VPP2,
        ),
        *see(
            "transformer",
            "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64",
            on="dense",
            replaces=True,
        ),
        *see("transformer", "--account-for-embedding-in-pipeline-split", beside="--account-for-loss-in-pipeline-split"),
        *see("transformer", "--account-for-loss-in-pipeline-split", beside="--account-for-embedding-in-pipeline-split"),
        *see("transformer.layernorm_epsilon", "--norm-epsilon 1e-4", on="dense"),
        *see("transformer", "--recompute-method block --recompute-num-layers 2", beside=FULL, replaces=True),
        *see("transformer", "--distribute-saved-activations", beside=f"{FULL} --tensor-model-parallel-size 2"),
        *see(
            "transformer",
            "--recompute-modules core_attn moe",
            on="expert run",
            beside="--recompute-granularity selective",
        ),
        *see("transformer", "--moe-ffn-hidden-size 16 --moe-router-topk 3", on="sparse", replaces=True),
        *see("transformer", "--moe-router-pre-softmax", on="sparse"),
        *see("transformer", "--moe-router-bias-update-rate 0.1", on="sigmoid run"),
        *see("transformer", "--moe-shared-expert-intermediate-size 96", on="sigmoid", replaces=True),
        *see("transformer.recompute_modules", "--moe-layer-recompute", on="expert run"),
        *see("transformer", "--use-te-activation-func", beside="--no-bias-swiglu-fusion", elsewhere=True),
        *see("ddp.grad_reduce_in_fp32", "--grad-reduce-in-bf16", beside="--bf16"),
        *see(
            "ddp",
            "--use-distributed-optimizer --overlap-grad-reduce --check-for-large-grads --ddp-bucket-size 9000 "
            "--ddp-pad-buckets-for-high-nccl-busbw --ddp-reduce-scatter-with-fp32-accumulation "
            "--ddp-average-in-collective",
        ),
        *see("ddp", "--overlap-param-gather", beside=f"{DISTRIBUTED} --overlap-grad-reduce"),
        *see("ddp", "--no-align-param-gather", beside=VPP2),
        *see("ddp.nccl_ub", "--use-nccl-ub", elsewhere=True),
        *see("ddp", "--disable-symmetric-registration", beside="--use-nccl-ub", elsewhere=True),
        *see(
            "optimizer",
            "--no-pin-cpu-grads --no-pin-cpu-params --optimizer-offload-fraction 0.5 "
            "--use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d",
            beside=OFFLOADED,
            elsewhere=True,
        ),
        *see(
            "optimizer",
            "--main-grads-dtype bf16 --main-params-dtype fp16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
            "--optimizer-cpu-offload",
            beside=PRECISE,
            elsewhere=True,
        ),
        *see(
            "optimizer",
            "--decoupled-lr 1e-7 --apply-wd-to-qk-layernorm --optimizer sgd --adam-beta1 0.5 --adam-beta2 0.5 "
            "--adam-eps 0.1 --clip-grad 0.5 --log-num-zeros-in-grad",
        ),
        *see("optimizer", "--decoupled-min-lr 1e-8", beside="--decoupled-lr 1e-7"),
        *see("optimizer", "--use-precision-aware-optimizer", beside=DISTRIBUTED, elsewhere=True),
        *see(
            "optimizer",
            "--loss-scale 8 --initial-loss-scale 8 --min-loss-scale 2 --loss-scale-window 7 --hysteresis 1",
            beside="--fp16",
        ),
        *see("optimizer", "--sgd-momentum 0.5", beside="--optimizer sgd"),
        *see("process.reduced_precision", "--disable-bf16-reduced-precision-matmul", beside="--bf16"),
        *see("limits.ends", "--exit-interval 3 --exit-duration-in-mins 3"),
        Row(
            "--position-embedding-type yarn --rotary-scaling-factor 4",
            "positions.frequencies",
            "dense",
            drops="--position-embedding-type",
        ),
        Row("--train-samples 640", "schedule.rates", drops="--train-iters"),
        *(Row("", "error", "dense", drops=flag) for flag in ("--group-query-attention", "--swiglu", "--normalization")),
        Row("", "transformer.add_bias_linear", "dense", drops="--disable-bias-linear"),
    )
}
if Version(importlib.metadata.version("megatron-core")) >= Version("0.18"):
    ROWS["--ddp-num-buckets"] = Row("--ddp-num-buckets 3", "ddp.num_buckets")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    return {name: Path(folder(place / name.replace(" ", "_"), model)) for name, model in FOLDERS.items()}


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Keep relative folders within the test's, and reset what a configuration sets for the process."""
    monkeypatch.chdir(tmp_path)
    matmul = torch.backends.cuda.matmul
    was, matmul.allow_bf16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction, True
    yield
    matmul.allow_bf16_reduced_precision_reduction = was


@pytest.fixture
def _one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_one_parser(monkeypatch)


def command_lines(row: Row, folders: dict[str, Path]) -> tuple[list[str], list[str]]:
    """Return the command lines without the row's words, and with them."""
    of_model = DESCRIBED.get(row.on) or [*CPU, "--hf-model", str(folders[row.on]), *RUN]
    base = [*of_model, *row.beside.split()]
    return base, [*(without(base, row.drops) if row.drops else base), *row.words.split()]


@functools.cache
def seen(words: tuple[str, ...], name: str, is_described: bool, is_elsewhere: bool) -> object:
    """Return the value that a row looks at, or the error that the words end in."""
    try:
        if is_elsewhere:
            return fields_elsewhere(words)[name]
        settings = parse(*words) if is_described else parse_run(*words, world_size=NUM_RANKS)
    except UsageError as error:
        return error
    return effect(settings, name) if name != "error" else None


def fields_elsewhere(words: Sequence[str]) -> dict[str, object]:
    """Return the arguments of megatron-core's configurations on a platform that has everything."""
    able = SimpleNamespace(name="cuda", unsupported_fusions={})
    with patch.object(resolve, "find_engine_refusal", lambda: None):
        reading = command_line._read(words)
        model = next((Path(words[i + 1]) for i, word in enumerate(words) if word == "--hf-model"), None)
        architecture = command_line._read_architecture(model, reading)
        fields = resolve.resolve_fields(reading.flags, reading.given, architecture, able)
    assert not reading.problems
    values = {
        name: resolve._list_defaults(built) | getattr(fields, name) for name, built in flags.import_configs().items()
    }
    return {f"{name}.{field}": value for name, of_config in values.items() for field, value in of_config.items()}


def fault(flag: Flag, row: Row, folders: dict[str, Path]) -> str | None:
    """Return the fault of a flag that should have an effect; None if it has one."""
    before, after = (
        seen(tuple(words), row.sees, row.on in DESCRIBED, row.elsewhere) for words in command_lines(row, folders)
    )
    if isinstance(before, UsageError):
        return f"the row's own command line is an error: {before}"
    if row.sees == "error":
        is_named = isinstance(after, UsageError) and any(name in str(after) for name in flag.names)
        return None if is_named else f"{row.words or 'to leave it out'} must be an error that names it, and is {after}"
    if isinstance(after, UsageError):
        return f"{row.words} is an error: {after}"
    return None if before != after else f"{row.words} does not change {row.sees}"


def used_flags() -> dict[str, Flag]:
    return {flag.name: flag for flag in flags.list_flags() if flag.kind is Kind.USED and flag.megatron}


def faults(folders: dict[str, Path], rows: dict[str, Row]) -> dict[str, str]:
    used = used_flags()
    found = dict.fromkeys(used.keys() - rows, "has no row here")
    for name in used.keys() & rows:
        problem = fault(used[name], rows[name], folders)
        if problem is not None:
            found[name] = problem
    return found


@pytest.mark.usefixtures("_one_parser")
def test_another_value_of_every_used_flag_changes_an_object_or_is_an_error(folders: dict[str, Path]) -> None:
    assert faults(folders, ROWS) == {}
    assert ROWS.keys() == used_flags().keys()
    print(f"{len(ROWS)} flags")


@pytest.mark.usefixtures("_one_parser")
def test_flags_that_need_another_platform_are_said_here(folders: dict[str, Path]) -> None:
    for name, row in ROWS.items():
        if not row.elsewhere:
            continue
        words = tuple(command_lines(row, folders)[1])
        here = seen(words, row.sees, row.on in DESCRIBED, False)
        if isinstance(here, UsageError):
            # Names the flag itself, or one that it needs.
            assert any(needed in str(here) for needed in (name, *row.beside.split())), name
        elif here != fields_elsewhere(words)[row.sees]:
            assert any(name in note for note in parse_run(*words, world_size=NUM_RANKS).notes), name


def test_a_flag_that_changes_nothing_is_found(monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]) -> None:
    planted = Flag(name="--ddp-do-nothing", targets=("planted.nothing",), help="Nothing.")
    everything = [*flags.list_script_flags(), planted]
    monkeypatch.setattr(flags, "list_script_flags", lambda: everything)
    assert faults(folders, {"--ddp-do-nothing": Row("--ddp-do-nothing", "iteration.sizes")})["--ddp-do-nothing"] == (
        "--ddp-do-nothing does not change iteration.sizes"
    )
    rows = {name: ROWS[name] for name in ("--seed",)}
    assert faults(folders, rows)["--ddp-do-nothing"] == "has no row here"

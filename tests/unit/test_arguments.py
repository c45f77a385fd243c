"""Settings from the command line: accepted words, the values they give, and the errors."""

import dataclasses
import math
import operator
import re
import typing
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatron_rl.command_line import describe, flags
from megatron_rl.command_line import parse as command_line
from megatron_rl.config import settings as config
from megatron_rl.errors import ExitCode
from megatron_rl.flag import BOUNDS, Flag, Kind, index_by_name, own_flag
from megatron_rl.trainer.mcore.model import gpt
from megatron_rl.types import Architecture, Experts, Rope
from tests import recipes
from tests.command_lines import CPU, DENSE, QWEN3, RUN, SPARSE, error, folder, parse, parse_run


@pytest.mark.parametrize("name", recipes.NAMES)
def test_a_recipe_in_megatrons_style_parses(name: str) -> None:
    settings = parse(*CPU, *recipes.words(name), world_size=recipes.WORLD_SIZES[name])
    families_of = {
        "llama3_8b": "llama",
        "mixtral_8x7b": "mixtral",
        "qwen2_5_7b": "qwen2",
        "qwen3_30b_a3b": "qwen3_moe",
        "qwen3_8b": "qwen3",
    }
    assert settings.architecture.family == families_of[name]
    assert settings.transformer.bf16 is True
    assert settings.optimizer.use_distributed_optimizer is settings.ddp.use_distributed_optimizer is True
    assert any("--eval-iters" in note or "--log-throughput" in note for note in settings.notes)


def test_a_recipe_describes_the_model_that_it_names() -> None:
    model = parse(*CPU, *recipes.words("qwen3_30b_a3b")).architecture
    assert model == Architecture(
        family="qwen3_moe",
        num_layers=48,
        hidden_size=2048,
        ffn_hidden_size=6144,
        num_attention_heads=32,
        num_query_groups=4,
        kv_channels=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        norm_epsilon=1e-6,
        rope=Rope(base=1e6),
        qk_layernorm=True,
        experts=Experts(num_experts=128, num_active=8, ffn_hidden_size=768),
        dtype="bfloat16",
    )


def test_no_two_flags_share_a_name() -> None:
    names = [name for flag in flags.list_flags() for name in flag.names]
    assert len(names) == len(set(names))
    assert len(names) > 500


def test_every_flag_that_is_used_has_a_meaning_and_every_other_a_reason() -> None:
    for flag in flags.list_flags():
        assert flag.help if flag.kind is Kind.USED else flag.remedy, flag.name
        assert flag.remedy or flag.allowed is None, flag.name


# A number out of each bound, and one within it.
OUT_OF_BOUND = {
    "at least 0": (-1, 0),
    "at least 1": (0, 1),
    "above 0": (0, math.inf),
    "above 1": (1, math.inf),
    "finite and above 0": (math.inf, 0.5),
    "finite and at least 0": (math.inf, 0),
    "a finite duration above 0": (math.inf, 0.5),
    "at least 0 and below 1": (1, 0),
    "between 0 and 1": (1.5, 1),
    "above 0 and below 1": (1, 0.5),
}


def test_every_number_out_of_a_flags_bound_is_an_error_that_says_the_bound_and_what_to_do() -> None:
    assert BOUNDS.keys() == OUT_OF_BOUND.keys()
    bounded = [flag for flag in flags.list_flags() if flag.bound]
    assert len(bounded) >= 67
    for flag in bounded:
        wrong, right = OUT_OF_BOUND[flag.bound]
        (said,) = flag.check_bound(wrong)
        assert said.startswith(f"{flag.name} {wrong} must be {flag.bound}: "), said
        assert list(flag.check_bound((right, wrong))) == [said]


def test_the_file_of_megatrons_flags_says_everything_once_and_each_refusal_what_to_do() -> None:
    file = flags._read_file()
    groups = {**file["without_effect"], **file["refused"]}
    assert len(groups) == len(file["without_effect"]) + len(file["refused"])
    used = (name for section in ("transformer", "optimizer", "scripts") for name in file[section])
    words = [*used, *" ".join(groups.values()).split(), *file["without_flag"]["fields"].split()]
    names = [re.sub(r"(?<=.)[=+*].*", "", word) if word.startswith("--") else word for word in words]
    assert len(names) == len(set(names))
    # A pattern after it would never be looked at.
    assert [*flags._index_reasons()][-1] == "*"
    assert all("write " in reason or "drop " in reason for reason in file["refused"])


def test_every_flag_sets_a_field_that_exists() -> None:
    fields = {
        subject: {field.name for field in dataclasses.fields(cls)} for subject, cls in flags.import_configs().items()
    }
    for subject, cls in typing.get_type_hints(config.Subjects).items():
        fields[subject] = {field.name for field in dataclasses.fields(cls)}
    for flag in flags.list_flags():
        for target in flag.targets:
            subject, _, field = target.partition(".")
            assert subject in ("architecture", "described", "layout", "samples") or field in fields[subject], target


def test_a_field_that_megatron_core_adds_is_refused_as_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Newer(flags.import_configs()["transformer"]):
        moe_brand_new_trick: bool = False

    configs = {**flags.import_configs(), "transformer": Newer}
    monkeypatch.setattr(flags, "import_configs", lambda: configs)
    flag = index_by_name(flags.list_field_flags())["--moe-brand-new-trick"]
    assert flag.kind is Kind.REFUSED
    assert not flag.accepts(True)


def test_the_page_of_flags_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "flags.md"
    assert describe.write_flags_page() == page.read_text(), "docs/flags.md is not current: run make flags"


def test_flags_of_a_new_dataclass_in_subjects_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class ShippingConfig:
        shipping_bucket: int = own_flag(7, "Bytes at once.", bound="at least 1")

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Subjects(config.Subjects):
        shipping: ShippingConfig = ShippingConfig()

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class DraftSettings(config.DraftSettings, Subjects):
        pass

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Settings(config.Settings, DraftSettings):
        pass

    for module in (flags, command_line):
        monkeypatch.setattr(module, "Subjects", Subjects)
    monkeypatch.setattr(command_line, "DraftSettings", DraftSettings)
    monkeypatch.setattr(command_line, "Settings", Settings)
    # Local names, which type hints cannot find by themselves.
    Subjects.__annotations__["shipping"] = ShippingConfig
    assert parse(*DENSE, "--shipping-bucket 9").shipping.shipping_bucket == 9
    assert parse(*DENSE).shipping.shipping_bucket == 7
    assert error(*DENSE, "--shipping-bucket 0") == "--shipping-bucket 0 must be at least 1: write 1 or more"


VIRTUAL = ("--num-layers-per-virtual-pipeline-stage 2", "--num-virtual-stages-per-pipeline-rank 2")
GROUPED_GEMM = "--moe-grouped-gemm --transformer-impl transformer_engine --distributed-backend nccl"


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("", {"transformer.hidden_dropout": 0.0, "transformer.attention_dropout": 0.0}),
        ("", {"transformer.moe_token_dispatcher_type": "alltoall", "transformer.variable_seq_lengths": True}),
        ("", {"platform": "cpu", "attention.backend": "merge"}),
        ("--window-size 15,0", {"attention.backend": "gather"}),
        ("--disable-clone-scatter-output-in-embedding", {"transformer.clone_scatter_output_in_embedding": False}),
        ("--context-parallel-size 2", {"transformer.cp_comm_type": "a2a"}),
        ("--context-parallel-size 2 --cp-comm-type a2a", {"transformer.cp_comm_type": "a2a"}),
        ("--cp-comm-type p2p", {"transformer.cp_comm_type": "p2p"}),
        ("--recompute-activations", {"transformer.recompute_modules": ["core_attn"]}),
        ("--sequence-parallel", {"transformer.sequence_parallel": False}),
        ("--bf16", {"ddp.grad_reduce_in_fp32": True}),
        ("--fp16", {"ddp.grad_reduce_in_fp32": True}),
        ("--bf16 --grad-reduce-in-bf16", {"ddp.grad_reduce_in_fp32": False}),
        ("--lr 1e-6 --lr 0.000001", {"optimizer.lr": 1e-6}),
        ("--lr 1e-6 --lr 2e-6", {"optimizer.lr": 2e-6}),
        (
            "--recompute-granularity selective --recompute-modules core_attn mlp layernorm",
            {"transformer.recompute_modules": ["core_attn", "layernorm"]},
        ),
        *(
            (
                f"--pipeline-model-parallel-size 2 {words}",
                {
                    "transformer.virtual_pipeline_model_parallel_size": 2,
                    "transformer.overlap_p2p_comm": True,
                    "transformer.batch_p2p_comm": False,
                    "transformer.deallocate_pipeline_outputs": False,
                },
            )
            for words in VIRTUAL
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4",
            {"transformer.virtual_pipeline_model_parallel_size": None},
        ),
    ],
)
def test_words_give_values_to_fields(words: str, values: dict[str, object]) -> None:
    settings = parse(*DENSE, words)
    assert {target: operator.attrgetter(target)(settings) for target in values} == values


def test_values_are_read_as_the_type_of_their_field() -> None:
    assert index_by_name(flags.list_flags())["--exp-avg-dtype"].read(["bf16"]) is torch.bfloat16
    sparse = parse(*SPARSE, "--moe-aux-loss-coeff 1e-2 --moe-layer-freq [1]*8")
    assert sparse.transformer.moe_aux_loss_coeff == 0.01
    assert sparse.transformer.moe_layer_freq == [1] * 8
    assert parse("--platform=cpu", *DENSE[2:]).platform == "cpu"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lr 1e-6 --lr 2e-6", ["--lr 1e-6 is overruled by --lr 2e-6, which comes later"]),
        ("--sequence-parallel", ["--sequence-parallel"]),
        (GROUPED_GEMM, ["--moe-grouped-gemm", "--transformer-impl", "--distributed-backend (each platform has one"]),
        (
            "--recompute-granularity selective --recompute-modules core_attn mlp layernorm",
            ["without effect on the platform cpu: --recompute-modules mlp"],
        ),
    ],
)
def test_a_flag_that_is_overruled_or_has_no_effect_is_said(words: str, said: list[str]) -> None:
    notes = parse(*SPARSE, words).notes
    assert all(any(text in note for note in notes) for text in said), notes


def test_flags_without_effect_are_said_once_and_grouped_by_reason() -> None:
    notes = parse(*DENSE, "--data-path 0.5 a 0.5 b --split 1,0,0 --split 1,0,0 --eval-iters 3").notes
    assert len(notes) == len(parse(*DENSE).notes) + 2
    assert "--data-path, --split" in notes[0]
    assert "--eval-iters" in notes[1]


@pytest.mark.parametrize(
    "words",
    [
        "--context-parallel-size 1 --mtp-num-layers 0 --softmax-type vanilla --lr-warmup-samples 0",
        "--grpo-iterations 1 --grpo-entropy-term-weight 0.0 --rotary-seq-len-interpolation-factor 1 "
        "--moe-router-score-function softmax --first-k-dense-replace -1",
    ],
)
def test_a_flag_may_be_given_the_value_that_asks_for_nothing(words: str) -> None:
    expected, notes = ([note for note in parse(*DENSE, text).notes if "Megatron's scripts" not in note]
                       for text in ("", words))  # fmt: skip
    assert notes == expected


def test_a_flag_of_a_newer_megatron_core_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = Flag(name="--ddp-num-moons", convert=int, targets=("ddp.num_moons",), help="Moons.")
    monkeypatch.setattr(flags, "list_script_flags", lambda: [newer])
    flag = index_by_name(flags.list_flags())["--ddp-num-moons"]
    assert flag.kind is Kind.REFUSED
    assert flags.find_megatron_version() in flag.remedy


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ("--hysteresis 1", "--fp16"),
        ("--min-loss-scale 2", "--fp16 --loss-scale 8"),
        ("--disable-bf16-reduced-precision-matmul", "--bf16"),
        ("--adam-beta1 0.5", "--optimizer sgd"),
        ("--sgd-momentum 0.5", "--optimizer sgd"),
        ("--decoupled-min-lr 0.1", "--decoupled-lr 1"),
        ("--no-pin-cpu-grads", ""),
        ("--lr-wsd-decay-style cosine", "--lr-decay-style WSD --lr-wsd-decay-iters 3"),
        ("--apply-wd-to-qk-layernorm", "--qk-layernorm"),
        (
            "--microbatch-group-size-per-virtual-pipeline-stage 4",
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        ),
        ("--ddp-bucket-size 9000", "--overlap-grad-reduce"),
        ("--ddp-pad-buckets-for-high-nccl-busbw", "--use-distributed-optimizer"),
        ("--moe-router-dtype fp64", "--qk-layernorm --num-experts 8"),
        ("--save-interval 2", "--save out"),
        ("--async-save", "--save out"),
        ("--finetune", "--load in"),
        ("--eval-interval 5", "--prompts-held-out 1"),
        ("--eval-interval 5", "--eval-prompts held.jsonl"),
        ("--eval-command ./evaluate", "--eval-interval 5 --prompts-held-out 1"),
    ],
)
def test_a_flag_that_nothing_reads_without_another_is_said_once(words: str, needed: str) -> None:
    def said(*more: str) -> list[str]:
        return [note for note in parse(*DENSE, words, *more).notes if note.startswith(f"{words} has no effect")]

    if words.startswith("--adam"):
        assert (len(said()), len(said(needed))) == (0, 1)
    elif words.startswith("--min-loss-scale"):
        assert (len(said()), len(said("--fp16")), len(said(needed))) == (1, 0, 1)
    else:
        assert len(said()) == 1
        assert not needed or not said(needed)


@pytest.mark.parametrize(("more", "is_said"), [("", True), ("--grpo-advantage gdpo", False)])
def test_a_reward_beside_another_sidecar_is_said_to_have_no_effect_unless_its_weight_is_read(
    more: str, is_said: bool
) -> None:
    notes = parse(*DENSE, "--rollout-endpoint http://host:1 --reward exact", more).notes
    assert any(note.startswith("--reward exact has no effect beside --rollout-endpoint") for note in notes) == is_said


def test_a_program_of_evaluations_belongs_to_the_sidecar_that_another_one_started() -> None:
    words = "--rollout-endpoint http://host:1 --eval-command ./evaluate --eval-interval 5 --prompts-held-out 1"
    (note,) = [note for note in parse(*DENSE, words).notes if note.startswith("--eval-command")]
    assert note.endswith("or beside --rollout-endpoint, whose own flag counts")


@pytest.mark.parametrize(("of_update", "num_notes"), [("32", 1), ("16", 0)])
def test_replay_of_the_old_policys_experts_is_said_to_need_a_second_update(of_update: str, num_notes: int) -> None:
    words = ["--grpo-prompts-per-step", "8", "--grpo-group-size", "4", "--global-batch-size", of_update]
    settings = parse(*DENSE, "--qk-layernorm", "--num-experts", "8", "--grpo-replay-routing", *words)
    assert settings.algorithm.replay_routing
    said = "--grpo-replay-routing has no effect with one update an iteration"
    assert len([note for note in settings.notes if note == said]) == num_notes


def test_the_printed_configuration_says_where_each_value_came_from(tmp_path: Path) -> None:
    text = describe.print_config(
        parse_run(*CPU, "--hf-model", folder(tmp_path, QWEN3), *RUN, "--bf16 --split 1 --hidden-dropout 0")
    )
    rows = [re.split(r"\s+[=#]\s+", line) for line in text.splitlines()]
    lines = {row[0]: row[1:] for row in rows}
    assert ["num_layers", "4", f"{tmp_path}/config.json"] in rows
    assert lines["lr"] == ["1e-06", "--lr 1e-6"]
    assert lines["bf16"] == ["True", "--bf16"]
    assert lines["hidden_dropout"] == ["0", "--hidden-dropout 0"]
    assert lines["attention_dropout"] == ["0", "default of this package"]
    assert lines["apply_rope_fusion"] == ["False", "platform cpu"]
    assert lines["params_dtype"][0] == "bfloat16"
    assert lines["moe_token_dispatcher_type"] == ["alltoall", "default of this package"]
    assert lines["variable_seq_lengths"] == ["True", "packed groups differ in length"]
    assert lines["backend"] == ["merge", "--shared-prompt-backend auto takes merge"]
    assert lines["num_replicas"] == ["1", "the ranks of the launcher"]
    assert lines["longest_prompt"][0] == "64"
    assert lines["recompute_granularity"] == ["-", "default of megatron-core"]
    assert "note: without effect here: --split" in text
    assert "note: --shared-prompt-backend" not in text


def test_a_command_line_can_be_checked_without_running_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*CPU, "--hf-model", folder(tmp_path, QWEN3), *RUN]
    assert command_line.main(words) == ExitCode.OK
    assert capsys.readouterr().out.startswith("platform = cpu")
    assert command_line.main([*words, "--nonsense"]) == ExitCode.USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: unknown flag --nonsense")


def test_each_model_gets_a_copy_of_the_checked_configuration() -> None:
    settings = parse(*SPARSE, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2")
    config = settings.transformer
    assert (config.overlap_p2p_comm, config.batch_p2p_comm, config.deallocate_pipeline_outputs) == (True, False, False)
    with patch.object(gpt, "build_chunks") as made:
        gpt.build_model(settings)
        gpt.build_model(settings)
    copies = [call.args[0] for call in made.call_args_list]
    assert all(copy == config for copy in copies)
    # Megatron writes into the fields of a model.
    assert len({id(one) for one in (config, *copies)}) == 3


def test_automatic_choices_are_noted_with_verbose_and_flags_without_effect_always():
    plain, verbose = (parse(*DENSE, words).notes for words in ("--split 1", "--split 1 --verbose"))
    assert not any("auto takes" in note for note in plain)
    added = [note for note in verbose if note not in plain]
    assert "--shared-prompt-backend auto takes merge" in added
    assert any("without effect here: --split" in note for note in plain)

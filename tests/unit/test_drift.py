"""The doctor of differences: planted causes are named, and a healthy engine is named healthy."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.drift.command import configure, describe, main
from megatron_rl.drift.definition import Definition, round_numbers
from megatron_rl.drift.diagnosis import BETWEEN, SAMPLER, Diagnosis, Examiner, Recorded, propagate_errors
from megatron_rl.errors import InputError, UsageError
from megatron_rl.shared.records.model_parts import DIVIDED, LayerPart, ModelPart, Recording, join_ranks
from megatron_rl.sidecar.settings import RewardConfig, SidecarSettings, write_message
from tests import hf_models

LENGTHS, NUM_SAMPLED, TEMPERATURE = (23, 9), 6, 0.8


@dataclasses.dataclass(frozen=True)
class Exact:
    """The definition and transformers' modules, for a planted change."""

    compute: Callable[[LayerPart, Any], dict[str, torch.Tensor]]
    base: Any


class StandIn(Definition):
    """An engine that computes by the definition in a precision of its own, and keeps a recording."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(folder, dtype)
        self.points: dict[LayerPart, dict[str, torch.Tensor]] = {}
        self.changes: dict[ModelPart, Callable[[Exact, LayerPart, dict], dict]] = {}

    def compute(self, point: LayerPart, given: Any) -> dict[str, torch.Tensor]:
        change = self.changes.get(point.part)
        compute = super().compute
        out = compute(point, given) if change is None else change(Exact(compute, self.base), point, given)
        self.points[point] = {**given, **out}
        return out

    def sample(self, tokens: list[int], temperature: float = TEMPERATURE) -> Recorded:
        self.points = {}
        log_probs = propagate_errors(self, tokens, NUM_SAMPLED, temperature, {})
        return Recorded(tokens, log_probs.tolist(), TEMPERATURE, Recording(self.points))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen3": hf_models.draw("qwen3", root / "first"),
        "other": hf_models.draw("qwen3", root / "other", seed=1),
        "qwen3_moe": hf_models.draw("qwen3_moe", root / "moe"),
    }


def diagnose(folder: Path, engine: StandIn, num_ranks: int = 1, temperature: float = TEMPERATURE) -> Diagnosis:
    sequences = [engine.sample(tokens, temperature) for tokens in hf_models.sequences(list(LENGTHS))]
    examiner = Examiner(Definition(folder, torch.float64), Definition(folder, engine.dtype), num_ranks)
    return examiner.diagnose(sequences)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_healthy_engine_is_named_healthy(folders, family: str, dtype: torch.dtype) -> None:
    found = diagnose(folders[family], StandIn(folders[family], dtype))
    assert not found.causes
    total = sum(finding.effect for finding in found.findings)
    # To first order the effects of all parts make up the difference; the sum of absolute values is at least that.
    assert 0 < found.difference <= 1.05 * total


def in_bfloat16(names: tuple[str, ...] = ("out",)) -> Callable[[Any, LayerPart, dict], dict]:
    def compute(definition: Exact, point: LayerPart, given: dict) -> dict:
        found = definition.compute(point, given)
        return {**found, **{name: found[name].bfloat16().float() for name in names}}

    return compute


def with_epsilon(definition: Exact, point: LayerPart, given: dict) -> dict:
    x = given["in"].float()
    weight = definition.base.layers[point.layer].input_layernorm.weight
    return {"out": weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-4)}


def one_position_later(definition: Exact, point: LayerPart, given: dict) -> dict:
    late = given["positions"] + (given["positions"] > 0).long()
    return definition.compute(point, {**given, "positions": late})


def without_scale(definition: Exact, point: LayerPart, given: dict) -> dict:
    return definition.compute(point, {**given, "queries": given["queries"] * 1.01})


def one_key_unseen(definition: Exact, point: LayerPart, given: dict) -> dict:
    out = definition.compute(point, given)["out"].clone()
    out[4] = definition.compute(point, {name: tensor[:5].roll(-1, 0) for name, tensor in given.items()})["out"][3]
    return {"out": out}


def sum_in_bfloat16(definition: Exact, point: LayerPart, given: dict) -> dict:
    halves = [given["in"].clone() for _ in range(2)]
    middle = given["in"].shape[1] // 2
    halves[0][:, middle:] = 0
    halves[1][:, :middle] = 0
    parts = [definition.compute(point, {"in": half})["out"].bfloat16() for half in halves]
    return {"out": (parts[0] + parts[1]).float()}


def nearest_in_8_bits(values: torch.Tensor) -> torch.Tensor:
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    table = table[table.isfinite()].unique()
    return table[torch.searchsorted((table[1:] + table[:-1]) / 2, values)]


def product_in_8_bits(definition: Exact, point: LayerPart, given: dict) -> dict:
    weight, x = definition.base.layers[point.layer].mlp.down_proj.weight.detach().float(), given["in"].float()
    of_rows, of_tokens = (one.abs().amax(dim=1, keepdim=True) / 448 for one in (weight, x))
    out = nearest_in_8_bits(x / of_tokens) @ nearest_in_8_bits(weight / of_rows).T * of_tokens * of_rows.T
    return {"out": out.to(given["in"].dtype)}


def cache_in_8_bits(definition: Exact, point: LayerPart, given: dict) -> dict:
    kept = {name: nearest_in_8_bits(given[name].float()) for name in ("keys", "values")}
    return definition.compute(point, {**given, **kept})


def cache_cut_to_8_bits(definition: Exact, point: LayerPart, given: dict) -> dict:
    kept = {name: round_numbers(given[name].float(), cuts=True) for name in ("keys", "values")}
    return definition.compute(point, {**given, **kept})


def one_rank_left_out(definition: Exact, point: LayerPart, given: dict) -> dict:
    half = given["in"].clone()
    half[:, half.shape[1] // 2 :] = 0
    return definition.compute(point, {"in": half})


def with_weights_as_they_are(definition: Exact, point: LayerPart, given: dict) -> dict:
    """Leave the weights of the chosen experts as the softmax over all gives them."""
    gate = definition.base.layers[point.layer].mlp.gate
    gate.norm_topk_prob = not gate.norm_topk_prob
    try:
        return definition.compute(point, given)
    finally:
        gate.norm_topk_prob = not gate.norm_topk_prob


def in_layer(layer: int, change: Callable[[Any, LayerPart, dict], dict]) -> Callable[[Any, LayerPart, dict], dict]:
    return lambda exact, point, given: (
        change(exact, point, given) if point.layer == layer else exact.compute(point, given)
    )


ELSE, IN_BFLOAT16, IN_8_BITS = (
    "it computes something else than the definition", "it computes in bfloat16", "it computes in float8_e4m3fn",
)  # fmt: skip
OF_RANKS = "the sum over 2 ranks, or the product before it, is another"


@pytest.mark.parametrize(
    ("part", "change", "reason", "family", "num_ranks"),
    [
        (ModelPart.LOGITS, in_bfloat16(), IN_BFLOAT16, "qwen3", 1),
        (ModelPart.ATTENTION_NORM, with_epsilon, ELSE, "qwen3", 1),
        (ModelPart.ROTATION, one_position_later, ELSE, "qwen3", 1),
        (ModelPart.ATTENTION, without_scale, ELSE, "qwen3", 1),
        (ModelPart.ATTENTION, one_key_unseen, ELSE, "qwen3", 1),
        (ModelPart.ATTENTION, in_bfloat16(), IN_BFLOAT16, "qwen3", 1),
        (ModelPart.DOWN, product_in_8_bits, IN_8_BITS, "qwen3", 1),
        (ModelPart.ATTENTION, cache_in_8_bits, IN_8_BITS, "qwen3", 1),
        (ModelPart.EXPERTS, with_weights_as_they_are, ELSE, "qwen3_moe", 1),
        (ModelPart.DOWN, sum_in_bfloat16, f"{IN_BFLOAT16}, or the sum over 2 ranks does", "qwen3", 2),
        (ModelPart.ATTENTION_OUTPUT, one_rank_left_out, OF_RANKS, "qwen3", 2),
    ],
    ids=[
        "precision of logits", "norm", "rotation", "scale of attention", "a key unseen", "attention in bfloat16",
        "product in 8 bits", "cache in 8 bits", "experts", "sum over ranks", "a rank left out",
    ],
)  # fmt: skip
def test_a_planted_cause_is_named_and_nothing_else_is(folders, part, change, reason, family, num_ranks) -> None:
    engine = StandIn(folders[family])
    engine.changes = {part: change}
    found = diagnose(folders[family], engine, num_ranks)
    (cause,) = found.causes
    assert (cause.name, cause.reason) == (part, reason)
    # It is also what log-probs differ by.
    assert cause is found.findings[0]
    assert cause.effect > found.difference / 3


@pytest.mark.parametrize(
    ("part", "change", "is_within"),
    [
        # Errors that 16 bits would allow.
        (ModelPart.DOWN, in_layer(3, product_in_8_bits), True),
        (ModelPart.ATTENTION, in_layer(2, cache_in_8_bits), True),
        (ModelPart.ATTENTION, cache_cut_to_8_bits, False),
    ],
    ids=["product", "cache", "cache cut off"],
)
def test_8_bits_are_named_in_an_engine_of_16(folders, part, change, is_within) -> None:
    engine = StandIn(folders["qwen3"], torch.bfloat16)
    engine.changes[part] = change
    (cause,) = diagnose(folders["qwen3"], engine).causes
    assert (cause.name, cause.reason) == (part, IN_8_BITS)
    assert cause.excess <= 1 or not is_within


def test_the_definition_in_8_bits_rounds_weights_and_inputs(folders) -> None:
    definition = Definition(folders["qwen3"], torch.float64, torch.float32, quantizes=True)
    plain = Definition(folders["qwen3"], torch.float32)
    point, given = LayerPart(ModelPart.DOWN, 1), {"in": torch.randn(7, plain.model.config.intermediate_size)}
    wanted = product_in_8_bits(Exact(plain.compute, plain.base), point, given)["out"]
    # Rounding decides between two 8-bit floats for a few numbers at most.
    away = (definition.compute(point, given)["out"] - wanted).abs()
    assert away.median() < 1e-5 * wanted.abs().max()


def test_numbers_are_rounded_to_the_nearest_8_bit_float_or_to_the_next_towards_zero() -> None:
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    values = torch.cat([torch.randn(4096, dtype=torch.float64) * 3, every, -every])
    sizes = values.abs()
    below = every[torch.searchsorted(every, sizes, right=True) - 1]
    assert torch.equal(round_numbers(values, cuts=True), below * values.sign())
    nearest = (sizes[:, None] - every).abs().amin(dim=1)
    assert torch.equal((round_numbers(values, cuts=False) - values).abs(), nearest)


def test_another_temperature_is_named(folders) -> None:
    found = diagnose(folders["qwen3"], StandIn(folders["qwen3"]), temperature=1.0)
    (cause,) = found.causes
    assert cause.name == SAMPLER
    assert cause.reason == "its log-probs are those of temperature 1, and not 0.8"


def test_weights_of_another_checkpoint_are_named(folders) -> None:
    found = diagnose(folders["qwen3"], StandIn(folders["other"]))
    assert found.is_of_other_weights
    assert {cause.reason for cause in found.causes} == {"it computes with other weights than the checkpoint's"}


def test_products_in_bfloat16_are_not_taken_for_other_weights(folders) -> None:
    engine = StandIn(folders["qwen3"])
    rounded = (*(part for part in ModelPart if part.startswith("product")), ModelPart.LOGITS, ModelPart.ATTENTION_NORM)
    names = {ModelPart.QKV: ("queries", "keys", "values"), ModelPart.GATE_UP: ("gate", "up")}
    engine.changes = {part: in_bfloat16(names.get(part, ("out",))) for part in (*rounded, ModelPart.MLP_NORM)}
    found = diagnose(folders["qwen3"], engine)
    assert not found.is_of_other_weights
    assert len(found.causes) == 7
    assert {cause.reason for cause in found.causes} == {"it computes in bfloat16"}


def examine(folder: Path, recorded: Recorded, changes: dict[LayerPart, dict]) -> Diagnosis:
    """Diagnose a recording in which some points are others."""
    points = {point: recorded.recording[point] for point in recorded.recording} | changes
    dtype = next(iter(points.values()))["out"].dtype
    examiner = Examiner(Definition(folder, torch.float64), Definition(folder, dtype))
    return examiner.diagnose([dataclasses.replace(recorded, recording=Recording(points))])


@pytest.mark.parametrize(
    ("part", "name", "read"),
    [
        (ModelPart.EMBEDDING, "tokens", torch.tensor(hf_models.sequences([9])[0]).roll(1)),
        (ModelPart.ROTATION, "positions", torch.arange(9) % 5),
    ],
)
def test_an_engine_that_reads_other_tokens_or_positions_is_named(folders, part, name, read) -> None:
    definition = Definition(folders["qwen3"], torch.float32)
    recorded = StandIn(folders["qwen3"]).sample(hf_models.sequences([9])[0])
    # Each part is right for what it was given.
    given = {point: {**recorded.recording[point], name: read} for point in recorded.recording if point.part is part}
    changes = {point: {**inputs, **definition.compute(point, inputs)} for point, inputs in given.items()}
    causes = examine(folders["qwen3"], recorded, changes).causes
    assert BETWEEN in {cause.name for cause in causes}
    assert f"its {name} are not those of the response" in {cause.reason for cause in causes}


def test_log_probs_that_the_parts_do_not_make_up_are_named(folders) -> None:
    # All parts are right for what they are given, and what they are given is half of what it must be.
    engine = StandIn(folders["qwen3"])
    exact = engine.compute
    engine.compute = lambda point, given: exact(  # type: ignore[method-assign]
        point, {"in": given["in"] - engine.points[LayerPart(ModelPart.DOWN, 0)]["out"] / 2}
        if point == LayerPart(ModelPart.ATTENTION_NORM, 1) else given,
    )  # fmt: skip
    (cause,) = diagnose(folders["qwen3"], engine).causes
    assert (cause.name, cause.reason[:20]) == (BETWEEN, "log-probs differ by ")
    assert cause.effect > 1e-3


def test_a_large_number_in_one_row_hides_no_errors_of_others(folders) -> None:
    recorded = StandIn(folders["qwen3"], torch.bfloat16).sample(hf_models.sequences([9])[0])
    point = LayerPart(ModelPart.DOWN, 0)
    inputs = recorded.recording[point]["in"].clone()
    inputs[0] *= 1e4
    outputs = Definition(folders["qwen3"], torch.bfloat16).compute(point, {"in": inputs})["out"]
    for factor, is_right in ((1.0, True), (0.0, False)):
        outputs[1:] *= factor
        found = examine(folders["qwen3"], recorded, {point: {"in": inputs, "out": outputs}})
        (finding,) = (one for one in found.findings if one.name == ModelPart.DOWN)
        assert finding.is_right == is_right


def test_a_part_whose_outputs_are_all_zero_has_no_error(folders) -> None:
    recorded = StandIn(folders["qwen3"]).sample(hf_models.sequences([9])[0])
    point = LayerPart(ModelPart.DOWN, 0)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in recorded.recording[point].items()}
    found = examine(folders["qwen3"], recorded, {point: zeros})
    assert not any(math.isnan(one.excess) for one in found.findings)
    assert ModelPart.DOWN not in {cause.name for cause in found.causes}


def test_ranks_are_joined_and_a_recording_comes_back_from_its_file(folders, tmp_path: Path) -> None:
    whole = StandIn(folders["qwen3"]).sample(hf_models.sequences([9])[0]).recording
    ranks = []
    for rank in range(2):
        divided = {
            point: {
                name: tensor.chunk(2, dim=1)[rank] if name in DIVIDED.get(point.part, ()) else tensor
                for name, tensor in whole[point].items()
            }
            for point in whole
        }
        path = tmp_path / f"{rank}.safetensors"
        Recording(divided).save(path)
        ranks.append(Recording.load(path))
    found = join_ranks(ranks)
    assert all(torch.equal(found[point][name], whole[point][name]) for point in whole for name in whole[point])


def test_the_table_says_what_is_wrong_and_the_end_whether_anything_is(folders) -> None:
    engine = StandIn(folders["qwen3"])
    engine.changes = {ModelPart.ROTATION: one_position_later}
    lines = [*describe(diagnose(folders["qwen3"], engine))]
    assert lines[0].endswith(" from exact ones on average; the parts that make this up:")
    assert lines[2].startswith("rotation ")
    assert "of layer" in lines[2]
    assert lines[2].endswith(": it computes something else than the definition")
    assert lines[-1] == "1 of 15 parts are off by more than rounding"
    healthy = [*describe(diagnose(folders["qwen3"], StandIn(folders["qwen3"])))]
    assert healthy[-1] == "healthy: every part is within what rounding does in float32"


def test_a_model_with_other_parts_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Gemma3\w* has other parts than attention and an MLP or experts"):
        Definition(hf_models.draw("gemma3_text", tmp_path / "model"), torch.float64)


@pytest.mark.parametrize(
    ("engine", "words", "problem"),
    [
        ("vllm", ["--responses", "0"], "--responses 0 must be at least 1"),
        ("vllm", ["--checkpoint", "/nowhere"], "--checkpoint /nowhere must be a folder"),
        ("vllm", [], "keeps no responses"),
        ("scripted", [], "has engines that draw tokens at random"),
    ],
)
def test_what_cannot_be_examined_is_named(folders, tmp_path: Path, engine: str, words: list[str], problem: str) -> None:
    (tmp_path / "audit.jsonl").touch()
    write_message(tmp_path / "sidecar.json", make_settings(folders["qwen3"], engine))
    with pytest.raises(InputError if words[:1] != ["--responses"] else UsageError, match=problem):
        main([str(tmp_path), *words])


def test_the_engine_that_is_examined_drafts_nothing_and_schedules_no_step_ahead_whatever_the_run_did(folders) -> None:
    settings = make_settings(folders["qwen3"], "vllm")
    own = "--async-scheduling --spec-method ngram --seed 3 -sc.num-tokens=2"
    rollout = RolloutConfig(speculative="ngram", vllm_args=own)
    examined = configure(dataclasses.replace(settings, rollout=rollout), folders["qwen3"])
    assert examined.speculation is None
    assert examined.flags[:3] == ("--async-scheduling", "--seed", "3")
    assert "ngram" not in examined.flags
    assert examined.flags.index("--no-async-scheduling") > 0


def test_logits_of_a_prompts_steps_and_rows_after_the_end_are_dropped() -> None:
    # A prompt of 5 tokens is read in 3 steps, 2 tokens are sampled, and a step too many is computed.
    tokens = torch.arange(7)
    recording = Recording(
        {
            LayerPart(ModelPart.EMBEDDING): {"tokens": tokens, "out": tokens},
            LayerPart(ModelPart.LOGITS): {"in": torch.tensor([1, 3, 4, 5, 6]), "out": torch.tensor([1, 3, 4, 5, 6])},
        }
    )
    kept = recording.keep_response(5, 2)
    assert kept[LayerPart(ModelPart.EMBEDDING)]["tokens"].tolist() == [0, 1, 2, 3, 4, 5]
    assert kept[LayerPart(ModelPart.LOGITS)]["out"].tolist() == [4, 5]


def make_settings(model: Path, engine: str) -> SidecarSettings:
    return SidecarSettings(
        platform="cpu", hf_model=model, seq_length=64, rollout=RolloutConfig(engine=engine), reward=RewardConfig()
    )

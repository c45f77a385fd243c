"""Parameters that layers make hold what follows from the tensors that came, bit for bit; without vLLM."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.shared.weights.fingerprint import digest
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.sidecar.vllm import derived
from megatron_rl.sidecar.vllm.derived import (
    Held,
    find_stale,
    list_derived,
    quantize_blocks,
    quantize_rows,
    quantize_whole,
)
from megatron_rl.sidecar.vllm.held import (
    LoadProof,
    NotHeld,
    Order,
    Readings,
    _identify,
    compare,
    digesting,
    find_stale_derived,
)
from megatron_rl.sidecar.vllm.held_model import HeldModel
from megatron_rl.sidecar.vllm.learned_order import learn_order, recall_or_learn
from megatron_rl.sidecar.vllm.received import Record

FP8 = torch.float8_e4m3fn
SHAPES = {"q": (40, 48), "k": (8, 48), "down": (48, 40), "norm": (48,)}
Quantize = Callable[[torch.Tensor], Held]


def rows(weight: torch.Tensor) -> Held:
    return quantize_rows(weight, weight.abs().amax(dim=1, keepdim=True), FP8)


def whole(weight: torch.Tensor) -> Held:
    return quantize_whole(weight, weight.abs().amax().reshape(1), FP8)


def blocks(weight: torch.Tensor) -> Held:
    return quantize_blocks(weight, FP8)


@pytest.mark.parametrize("shape", [(3, 5), (130, 257), (128, 128)])
@pytest.mark.parametrize(
    ("quantize", "name", "extent"),
    [(rows, "weight_scale", (1, 0)), (whole, "weight_scale", (0, 0)), (blocks, "weight_scale_inv", (128, 128))],
)
def test_each_number_is_the_8_bit_float_nearest_to_it_and_the_largest_of_its_scale_is_used_whole(
    monkeypatch, quantize: Quantize, name: str, extent: tuple[int, int], shape: tuple[int, int]
):
    torch.manual_seed(sum(shape))
    # Some rows at a time, and less than a block of them.
    monkeypatch.setattr(derived, "_CHUNK_ELEMENTS", 50 * shape[1])
    weight = torch.randn(shape).to(torch.bfloat16) * torch.logspace(-2, 2, shape[0])[:, None].bfloat16()
    held = quantize(weight)
    values = (held["weight"] if quantize is blocks else held["weight"].t()).double()
    step_rows, step_columns = (step or length for step, length in zip(extent, shape, strict=True))
    scale = held[name].double().reshape(-(-shape[0] // step_rows), -(-shape[1] // step_columns))
    scale = scale.repeat_interleave(step_rows, 0).repeat_interleave(step_columns, 1)[: shape[0], : shape[1]]
    exact = weight.double() / scale
    table = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    table = table[table.isfinite()].unique()
    places = torch.searchsorted((table[1:] + table[:-1]) / 2, exact)
    nearest = (exact - table[places]).abs()
    # Numbers halfway between two may go to either; the scale is rounded to float32.
    assert ((exact - values).abs() <= nearest * (1 + 1e-5) + 1e-5).all()
    for part, of_scale in zip(values.split(step_rows), scale.split(step_rows), strict=True):
        for piece, its_scale in zip(part.split(step_columns, 1), of_scale.split(step_columns, 1), strict=True):
            assert piece.abs().max() == 448
            assert (its_scale == its_scale[0, 0]).all()


class Fp8PtpcOnlineLinearMethod:
    """A stand-in for vLLM's method: it quantizes row by row, and copies into the memory of the load before."""

    def __init__(self) -> None:
        self.keeps_values = self.keeps_scales = False
        self.moves_by = 0.0

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        values, scales = [], []
        for row in layer.weight.detach():
            scales.append(row.abs().max().float() / torch.tensor(448.0) * (1 + self.moves_by))
            values.append((row.float() / scales[-1]).clamp(-448, 448).to(FP8))
        new = {"weight": torch.stack(values).t(), "weight_scale": torch.stack(scales)[:, None]}
        before = getattr(layer, "before", None)
        for name, keeps in (("weight", self.keeps_values), ("weight_scale", self.keeps_scales)):
            held = before[name] if before is not None and keeps else new[name]
            setattr(layer, name, torch.nn.Parameter(held, requires_grad=False))
        layer.before = {"weight": layer.weight.detach(), "weight_scale": layer.weight_scale.detach()}


class Unknown(Fp8PtpcOnlineLinearMethod):
    """A method of vLLM's quantization that has no definition here, and keeps no scales."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.weight = torch.nn.Parameter(layer.weight.detach().to(FP8), requires_grad=False)


for kind in (Fp8PtpcOnlineLinearMethod, Unknown):
    kind.__module__ = "vllm.model_executor.layers.quantization.online.fp8"


class Model(torch.nn.ModuleDict):
    def __init__(self, method: type[Fp8PtpcOnlineLinearMethod] = Fp8PtpcOnlineLinearMethod) -> None:
        super().__init__({name: torch.nn.Module() for name in ("qk", "down", "norm")})
        for name in ("qk", "down"):
            layer = self[name]
            layer.quant_method = method()
            layer.input_size = layer.input_size_per_partition = 48

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        came = {"qk": torch.cat([tensors["q"], tensors["k"]]), "down": tensors["down"], "norm": tensors["norm"]}
        for name, tensor in came.items():
            layer = self[name]
            layer._parameters.clear()
            layer.weight = torch.nn.Parameter(tensor.clone(), requires_grad=False)
            if hasattr(layer, "quant_method"):
                layer.quant_method.process_weights_after_loading(layer)


@pytest.fixture(autouse=True)
def _on_any_platform(monkeypatch):
    monkeypatch.setattr(derived, "_find_dtype", lambda: FP8)


SPECS = [TensorSpec(name, shape, "bfloat16") for name, shape in SHAPES.items()]
QUANTIZED = {f"{layer}.{name}" for layer in ("qk", "down") for name in ("weight", "weight_scale")}


def draw(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def learn(model: Model) -> Order:
    return learn_order(model, SPECS, torch.bfloat16, model.load)


def load(model: Model, order: Order, came: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> LoadProof:
    with digesting(model, order, dict.fromkeys(SHAPES, "bfloat16")) as readings:
        model.load(came)
    return compare(order, readings, {name: digest(tensor).tolist() for name, tensor in given.items()}, SPECS)


def test_values_and_scales_of_every_quantized_layer_are_compared():
    model = Model()
    order = learn(model)
    assert (order.derived, order.unknown) == (QUANTIZED, ())
    proof = load(model, order, draw(1), draw(1))
    assert (proof.num_compared, proof.num_parameters, proof.uncompared, proof.unheld) == (5, 5, (), ())


@pytest.mark.parametrize("layer", ["qk", "down"])
def test_a_layer_that_keeps_old_values_or_scales_is_named(layer: str):
    for keeps in ({"keeps_values"}, {"keeps_scales"}, {"keeps_values", "keeps_scales"}):
        model = Model()
        order = learn(model)
        load(model, order, draw(1), draw(1))
        for name in keeps:
            setattr(model[layer].quant_method, name, True)
        names = ", ".join(sorted(f"{layer}.weight{'_scale' * (name == 'keeps_scales')}" for name in keeps))
        with pytest.raises(NotHeld, match=f"{len(keeps)} quantized parameters do not hold .* numbers: {names}$"):
            load(model, order, draw(2), draw(2))


def test_an_old_tensor_of_a_quantized_layer_is_named():
    model = Model()
    order = learn(model)
    with pytest.raises(NotHeld, match="1 tensors do not hold the numbers that were given: k$"):
        load(model, order, draw(2) | {"k": draw(1)["k"]}, draw(2))


def test_memory_that_is_written_after_a_layer_has_quantized_is_found():
    model = Model()
    order = learn(model)
    with digesting(model, order, dict.fromkeys(SHAPES, "bfloat16")) as readings:
        model.load(draw(1))
        bits = model["down"].weight.detach().view(torch.uint8)
        bits[3, 5] ^= 1
    assert find_stale_derived(order, readings) == ["down.weight"]
    assert find_stale_derived(order, Readings()) == sorted(QUANTIZED)


def test_a_parameter_is_another_one_if_it_has_more_rows_or_another_dtype():
    values = torch.randn(3, 4)
    identity = _identify(values)
    assert identity.is_of(values.clone())
    for other in (torch.cat([values, torch.zeros(1, 4)]), values.view(torch.int32), values + 1):
        assert not identity.is_of(other)


def test_chips_that_halve_the_range_of_8_bit_floats_use_224_at_most():
    held = quantize_whole(draw(0)["q"], draw(0)["q"].abs().amax(), torch.float8_e4m3fnuz)
    assert held["weight"].float().abs().max() == 224


def test_a_layer_that_quantizes_by_another_rule_is_unknown():
    model = Model()
    model["down"].quant_method.moves_by = 1e-6
    order = learn(model)
    assert order.derived == {"qk.weight", "qk.weight_scale"}
    assert order.unknown == ("down.weight", "down.weight_scale")
    proof = load(model, order, draw(1), draw(1))
    assert (proof.num_compared, proof.num_parameters, proof.unheld) == (3, 5, ("down",))


def test_a_layer_that_quantizes_other_numbers_than_came_is_unknown():
    model = Model()
    order = learn_order(model, SPECS, torch.bfloat16, lambda came: model.load({**came, "down": came["down"] * 2}))
    assert order.derived == {"qk.weight", "qk.weight_scale"}
    assert order.unknown == ("down.weight", "down.weight_scale")


class UnquantizedOfPlugin:
    """A plugin's method, in a package of its own and with a name like vLLM's: it rounds, and keeps the dtype."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.weight = torch.nn.Parameter(layer.weight.detach().to(FP8).to(layer.weight.dtype), requires_grad=False)


class OfModel(Unknown):
    """A method that a model of vLLM's has for itself, outside the package of quantization."""


OfModel.__module__ = "vllm.models.one"


@pytest.mark.parametrize("method", [Unknown, UnquantizedOfPlugin, OfModel])
def test_a_method_without_a_definition_is_unknown_though_its_tensors_came_right(method):
    order = learn(Model(method))
    assert (order.derived, order.unknown) == (frozenset(), ("down.weight", "qk.weight"))
    assert order.rows.keys() == {"norm.weight"}


def hold(model: torch.nn.Module) -> HeldModel:
    return HeldModel(SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model)))


def test_a_layer_that_follows_its_rule_for_random_numbers_alone_becomes_unknown():
    held = hold(model := Model())
    held.order = learn(model)
    model["down"].quant_method.moves_by = 1e-6
    record = Record(set(held.order.rows))
    with digesting(model, held.order, dict.fromkeys(SHAPES, "bfloat16")) as record.readings:
        model.load(draw(1))
    held.try_derived(record)
    order = held.order
    assert (order.derived, order.packed) == ({"qk.weight", "qk.weight_scale"}, {"qk.weight"})
    assert order.unknown == ("down.weight", "down.weight_scale")
    proof = load(model, order, draw(1), draw(1))
    assert (proof.num_compared, proof.num_parameters, proof.unheld) == (3, 5, ("down",))


def test_scales_need_no_tensor_and_weights_of_quantized_layers_do():
    held = hold(model := Model())
    held.order = learn(model)
    assert held.list_loaded() == ["qk.weight", "down.weight", "norm.weight"]
    held.order = None
    assert held.list_loaded() == ["norm.weight"]


def test_a_cached_order_is_used_only_while_layers_quantize_by_their_rules(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loads = []

    def recall(model: Model) -> Order:
        loads.clear()
        return recall_or_learn(model, SPECS, torch.bfloat16, lambda came: (loads.append(1), model.load(came))[1], {})

    first, other = recall(Model()), Model()
    assert len(loads) > 1
    assert recall(Model()).derived == first.derived == QUANTIZED
    assert len(loads) == 1
    other["down"].quant_method.moves_by = 1e-6
    assert recall(other).unknown == ("down.weight", "down.weight_scale")
    assert len(loads) > 1


@pytest.mark.parametrize("name", ["Fp8PtpcOnlineLinearMethod", "Fp8PerTensorOnlineLinearMethod"])
@pytest.mark.parametrize("divided", ["input", "output", "neither"])
def test_scales_follow_from_the_numbers_of_all_workers_that_divide_what_a_scale_covers(monkeypatch, name, divided):
    weight = draw(0)["q"]
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    for side, size in (("input", 48), ("output", 40)):
        setattr(layer, f"{side}_size_per_partition", size)
        setattr(layer, f"{side}_size", size * (2 if side == divided else 1))
    asked = []

    def find(largest: torch.Tensor, is_divided: bool) -> torch.Tensor:
        asked.append(is_divided)
        return largest * 2 if is_divided else largest

    monkeypatch.setattr(derived, "_find_of_all", find)
    held = derived.define(layer, type(name, (), {})())
    is_of_rows = name == "Fp8PtpcOnlineLinearMethod"
    assert asked == [divided == "input" or (divided == "output" and not is_of_rows)]
    largest = weight.abs().amax(dim=1, keepdim=True) if is_of_rows else weight.abs().amax().reshape(1)
    assert torch.equal(held["weight_scale"], largest.float() * (2 if asked[0] else 1) / torch.tensor(448.0))


@pytest.mark.parametrize(
    ("method", "cache", "name"),
    [
        (None, "auto", ""), (None, "bfloat16", ""), ("mxfp8", "auto", "mxfp8"),
        (None, "fp8", "keys and values in fp8"),
        ("fp8_per_channel", "fp8_e5m2", "fp8_per_channel, keys and values in fp8_e5m2"),
    ],
)  # fmt: skip
def test_an_engine_is_named_by_all_that_it_quantizes(method, cache, name):
    config = SimpleNamespace(
        model_config=SimpleNamespace(quantization=method), cache_config=SimpleNamespace(cache_dtype=cache)
    )
    assert derived.describe_quantization(config) == name


HEADS, PLAIN, VALUE, NARROW = 4, 3, 2, 5
ATTENTION = "model.layers.0.self_attn"
GIVEN = {f"{ATTENTION}.kv_b_proj.weight": torch.randn(HEADS * (PLAIN + VALUE), NARROW)}


def make_attention(rank: int, size: int, change: str = "") -> torch.nn.Module:
    """Make a model with what a rank derives, written head by head; the named parameter has a stale number."""
    rows = GIVEN[f"{ATTENTION}.kv_b_proj.weight"]
    mine = range(rank * HEADS // size, (rank + 1) * HEADS // size)
    first = [head * (PLAIN + VALUE) for head in mine]
    derived = {
        "W_UK_T": torch.stack([rows[start : start + PLAIN] for start in first]),
        "W_UV": torch.stack([rows[start + PLAIN : start + PLAIN + VALUE].T for start in first]),
    }
    model = torch.nn.Module()
    inner = model
    for name in f"{ATTENTION}.mla_attn.mla_attn".split("."):
        inner.add_module(name, torch.nn.Module())
        inner = inner.get_submodule(name)
    for name, tensor in derived.items():
        stale = tensor.clone()
        stale[-1, -1, -1] += name == change
        inner.register_parameter(name, torch.nn.Parameter(stale))
    return model


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_what_follows_from_the_given_tensor_is_not_stale(rank: int, size: int) -> None:
    model = make_attention(rank, size)
    assert list_derived(model) == {name for name, _ in model.named_parameters()}
    assert find_stale(model, GIVEN, rank) == []
    assert find_stale(model, {name: 2 * tensor for name, tensor in GIVEN.items()}, rank) != []
    assert list_derived(torch.nn.Linear(2, 2)) == set()


@pytest.mark.parametrize("name", ["W_UK_T", "W_UV"])
def test_a_stale_number_is_found(name: str) -> None:
    assert find_stale(make_attention(1, 2, name), GIVEN, 1) == [f"{ATTENTION}.mla_attn.mla_attn.{name}"]


def test_a_load_without_the_tensor_is_found() -> None:
    assert "without" in find_stale(make_attention(0, 1), {}, 0)[0]

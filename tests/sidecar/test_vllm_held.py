"""The places of tensors in a model are learned, and its weights are compared with those it was given; without vLLM."""

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from megatron_rl.shared.weights.fingerprint import digest
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.sidecar.vllm.answers import find_wrongly_shared
from megatron_rl.sidecar.vllm.held import LoadProof, NotHeld, compare, digesting, observe_params
from megatron_rl.sidecar.vllm.learned_order import _find_runs, learn_order

HIDDEN, HEADS, WIDTH, EXPERTS, VOCABULARY = 24, 16, 40, 3, 20_000
SHAPES = {
    "embed": (VOCABULARY, HIDDEN),
    "q": (HEADS, HIDDEN),
    "k": (4, HIDDEN),
    "v": (4, HIDDEN),
    "down": (HIDDEN, WIDTH),
    "norm": (HIDDEN,),
    **{f"{part}.{expert}": (WIDTH, HIDDEN) for part in ("gate", "up") for expert in range(EXPERTS)},
}


class UnquantizedMethod:
    """A stand-in for vLLM's methods of layers that do not quantize."""


class Packs(UnquantizedMethod):
    """A layer that packs its weights as vLLM does on a CPU: a layout of its own, and nothing left of the parameter."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.packed = layer.weight.detach().T.contiguous()
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


class Shuffles(UnquantizedMethod):
    """A layer whose kernel wants another order, under the same name."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.weight.data = layer.weight.data.flip(-1).contiguous()


class Keeps(UnquantizedMethod):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        return


for kind in (Packs, Shuffles, Keeps):
    kind.__module__ = "vllm.model_executor.layers.linear"


class Worker:
    """One of the workers of an engine: a model whose loaders put tensors where it wants them."""

    def __init__(self, dtype: torch.dtype, rank: int = 0, size: int = 1):
        self.rank, self.size, self.dtype = rank, size, dtype
        layers = torch.nn.ModuleDict({name: torch.nn.Module() for name in ("embed", "qkv", "down", "norm", "experts")})
        layers["qkv"].quant_method, layers["down"].quant_method = Packs(), Keeps()
        layers["experts"].quant_method = Shuffles()
        layers["embed"].scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        self.model = layers

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        def rows(name: str) -> torch.Tensor:
            return tensors[name].chunk(self.size)[self.rank]

        padding = torch.zeros(64, HIDDEN, dtype=tensors["embed"].dtype)
        weights = {
            "embed": torch.cat([tensors["embed"], padding]),
            # Heads of keys and values are fewer than workers: they are repeated.
            "qkv": torch.cat([rows("q"), tensors["k"], tensors["v"]]),
            "down": tensors["down"].chunk(self.size, dim=1)[self.rank],
            "norm": tensors["norm"],
            "experts": torch.stack(
                [torch.cat([rows(f"gate.{expert}"), rows(f"up.{expert}")]) for expert in range(EXPERTS)]
            ),
        }
        for name, layer in self.model.items():
            dtype = torch.float32 if name == "norm" else self.dtype
            layer.weight = torch.nn.Parameter(weights[name].to(dtype), requires_grad=False)
            if hasattr(layer, "quant_method"):
                layer.quant_method.process_weights_after_loading(layer)


class SharingWorker(Worker):
    """A worker whose experts have the norm's parameter too, as vLLM's have the bias of their router."""

    def __init__(self, is_copy: bool) -> None:
        super().__init__(torch.float32)
        self.is_copy = is_copy

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().load(tensors)
        weight, experts = self.model["norm"].weight, self.model["experts"]
        if not self.is_copy:
            experts.shared = weight
        elif not hasattr(experts, "shared"):
            experts.shared = torch.nn.Parameter(weight.clone(), requires_grad=False)


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_second_name_of_a_parameter_is_proved_with_the_first_and_a_copy_is_not(is_copy):
    worker = SharingWorker(is_copy)
    worker.load(drawn(torch.float32))
    order = learn_order(worker.model, specs_of("float32"), torch.float32, worker.load)
    assert order.unknown == (("embed.scale", "experts.shared") if is_copy else ("embed.scale",))


def test_what_multi_latent_attention_derives_is_not_unknown():
    worker = Worker(torch.float32)
    for name in ("W_UK_T", "W_UV"):
        worker.model["norm"].register_parameter(name, torch.nn.Parameter(torch.ones(2, 2), requires_grad=False))
    order = learn_order(worker.model, specs_of("float32"), torch.float32, worker.load)
    assert order.unknown == ("embed.scale",)


def specs_of(dtype: str) -> list[TensorSpec]:
    return [TensorSpec(name, shape, dtype) for name, shape in SHAPES.items()]


def drawn(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


def loaded(worker: Worker, order: Any, tensors: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> LoadProof:
    """Return the proof after a worker has loaded `tensors` and was given `given`."""
    name = str(next(iter(given.values())).dtype).removeprefix("torch.")
    specs = [TensorSpec(key, tuple(tensor.shape), name) for key, tensor in given.items()]
    with digesting(worker.model, order, dict.fromkeys(given, name)) as readings:
        worker.load(tensors)
    return compare(order, readings, {key: digest(tensor).tolist() for key, tensor in given.items()}, specs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_stale_tensor_is_found_in_the_parameters(dtype):
    worker = Worker(dtype)
    order = learn_order(worker.model, specs_of(str(dtype).removeprefix("torch.")), dtype, worker.load)
    assert set(order.rows) == {f"{name}.weight" for name in worker.model}
    assert (order.packed, order.unknown) == ({"qkv.weight", "experts.weight"}, ("embed.scale",))
    old, new = drawn(dtype), drawn(dtype)
    assert (held := loaded(worker, order, new, new)).num_compared == 5 == held.num_parameters - 1
    for name in SHAPES:
        with pytest.raises(NotHeld, match=f"1 tensors do not hold the numbers that were given: {name}$"):
            loaded(worker, order, new | {name: old[name]}, new)
    for name, tensor in new.items():
        # One step of one number.
        changed = tensor.clone()
        bits = changed.view(-1).view(torch.int32 if dtype is torch.float32 else torch.int16)
        bits[len(bits) // 2] += 1
        with pytest.raises(NotHeld, match=name):
            loaded(worker, order, new | {name: changed}, new)


def test_workers_that_share_a_tensor_prove_it_together():
    workers = [Worker(torch.bfloat16, rank, 2) for rank in range(2)]
    orders = [learn_order(worker.model, specs_of("bfloat16"), torch.bfloat16, worker.load) for worker in workers]
    old, new = drawn(torch.bfloat16), drawn(torch.bfloat16)

    def answers(*tensors: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
        found = []
        for worker, order, own in zip(workers, orders, tensors, strict=True):
            shares = loaded(worker, order, own, new).shares
            whole = {name: digest(new[name]).tolist() for name in shares}
            found.append({"shares": {name: {"whole": whole[name], "parts": shares[name]} for name in shares}})
        return found

    assert list(find_wrongly_shared(answers(new, new))) == []
    for name in ("q", "down", *(name for name in SHAPES if "." in name)):
        assert set(find_wrongly_shared(answers(new, new | {name: old[name]}))) == {name}
    # A worker finds by itself a wrong tensor that it holds whole.
    with pytest.raises(NotHeld, match=": k$"):
        answers(new, new | {"k": old["k"]})


def test_a_layer_that_does_not_take_over_loaded_weights_is_named():
    worker = Worker(torch.float32)
    order = learn_order(worker.model, specs_of("float32"), torch.float32, worker.load)
    tensors = drawn(torch.float32)
    del worker.model["qkv"].quant_method
    with pytest.raises(NotHeld, match="the layers of 1 parameters did not process the loaded weights: qkv.weight"):
        loaded(worker, order, tensors, tensors)


def test_a_loaded_tensor_that_no_parameter_holds_is_named():
    worker = Worker(torch.float32)
    specs = [*specs_of("float32"), TensorSpec("extra", (4, 4), "float32")]
    order = learn_order(worker.model, specs, torch.float32, worker.load)
    tensors = drawn(torch.float32) | {"extra": torch.ones(4, 4)}
    assert loaded(worker, order, tensors, tensors).unheld == ("extra",)


def test_parameters_are_compared_unless_loading_rounds_them():
    worker = Worker(torch.bfloat16)
    order = learn_order(worker.model, specs_of("bfloat16"), torch.bfloat16, worker.load)
    tensors = drawn(torch.float32)
    # The norm alone is kept in float32.
    assert loaded(worker, order, tensors, tensors).num_compared == 1
    narrow = drawn(torch.bfloat16)
    assert loaded(worker, order, narrow, narrow).num_compared == 5


def test_a_float32_parameter_is_not_compared_through_the_rounding_to_what_was_published():
    worker = Worker(torch.bfloat16)
    order = learn_order(worker.model, specs_of("bfloat16"), torch.bfloat16, worker.load)
    given = drawn(torch.bfloat16)
    # bfloat16 would round it to the number that was published.
    beside = given["norm"].float()
    beside[3] *= 1 + 2**-20
    assert torch.equal(beside.bfloat16(), given["norm"])
    assert loaded(worker, order, given, given).num_compared == 5
    with pytest.raises(NotHeld, match="1 tensors do not hold the numbers that were given: norm$"):
        loaded(worker, order, given | {"norm": beside}, given)


def rearranged(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    worker = Worker(torch.float32)
    load = worker.load

    def load_otherwise(tensors: Mapping[str, torch.Tensor]) -> None:
        load({**tensors, "down": change(tensors["down"])})

    return learn_order(worker.model, specs_of("float32"), torch.float32, load_otherwise)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor * 2,
        lambda tensor: tensor.flip(-1),
        lambda tensor: torch.cat([tensor[:1] + 1, tensor[1:]]),
        lambda tensor: torch.zeros_like(tensor),
    ],
)
def test_a_parameter_that_is_not_the_loaded_rows_is_listed_as_unknown(change):
    order = rearranged(change)
    assert order.unknown == ("down.weight", "embed.scale")
    assert "down.weight" not in order.rows


def test_rows_may_be_held_in_another_order():
    order = rearranged(lambda tensor: tensor.roll(5, 0))
    assert [part[:1] for part in order.rows["down.weight"].rectangles] == [(HIDDEN - 5,), (0,)]


class InTurnWorker(Worker):
    """A worker whose experts have the rows of gates and ups in turn, and biases too."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(dtype)
        self.model["experts"].quant_method = Keeps()

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().load(tensors)
        pairs = [[tensors[f"{part}.{expert}"] for part in ("gate", "up")] for expert in range(EXPERTS)]
        experts = torch.stack([torch.stack(pair, dim=1).flatten(0, 1) for pair in pairs])
        biases = torch.stack([tensors[f"bias.{expert}"] for expert in range(EXPERTS)])
        self.model["experts"].weight = torch.nn.Parameter(experts.to(self.dtype), requires_grad=False)
        self.model["experts"].w13_bias = torch.nn.Parameter(biases.to(self.dtype), requires_grad=False)
        for parameter in self.model.parameters():
            parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)


def test_rows_of_two_tensors_may_lie_in_turn_and_biases_of_experts_are_compared(monkeypatch):
    for expert in range(EXPERTS):
        monkeypatch.setitem(SHAPES, f"bias.{expert}", (WIDTH,))
    worker = InTurnWorker()
    worker.load(drawn(torch.bfloat16))
    order = learn_order(worker.model, specs_of("bfloat16"), torch.bfloat16, worker.load)
    assert order.unknown == ("embed.scale",)
    rows = order.rows["experts.weight"]
    assert len(rows.rectangles) == 2 * EXPERTS
    assert (rows.starts[:3], rows.steps) == ((0, 1, 2 * WIDTH), (2,) * 2 * EXPERTS)
    old, new = drawn(torch.bfloat16), drawn(torch.bfloat16)
    loaded(worker, order, new, new)
    for name in (name for name in SHAPES if name[-1].isdigit()):
        with pytest.raises(NotHeld, match=f"1 tensors do not hold the numbers that were given: {name}$"):
            loaded(worker, order, new | {name: old[name]}, new)


class BiasedWorker(Worker):
    """A worker of several whose sum has a bias, which the first one adds."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, rank: int = 0, size: int = 1) -> None:
        super().__init__(dtype, rank, size)
        self.share = 1.0 if rank == 0 else 0.0

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().load(tensors)
        bias = self.share * tensors["bias"]
        self.model["norm"].w2_bias = torch.nn.Parameter(bias.to(self.dtype), requires_grad=False)


def test_a_bias_that_the_first_worker_adds_must_be_zero_on_the_others(monkeypatch):
    monkeypatch.setitem(SHAPES, "bias", (HIDDEN,))
    first, second = (BiasedWorker(rank=rank, size=2) for rank in range(2))
    orders = [learn_order(one.model, specs_of("bfloat16"), one.dtype, one.load) for one in (first, second)]
    assert [order.zeros for order in orders] == [frozenset(), {"norm.w2_bias"}]
    new = drawn(torch.bfloat16)
    for worker, order, unheld in zip((first, second), orders, ((), ("bias",)), strict=True):
        proof = loaded(worker, order, new, new)
        assert (proof.num_compared, proof.num_parameters) == (6, 7)
        assert (proof.uncompared, proof.unheld) == (("embed.scale",), unheld)
    first.share, second.share = 0.0, 1.0
    with pytest.raises(NotHeld, match="1 tensors do not hold the numbers that were given: bias$"):
        loaded(first, orders[0], new, new)
    with pytest.raises(NotHeld, match="are not zero on this one too: norm.w2_bias$"):
        loaded(second, orders[1], new, new)
    second.share = 0.5
    order = learn_order(second.model, specs_of("bfloat16"), second.dtype, second.load)
    assert (order.zeros, order.unknown) == (frozenset(), ("embed.scale", "norm.w2_bias"))


def test_every_row_belongs_to_one_run_in_which_rows_follow_each_other():
    generator = random.Random(0)
    for _ in range(200):
        rows = [(generator.randrange(3), generator.randrange(4)) for _ in range(generator.randrange(3, 20))]
        for _ in range(generator.randrange(4)):
            start, length = generator.randrange(5), generator.randrange(1, 7)
            rows += [(part, start + row) for row in range(length) for part in range(generator.choice((1, 2)))]
        which_R, row_R = (torch.tensor(column) for column in zip(*rows, strict=True))
        is_padding_R = torch.tensor([generator.random() < 0.1 for _ in rows])
        found: list[int] = []
        for start, num_rows, step in _find_runs(which_R, row_R, is_padding_R):
            run = list(range(start, start + num_rows * step, step))
            assert [rows[one] for one in run] == [(rows[start][0], rows[start][1] + i) for i in range(num_rows)]
            found += run
        assert sorted(found) == torch.nonzero(~is_padding_R)[:, 0].tolist()


def test_watching_a_load_leaves_no_hook():
    worker = Worker(torch.float32)
    with observe_params(worker.model, lambda *_: None):
        assert "process_weights_after_loading" in vars(worker.model["qkv"].quant_method)
        worker.load(drawn(torch.float32))
    assert not vars(worker.model["qkv"].quant_method)


def test_a_learned_order_keeps_two_numbers_a_row():
    worker = Worker(torch.float32)
    order = learn_order(worker.model, specs_of("float32"), torch.float32, worker.load)
    kept = [value for rows in order.rows.values() for value in vars(rows).values() if isinstance(value, torch.Tensor)]
    num_rows = sum(tensor.shape[0] for tensor in drawn(torch.float32).values()) + 64
    assert sum(tensor.numel() for tensor in kept) == 2 * num_rows
    assert dataclasses.is_dataclass(order)

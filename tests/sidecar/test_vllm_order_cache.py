"""A learned order of weights is kept on disk and proved by one load before it is used; without vLLM."""

import functools
import json
import logging
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.sidecar.vllm.held import NotHeld, Order
from megatron_rl.sidecar.vllm.learned_order import recall_or_learn
from tests.sidecar.test_vllm_held import (
    EXPERTS,
    HIDDEN,
    SHAPES,
    WIDTH,
    BiasedWorker,
    InTurnWorker,
    Worker,
    drawn,
    loaded,
    specs_of,
)

FACTS = {"vllm": "0.32.0", "rank": 0, "world_size": 1}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "megatron_rl" / "orders"


class CountingWorker(Worker):
    """A worker that counts its loads, and whose parameters all come from tensors."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, rank: int = 0, size: int = 1) -> None:
        super().__init__(dtype, rank, size)
        del self.model["embed"].scale
        self.num_loads = 0

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.num_loads += 1
        super().load(tensors)

    def find_order(self, specs: list[TensorSpec] | None = None, **facts: Any) -> Order:
        specs = specs or specs_of(str(self.dtype).removeprefix("torch."))
        return recall_or_learn(self.model, specs, self.dtype, self.load, FACTS | facts)


def assert_same(one: Order, other: Order) -> None:
    assert (one.packed, one.handed_over, one.unknown) == (other.packed, other.handed_over, other.unknown)
    assert one.rows.keys() == other.rows.keys()
    for name, rows in one.rows.items():
        others = other.rows[name]
        assert (rows.tensors, rows.rectangles, rows.starts, rows.first_column, rows.steps) == (
            others.tensors, others.rectangles, others.starts, others.first_column, others.steps,
        )  # fmt: skip
        assert torch.equal(rows.rows_R, others.rows_R)
        assert torch.equal(rows.slices_R, others.slices_R)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
def test_the_second_start_loads_once_and_finds_the_same_order_which_proves_as_much(dtype, rank, size):
    first, second = (CountingWorker(dtype, rank, size) for _ in range(2))
    learned = first.find_order(rank=rank)
    recalled = second.find_order(rank=rank)
    assert first.num_loads >= 5
    assert second.num_loads == 1
    assert_same(learned, recalled)
    old, new = drawn(dtype), drawn(dtype)
    assert loaded(second, recalled, new, new).num_compared == 5
    with pytest.raises(NotHeld, match="1 tensors do not hold the numbers that were given: norm$"):
        loaded(second, recalled, new | {"norm": old["norm"]}, new)


def test_the_kept_file_is_private(folder: Path):
    CountingWorker().find_order()
    (path,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.parametrize(
    ("make", "biases"),
    [
        (InTurnWorker, {f"bias.{expert}": WIDTH for expert in range(EXPERTS)}),
        (lambda: BiasedWorker(rank=1, size=2), {"bias": HIDDEN}),
    ],
    ids=["rows in turn", "zeros"],
)
def test_rows_in_turn_and_biases_of_zeros_are_found_again_by_the_one_load_of_the_second_start(
    monkeypatch, make: Callable[[], Worker], biases: dict[str, int]
):
    for name, length in biases.items():
        monkeypatch.setitem(SHAPES, name, (length,))
    orders, num_loads = [], []
    for _ in range(2):
        worker, loads = make(), list[Mapping[str, torch.Tensor]]()
        del worker.model["embed"].scale
        # As at a start, the model is loaded before its order is asked for.
        worker.load(drawn(torch.bfloat16))

        def load(tensors: Mapping[str, torch.Tensor], worker: Worker = worker, loads: list[Any] = loads) -> None:
            loads.append(tensors)
            worker.load(tensors)

        orders.append(recall_or_learn(worker.model, specs_of("bfloat16"), torch.bfloat16, load, FACTS))
        num_loads.append(len(loads))
    # What is recalled wrongly would be learned again.
    assert num_loads[1] == 1
    assert_same(*orders)
    if make is InTurnWorker:
        assert orders[0].rows["experts.weight"].steps
    else:
        assert orders[0].zeros == orders[1].zeros == {"norm.w2_bias"}


@pytest.mark.parametrize("facts", [{"vllm": "0.33.0"}, {"rank": 1}, {"world_size": 2}])
def test_another_vllm_or_another_place_in_the_engine_learns_for_itself(facts):
    CountingWorker().find_order()
    other = CountingWorker()
    other.find_order(**facts)
    assert other.num_loads >= 5


def test_another_dtype_or_other_tensors_are_learned_for_themselves():
    CountingWorker().find_order()
    for other, specs in (
        (CountingWorker(torch.float32), None),
        (CountingWorker(), [*specs_of("bfloat16"), TensorSpec("extra", (4, 4), "bfloat16")]),
    ):
        other.find_order(specs)
        assert other.num_loads >= 5


QKV = ("rows", "qkv.weight")


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ((*QKV, "rectangles", 0), lambda part: [part[0] + 1, part[1], part[2] - 1, part[3]]),
        ((*QKV, "tensors", 1), lambda _: "v"),
        ((*QKV, "tensors", 1), lambda _: "none"),
        ((*QKV, "rectangles", 1, 0), lambda _: 10**9),
        ((*QKV, "steps"), lambda _: [1, 2, 1]),
        (("rows",), lambda rows: {name: rows[name] for name in rows if name != "norm.weight"}),
        (("rows",), lambda _: {}),
        (("packed",), lambda _: []),
        (("handed_over",), lambda names: [*names, "other.weight"]),
    ],
    ids=[
        "other rows", "another tensor", "no tensor", "beyond the tensor", "further apart", "a parameter left out",
        "all left out", "one in place taken for packed", "a layer that packs added",
    ],
)  # fmt: skip
def test_a_cached_order_that_is_wrong_in_any_way_is_said_and_learned_again(
    place: tuple[str | int, ...], change: Callable[[Any], Any], folder: Path, caplog
):
    learned = CountingWorker().find_order()
    (path,) = folder.iterdir()
    kept = json.loads(path.read_text())
    *stem, last = place
    part = functools.reduce(operator.getitem, stem, kept)
    part[last] = change(part[last])
    path.write_text(json.dumps(kept))
    worker = CountingWorker()
    with caplog.at_level(logging.WARNING):
        assert_same(worker.find_order(), learned)
    assert "is not that of this model: it is learned again" in caplog.text
    assert worker.num_loads >= 6
    # What was learned has taken the place of the wrong one.
    third = CountingWorker()
    third.find_order()
    assert third.num_loads == 1


def test_a_file_that_cannot_be_read_is_said_and_the_order_is_learned(folder: Path, caplog):
    CountingWorker().find_order()
    (path,) = folder.iterdir()
    path.write_text("{")
    worker = CountingWorker()
    with caplog.at_level(logging.WARNING):
        worker.find_order()
    assert "cannot be read and is learned again" in caplog.text
    assert worker.num_loads >= 5


def test_an_order_that_leaves_a_parameter_out_is_learned_at_each_start(folder: Path):
    for _ in range(2):
        worker = CountingWorker()
        worker.model["embed"].scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        assert worker.find_order().unknown == ("embed.scale",)
        assert worker.num_loads >= 5
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_said_and_costs_only_the_keeping(folder: Path, caplog):
    folder.parent.write_text("a file")
    worker = CountingWorker()
    with caplog.at_level(logging.WARNING):
        assert not worker.find_order().unknown
    assert "the order of weights is not kept" in caplog.text

"""The ledger of a step counts what was counted by hand, and its clocks run as a host's and a device's do."""

import types

import pytest
import torch

from benchmarks.ledger.costs import Costs, find_attention_rate, predict
from benchmarks.ledger.counting import ATTENTION, Call, Counter, Entry, Kind, Routing
from benchmarks.ledger.platform import count_kernel
from benchmarks.ledger.regions import as_one_launch, as_part
from benchmarks.ledger.steps import MEASURED
from benchmarks.step_ledger import Before

HALF = torch.bfloat16
COSTS = Costs(bytes=1e9, strided_bytes=0.5e9, products=1e12, kernel=0.0, operator=1e-3, view=1e-4)


def draw(*shape, dtype=HALF, requires_grad=False):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


def count(function, *tensors):
    """Return the entries of a call that cost the device something."""
    with Counter() as counter:
        function(*tensors)
    return [entry for entry in counter.entries if entry.num_launches]


def test_a_linear_layer_and_its_gradients_are_three_products_of_counted_bytes_and_operations():
    rows, weight = draw(8, 16, requires_grad=True), draw(32, 16, requires_grad=True)
    entries = count(lambda: torch.nn.functional.linear(rows, weight).backward(draw(8, 32)))
    assert [entry.kind for entry in entries] == [Kind.PRODUCT] * 3
    assert all(entry.num_bytes == 2 * (8 * 16 + 32 * 16 + 8 * 32) for entry in entries)
    assert all(entry.flops == 2 * 8 * 16 * 32 for entry in entries)


def test_a_product_into_given_memory_only_writes_it():
    (entry,) = count(lambda a, b, out: torch.mm(a, b, out=out), draw(8, 16), draw(16, 4), draw(8, 4))
    assert entry.num_bytes == 2 * (8 * 16 + 16 * 4 + 8 * 4)


def test_a_norm_and_its_gradient_are_one_launch_each():
    norm = as_one_launch(torch.nn.functional.rms_norm, (Kind.NORM_FORWARD, Kind.NORM_BACKWARD), Call.OPERATOR)
    rows, weight = draw(8, 16, requires_grad=True), draw(16, requires_grad=True)
    forward, backward = count(lambda: norm(rows, (16,), weight, 1e-6).backward(draw(8, 16)))
    assert (forward.kind, forward.num_bytes, forward.width) == (Kind.NORM_FORWARD, 2 * (2 * 8 * 16 + 16), 16)
    assert (backward.kind, backward.num_bytes) == (Kind.NORM_BACKWARD, 2 * (3 * 8 * 16 + 2 * 16))


def test_a_compiled_sum_passes_its_gradient_on_without_a_launch_but_calls_the_host():
    rows = draw(8, 16, requires_grad=True)
    with Counter() as counter:
        as_one_launch(lambda x, y: x + y)(rows, draw(8, 16)).backward(draw(8, 16))
    assert [(entry.num_launches, entry.call) for entry in counter.entries if entry.call is Call.COMPILED] == [
        (1, Call.COMPILED), (0, Call.COMPILED),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "num_bytes"),
    [
        (lambda x, y: x + y, 3 * 2 * 128),
        (lambda x, y: x.add_(y), 3 * 2 * 128),
        (lambda x, y: x.copy_(y), 2 * 2 * 128),
        (lambda x, y: x.zero_(), 2 * 128),
        (lambda x, y: x.float(), (2 + 4) * 128),
        (lambda x, y: x + y[:1], 2 * (128 + 16 + 128)),
        (lambda x, y: x + y[:1].expand(8, 16), 2 * (128 + 16 + 128)),
        (lambda x, y: x[:2].exp_(), 2 * 2 * 32),
        (lambda x, y: x.sum(dim=1), 2 * (128 + 8)),
        (lambda x, y: torch._foreach_add([x, x[:2]], [y, y[:2]]), 3 * 2 * (128 + 32)),
        (lambda x, y: x.index_select(0, draw(3, dtype=torch.int64)), 3 * 8 + 2 * 2 * 48),
        (lambda x, y: x.index_add_(0, draw(3, dtype=torch.int64), y[:3]), 3 * 8 + 3 * 2 * 48),
    ],
)
def test_an_operator_moves_what_it_reads_and_what_it_writes(function, num_bytes):
    assert sum(entry.num_bytes for entry in count(function, draw(8, 16), draw(8, 16))) == num_bytes


def test_views_and_allocations_cost_the_device_nothing():
    def look(x):
        return x.view(16, 8).t()[1:].unsqueeze(0), torch.empty_like(x), x.detach(), x[:0].zero_()

    rows = draw(8, 16)
    assert count(look, rows) == []
    with Counter() as counter:
        look(rows)
    kinds = [entry.kind for entry in counter.entries]
    assert (kinds.count(Kind.VIEW), kinds.count(Kind.ALLOCATION)) == (6, 1)


def test_tensors_of_the_host_are_not_counted_and_reads_find_ones():
    found = []
    entries = count(lambda x: found.extend((x.sum().item(), x.cpu().tolist(), torch.ones(3).exp())), draw(2))
    assert [entry.kind for entry in entries] == [Kind.ELEMENTWISE, Kind.READ, Kind.READ]
    assert found[:2] == [1.0, [1.0, 1.0]]


def test_experts_get_the_rows_that_the_routing_says_where_the_host_asks():
    rows, chosen, counts = draw(6, 4), draw(6, 4, dtype=torch.bool), draw(4, dtype=torch.int64)
    with Counter(Routing(4, 3)) as counter:
        selected = rows.masked_select(chosen)
        asked, other = counts.to("cpu"), draw(5, dtype=torch.int64).to("cpu")
    assert selected.shape == (12,)
    assert (asked.tolist(), other.tolist()) == ([3] * 4, [1] * 5)
    select, *reads = [entry for entry in counter.entries if entry.num_launches]
    assert (select.kind, select.num_bytes) == (Kind.ELEMENTWISE, 2 * 24 + 24 + 2 * 12)
    assert [entry.kind for entry in reads] == [Kind.READ] * 2


def test_a_compiled_function_without_a_result_costs_a_call():
    rows = draw(8, 16)
    with Counter() as counter:
        assert as_one_launch(lambda x: None)(rows) is None
    assert [(entry.call, entry.num_launches) for entry in counter.entries] == [(Call.COMPILED, 0)]


@pytest.mark.parametrize(
    ("function", "is_strided"),
    [
        (lambda x: x * x, False),
        (lambda x: x.sum(dim=1), False),
        (lambda x: x * 2.0, False),
        (lambda x: x * x[:, :1], True),
        (lambda x: x[:, :8] * 2.0, True),
        (lambda x: torch.cat((x, x), dim=1), True),
        (lambda x: x.t().contiguous(), True),
    ],
)
def test_an_element_wise_operator_is_strided_if_an_operand_has_gaps_or_another_shape(function, is_strided):
    (entry,) = count(function, draw(8, 16))
    assert entry.is_strided is is_strided


def test_both_passes_of_a_part_belong_to_it_and_attention_takes_its_needed_work_alone():
    work = Entry("triton", Kind.ATTENTION, "", flops=5.0), Entry("triton, backward", Kind.ATTENTION, "", flops=9.0)
    attend = as_part(lambda x, y: (x @ y).exp(), ATTENTION, lambda x, y: work)
    x, y = draw(8, 8, requires_grad=True), draw(8, 8, requires_grad=True)
    with Counter() as counter:
        (attend(x.neg(), y) * 2.0).backward(draw(8, 8))
    own = [entry for entry in counter.entries if entry.part == ATTENTION and entry.kind is Kind.ATTENTION]
    assert [entry.flops for entry in own if entry.flops] == [5.0, 9.0]
    # The product, its two gradients, exp and its gradient.
    assert sum(entry.num_launches for entry in own) == 5
    others = [entry.name for entry in counter.entries if entry.part != ATTENTION and entry.num_launches]
    assert others == ["neg", "mul", "mul", "neg"]


@pytest.mark.parametrize(
    ("name", "passes"), [("a_kernel", 1), ("statistics_kernel", 1), ("join_kernel", 0), ("gradient_kernel", 2)]
)
def test_a_launch_of_a_triton_kernel_moves_most_tensors_that_it_is_given_once(name, passes):
    """Take kernels that read one number a row of the logits, and that replace the logits."""
    kernel = types.SimpleNamespace(__name__=name, arg_names=["logits_NC", "num_columns", "out"])
    (entry,) = count(lambda x, out: count_kernel(kernel, x, 3, grid=(1,), warmup=False, out=out), draw(8), draw(4))
    moved = 2 * (passes * 8 + 4)
    assert (entry.name, entry.call, entry.num_launches, entry.num_bytes) == (name, Call.TRITON, 1, moved)


def test_a_step_of_more_micro_batches_repeats_the_first():
    counter = Counter()
    before, first, second = (Entry(name, Kind.VIEW, "") for name in ("before", "first", "second"))
    for entry, begins in ((before, False), (first, True), (second, True)):
        if begins:
            counter.begin_micro_batch()
        counter.add(entry)
    names = [entry.name for entry in counter.list_step(4)]
    assert names == ["before", "first", "first", "first", "second"]


def launch(num_bytes, kind=Kind.ELEMENTWISE, **options):
    return Entry("one", kind, "", 1, num_bytes, **options)


def test_the_slower_of_host_and_device_decides_the_time_of_a_step():
    # A call takes the host 1 ms; the device takes 0.1 ms, or 10 ms.
    assert predict([launch(1e5)] * 20, COSTS).seconds == pytest.approx(20e-3 + 0.1e-3)
    assert predict([launch(1e7)] * 20, COSTS).seconds == pytest.approx(1e-3 + 200e-3)
    # The host gets ahead during long kernels, so short ones after them wait for nothing.
    assert predict([launch(1e7)] + [launch(1e5)] * 5, COSTS).seconds == pytest.approx(1e-3 + 10e-3 + 0.5e-3)


def test_a_read_by_the_host_ends_its_lead():
    apart = [launch(1e7), launch(0, Kind.READ), launch(1e5)]
    assert predict(apart, COSTS).seconds == pytest.approx(1e-3 + 10e-3 + 1e-3 + 0.1e-3)


def test_the_device_takes_the_longer_of_arithmetic_and_bytes():
    assert COSTS.on_device(launch(1e6, Kind.PRODUCT, flops=5e9)) == pytest.approx(5e-3)
    assert COSTS.on_device(launch(1e7, Kind.PRODUCT, flops=5e9)) == pytest.approx(10e-3)
    assert COSTS.on_device(launch(1e6, is_strided=True)) == pytest.approx(2e-3)


def test_norms_of_wide_rows_have_a_higher_rate():
    costs = Costs(norms_forward=(1e9, 4e9))
    seconds = [costs.on_device(launch(4e6, Kind.NORM_FORWARD, width=width)) for width in (64, 128, 724, 4096, 9999)]
    assert seconds == pytest.approx([4e-3, 4e-3, 2e-3, 1e-3, 1e-3], rel=1e-3)


def test_attention_takes_the_rate_that_was_measured_at_the_most_similar_shape_and_refuses_unknown_backends():
    near = Entry("gather", Kind.ATTENTION, "", num_keys=900.0)
    assert find_attention_rate(near) == 279e12
    assert find_attention_rate(Entry("gather, backward", Kind.ATTENTION, "", num_keys=9000.0)) == 250e12
    with pytest.raises(KeyError, match="attention by flash has not been timed"):
        find_attention_rate(Entry("flash", Kind.ATTENTION, "", num_keys=900.0))


def test_every_measured_step_was_predicted_within_15_percent_from_the_code_that_was_measured():
    seconds = Before.read().seconds
    for step in MEASURED:
        assert seconds[str(step)] == pytest.approx(step.num_tokens / step.measured, rel=0.15), step

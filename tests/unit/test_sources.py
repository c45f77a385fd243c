"""Several sources of prompts: weights, shares, order, and the place from which a run resumes."""

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.command_line.file_checks import find_data_problems
from megatron_rl.config.rollout import SourceFile, read_weights
from megatron_rl.config.settings import DataConfig
from megatron_rl.errors import InputError
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.provenance import name_source
from megatron_rl.trainer.data.batch import BatchFacts
from megatron_rl.trainer.data.order import Curriculum, MixedOrder, RowOrder
from megatron_rl.trainer.data.prompts import PromptSource, read_prompts
from megatron_rl.trainer.loop.measures import measure_batches, summarize

SIZES = st.lists(st.tuples(st.integers(1, 9), st.floats(0.05, 20.0)), min_size=1, max_size=4)


def mix(sizes: list[tuple[int, float]], curriculum: Curriculum | None = None) -> MixedOrder:
    ends = [sum(size for size, _ in sizes[:place]) for place in range(len(sizes) + 1)]
    members = [range(begin, end) for begin, end in itertools.pairwise(ends)]
    return MixedOrder(members, [weight for _, weight in sizes], "rows", 3, True, curriculum)


def source_of(row: int, sizes: list[tuple[int, float]]) -> int:
    return next(place for place in range(len(sizes)) if row < sum(size for size, _ in sizes[: place + 1]))


@given(SIZES, st.integers(1, 300))
def test_each_source_has_its_share_after_any_number_of_rows(sizes, count) -> None:
    counts = Counter(source_of(row, sizes) for row in mix(sizes).peek(count))
    whole = sum(weight for _, weight in sizes)
    for source, (_, weight) in enumerate(sizes):
        assert abs(counts[source] - count * weight / whole) <= 1.5


def test_shares_are_exact_where_they_can_be() -> None:
    sizes = [(7, 3.0), (5, 1.0)]
    rows = mix(sizes).peek(400)
    assert Counter(source_of(row, sizes) for row in rows) == {0: 300, 1: 100}
    # The first has three of any four that follow each other.
    assert all(sum(row < 7 for row in rows[place : place + 4]) == 3 for place in range(0, 400, 4))


@given(SIZES, st.lists(st.integers(1, 7), min_size=1, max_size=12), st.data())
def test_within_a_source_each_row_comes_once_an_epoch_also_after_a_resume(sizes, takes, data) -> None:
    order, taken = mix(sizes), []
    resumed_at = data.draw(st.integers(0, len(takes) - 1))
    for number, count in enumerate(takes):
        if number == resumed_at:
            state = json.loads(json.dumps(order.state()))
            order = mix(sizes)
            order.restore(state)
        taken += order.peek(count)
        order.advance(count)
    assert taken == mix(sizes).peek(sum(takes))
    assert order.num_taken == sum(takes)
    for source, (size, _) in enumerate(sizes):
        own = [row for row in taken if source_of(row, sizes) == source]
        for begin in range(0, len(own), size):
            epoch = own[begin : begin + size]
            assert len(set(epoch)) == len(epoch)


def test_rows_that_were_put_off_come_first_and_a_carried_row_rests_by_its_reward() -> None:
    sizes = [(4, 1.0), (4, 1.0)]
    order = mix(sizes, Curriculum(0.1, 0.9, 1))
    first = order.peek(4)
    order.advance(4, put_off=[1, 2], rewards=[0.5, None, None, 0.5])
    assert order.put_off == (first[1], first[2])
    state = json.loads(json.dumps(order.state()))
    order = mix(sizes, Curriculum(0.1, 0.9, 1))
    order.restore(state)
    again = order.peek(4, num_carried=2)
    assert again[:2] == [first[1], first[2]]
    # The first of them is always right: it rests in its source's next epoch.
    order.advance(4, num_carried=2, rewards=[1.0, 0.5, 0.5, 0.5])
    assert (order.num_taken, order.num_resting, order.put_off) == (6, 1, ())
    later = order.peek(2 + 8)
    assert first[1] not in later[2:8]


def test_another_source_never_fills_the_place_of_rows_that_rest() -> None:
    sizes = [(4, 1.0), (4, 1.0)]
    order = mix(sizes, Curriculum(0.1, 0.9, 1))
    rows = order.peek(8)
    order.advance(8, rewards=[1.0 if row in (0, 1) else 0.5 for row in rows])
    assert Counter(source_of(row, sizes) for row in order.peek(8)) == {0: 4, 1: 4}
    assert not {0, 1} & set(order.peek(4))


def test_a_place_of_other_weights_is_refused_by_name() -> None:
    order = mix([(4, 1.0), (4, 3.0)])
    with pytest.raises(InputError, match=r"other weights of --prompts \(1, 2; now 1, 3\)"):
        order.restore(mix([(4, 1.0), (4, 2.0)]).state())
    with pytest.raises(InputError, match=r"other weights of --prompts \(none; now 1, 3\)"):
        order.restore(RowOrder(8, "rows", 3, True).state())
    prompts = [wire.Prompt(index=0, row=f"a:{place}", tokens=wire.encode_tokens([place])) for place in range(8)]
    with pytest.raises(InputError, match="trained with weights of --prompts, and none are given"):
        PromptSource(prompts, seed=3).restore(order.state())


def test_prompts_are_taken_by_the_weights_of_their_files_and_keep_their_source() -> None:
    prompts = [
        wire.Prompt(index=0, row=f"{name}:{line}", tokens=wire.encode_tokens([line]))
        for name, count in (("math.jsonl", 6), ("games.jsonl", 3))
        for line in range(1, count + 1)
    ]
    source = PromptSource(prompts, seed=1, weights={"math.jsonl": 1.0, "games.jsonl": 2.0})
    taken = source.take(90)
    assert Counter(name_source(prompt.row) for prompt in taken) == {"math.jsonl": 30, "games.jsonl": 60}
    assert [prompt.index for prompt in taken] == list(range(90))
    assert source.epochs == pytest.approx(10)
    with pytest.raises(InputError, match=r"--prompts empty.jsonl has no prompt left to train on"):
        PromptSource(prompts, seed=1, weights={"math.jsonl": 1.0, "games.jsonl": 2.0, "empty.jsonl": 1.0})


def test_weights_follow_the_files_names_and_are_checked(tmp_path: Path) -> None:
    first, second, odd = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c=2"
    for path in (first, second, odd):
        path.write_text('{"prompt": "1 + 1"}\n')
    words = [Path(f"{first}=3"), Path(f"{second}=0.5"), odd]
    assert read_weights(words) == [SourceFile(first, 3.0), SourceFile(second, 0.5), SourceFile(odd)]
    config = DataConfig(prompts=words[:2])
    assert [*find_data_problems(config, "grpo")] == []
    assert [row.identity for row in read_prompts(config).trained] == ["a.jsonl:1", "b.jsonl:1"]

    def problems(*names: str, stage: str = "grpo") -> str:
        return " ".join(find_data_problems(DataConfig(prompts=[Path(name) for name in names]), stage))

    assert f"{second} has no weight, and others have" in problems(f"{first}=3", str(second))
    assert "a weight must be a finite number above 0" in problems(f"{first}=0", f"{second}=1")
    assert "a weight must be a finite number above 0" in problems(f"{first}=nan", f"{second}=1")
    assert f"lists {first} twice" in problems(f"{first}=1", f"{first}=2")
    assert "write the files alone" in problems(f"{first}=1", f"{second}=1", stage="sft")


def respond(reward: float, length: int) -> wire.Response:
    return wire.Response(
        tokens=wire.encode_tokens([5] * length), log_probs=wire.encode_log_probs([0.0] * length), finish_reason="stop",
        seed=0, engine="a", spans=[wire.VersionSpan(version="1", start=0, end=length)], fingerprint="f", reward=reward,
    )  # fmt: skip


def make_part(row: str, *rewards: float, first: int = 0) -> wire.GroupPart:
    return wire.GroupPart(
        prompt_index=0, row=row, prompt_tokens=b"", first_response=first, rewards=list(rewards),
        responses=[respond(reward, 2 + place) for place, reward in enumerate(rewards)],
    )  # fmt: skip


def test_each_source_has_its_own_measures_and_one_source_has_none() -> None:
    from megatron_rl.trainer.loop.measures import _describe_sources

    parts = (make_part("a/x.jsonl:1", 1.0, 1.0), make_part("b.jsonl:7", 0.0, 1.0), make_part("b.jsonl:8", 0.0, 0.0))
    measures = measure_batches([BatchFacts(9, 9, 6, parts[:2])])
    # Another replica's.
    measures.merge(measure_batches([BatchFacts(9, 9, 6, parts[2:])]))
    assert _describe_sources(measures.sums) == {
        "a/x.jsonl": {"reward": 1.0, "groups": 1, "all_equal_groups": 1, "length_mean": 2.5},
        "b.jsonl": {"reward": 0.25, "groups": 2, "all_equal_groups": 1, "length_mean": 2.5},
    }


def test_held_out_success_is_counted_for_each_source() -> None:
    def group(row: str, *rewards: float) -> wire.Group:
        prompt = wire.Prompt(index=0, row=row, tokens=b"")
        return wire.Group(prompt=prompt, responses=[respond(reward, 3) for reward in rewards])

    groups = [group("a.jsonl:1", 1.0, 0.0), group("b.jsonl:1", 0.0, 0.0), group("b.jsonl:2", 1.0, 1.0)]
    evaluated = wire.Evaluated(run="r", version=0, fingerprint="f", groups=groups)
    found = summarize(evaluated, 1.0)
    assert found["sources"] == {
        "a.jsonl": {"mean": 0.5, "pass": 1.0, "num_prompts": 1},
        "b.jsonl": {"mean": 0.5, "pass": 0.5, "num_prompts": 2},
    }  # fmt: skip
    assert (found["mean"], found["num_prompts"], found["num_samples"]) == (0.5, 3, 2)
    alone = summarize(wire.Evaluated(run="r", version=0, fingerprint="f", groups=groups[:1]), 1.0)
    assert "sources" not in alone

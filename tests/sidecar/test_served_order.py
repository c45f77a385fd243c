"""The order of a service's requests: by their numbers, each once, and weights in turns."""

import asyncio
import contextlib
import itertools

import numpy as np
import pytest
from msgspec import structs

from megatron_rl.errors import InputError
from megatron_rl.shared.protocol.wire import PublishAnswer
from megatron_rl.tinker import work
from megatron_rl.tinker.front import Front, Served
from megatron_rl.tinker.futures import Body, Futures, ModelLine
from megatron_rl.tinker.packs import Forest
from megatron_rl.tinker.provenance import SequenceRecord
from megatron_rl.tinker.ranks import NotDone, Ranks
from megatron_rl.tinker.requests import HANDLERS, Asked, Request, RequestFile
from megatron_rl.tinker.sampling import Wanted, WeightTurns
from megatron_rl.tinker.saved import NotFound, SavedModel, SavedModels


async def test_requests_take_effect_by_their_numbers_and_each_once() -> None:
    done: list[int] = []
    line = ModelLine(Futures(lambda future: None), "owner")

    def perform(number: int):
        async def do() -> Body:
            await asyncio.sleep(0)
            done.append(number)
            if number == 2:
                raise InputError("the second is wrong")
            return Body(b"%d" % number)

        return do

    futures = [line.add(number, perform(number)) for number in (3, 2, 2, 1, 4, 1)]
    await asyncio.gather(*(one.done.wait() for one in futures))
    assert done == [1, 2, 3, 4]
    assert futures[1] is futures[2]
    assert futures[3] is futures[5]
    assert [one.answer.body for one in futures[3:5]] == [b"1", b"4"]
    assert b"the second is wrong" in futures[1].answer.body


def test_a_journal_keeps_what_was_written_whole_and_belongs_to_one_model(tmp_path) -> None:
    with contextlib.closing(RequestFile(tmp_path, "tiny")) as journal:
        numbers = [journal.append(Asked("optim_step", "owner", "", b"%d" % number)) for number in range(3)]
    whole = (tmp_path / "requests.bin").stat().st_size
    with (tmp_path / "requests.bin").open("ab") as file:
        file.write(b"\x40\0\0\0torn")
    with contextlib.closing(RequestFile(tmp_path, "tiny")) as again:
        assert (again.mark, [one.body for one in again.records[1:]]) == (journal.mark, [b"0", b"1", b"2"])
        assert (tmp_path / "requests.bin").stat().st_size == whole
        assert again.append(Asked("optim_step", "owner", "", b"3")) == numbers[-1] + 1
    with pytest.raises(InputError, match="requests of tiny, and other is served"):
        RequestFile(tmp_path, "other")


def test_a_checkpoint_that_has_expired_is_gone_and_its_name_is_free(tmp_path) -> None:
    saved = SavedModels(tmp_path)
    one = SavedModel(
        path="tinker://m/weights/one", model="m", owner="key", kind="weights", base_model="b", lora_rank=0, num_steps=0,
        loads=[], number=1, time=0.0,
    )  # fmt: skip
    for name in ("one", "two", "three"):
        path = f"tinker://m/weights/{name}"
        saved.stage(path)
        saved.finish(structs.replace(one, path=path))
    saved.set_expiry(saved.find(one.path, "key"), -1)
    with pytest.raises(NotFound, match="has expired"):
        saved.find(one.path, "key")
    assert not saved.find_folder(one.path).exists()
    # No client asks for it, but another one is saved.
    saved.set_expiry(saved.find("tinker://m/weights/two", "key"), -1)
    saved.stage(one.path)
    assert not saved.find_folder("tinker://m/weights/two").exists()
    assert [one.path for one in saved.list_of("key")] == ["tinker://m/weights/three"]


def test_a_session_that_is_over_leaves_nothing(tmp_path) -> None:
    served = Served(
        base_model="b", folder=tmp_path, longest=64, lora_rank=0, most_models=1, needs_provenance=False,
        decode=lambda _: [], last_version=0,
    )  # fmt: skip
    front = Front(served, Ranks(), None, SequenceRecord(tmp_path), lambda _: None)
    assert {front.create_session("key", "once", identity) for identity in "ab"} == {"a"}
    sampler = front.create_sampler(front.find_session("a", "key"), 0, None)
    assert front.has_session("a", "key")
    assert not front.has_session("a", "another")
    front.end_session(front.find_session("a", "key"))
    assert not front.has_session("a", "key")
    with pytest.raises(NotFound):
        front.find_sampler(sampler.identity, "key")
    assert front.create_session("key", "once", "c") == "c"


async def test_work_is_handed_out_again_until_its_result_has_come() -> None:
    ranks = Ranks()
    assert await ranks.take(0.01) is None
    first, second = (asyncio.create_task(ranks.do(work.Create(model=name, seed=0))) for name in "ab")
    assigned = await ranks.take(1.0)
    assert await ranks.take(1.0) == assigned
    ranks.give(assigned.number, work.Done(num_steps=3))
    ranks.give(assigned.number, work.Failed(reason="late"))
    assert (await first).num_steps == 3
    later = await ranks.take(1.0)
    assert (later.number, later.work.model) == (assigned.number + 1, "b")
    with pytest.raises(InputError, match="not handed out"):
        ranks.give(later.number + 1, work.Done())
    ranks.give(later.number, work.Failed(reason="no room"))
    with pytest.raises(NotDone, match="no room"):
        await second


async def test_engines_hold_weights_until_their_requests_have_ended() -> None:
    ranks = Ranks()
    turns, held, order = WeightTurns(ranks, 7), [], []

    async def publish() -> None:
        while True:
            assigned = await ranks.take(5.0)
            assert not held, "weights are changed under a request"
            order.append(assigned.work.name)
            if assigned.work.name == "lost":
                ranks.give(assigned.number, work.Failed(reason="not kept"))
            else:
                ranks.give(assigned.number, work.PublishDone(fingerprint="f", answer=PublishAnswer()))

    async def sample(name: str) -> str:
        try:
            async with turns.holding(name) as now:
                held.append(name)
                assert {*held} == {name} == {now.name}
                await asyncio.sleep(0.01)
                held.remove(name)
        except NotDone as error:
            return str(error)
        return ""

    publishing = asyncio.create_task(publish())
    said = await asyncio.gather(*(sample(name) for name in ("a", "b", "a", "lost", "b", "a", "c")))
    publishing.cancel()
    assert said == ["", "", "", "not kept", "", "", ""]
    # Requests for the same weights go together.
    assert order == ["a", "b", "lost", "c"]


@pytest.mark.parametrize("is_sampled", [False, True])
def test_a_forest_has_each_common_begin_once_and_every_sequence_whole(is_sampled) -> None:
    """Draw sequences that own what they sample: others may only begin with that."""
    draw = np.random.default_rng(0)
    for _ in range(50):
        sequences = [draw.integers(0, 3, int(draw.integers(1, 9))).astype("<i4") for _ in range(12)]
        shared = [int(draw.integers(0, len(one) + 1)) if is_sampled else len(one) for one in sequences]
        forest = Forest()
        for one, num_shared in zip(sequences, shared, strict=True):
            forest.add(one, num_shared)
        segments = forest.list_segments()
        flat = np.concatenate([segment.tokens for segment in segments])
        prefixes = {tuple(one[:length]) for one in sequences for length in range(1, len(one) + 1)}
        assert len(flat) == forest.num_tokens >= len(prefixes)
        assert is_sampled or len(flat) == len(prefixes)
        parents = [segment.parent for segment in segments]
        assert all(parent < number for number, parent in enumerate(parents))
        ends = np.cumsum([0, *(len(segment.tokens) for segment in segments)])
        of_row = np.repeat(np.arange(len(segments)), [len(segment.tokens) for segment in segments])
        own: list[int] = []
        for number, (one, num_shared) in enumerate(zip(sequences, shared, strict=True)):
            rows = forest.find_rows(number)
            assert (flat[rows] == one).all()
            own += rows[num_shared:].tolist()
            # Each row is its own segment's, or that of an ancestor, in order.
            path = list(dict.fromkeys(of_row[rows].tolist()))
            assert parents[path[0]] == -1
            assert all(parents[child] == parent for parent, child in itertools.pairwise(path))
            assert all((np.diff(rows[of_row[rows] == segment]) == 1).all() for segment in path)
            assert all(rows[of_row[rows] == segment][0] == ends[segment] for segment in path)
        assert len(own) == len(set(own))


async def test_a_sampler_whose_model_is_gone_before_its_weights_were_kept_says_so(tmp_path) -> None:
    served = Served(
        base_model="tiny", folder=tmp_path, longest=64, lora_rank=0, most_models=1, needs_provenance=False,
        decode=lambda _: [], last_version=0,
    )  # fmt: skip
    front = Front(served, Ranks(), None, SequenceRecord(tmp_path), lambda _: None)
    session = front.find_session(front.create_session("key", "", "s"), "key")
    front.create_model(session, 0, None, None, "made")
    model = front.find_model("s:train:0", "key")
    # The ranks have not made it, so the request for its weights waits for its turn.
    body = b'{"model_id": "s:train:0", "sampling_session_seq_id": 0, "seq_id": 1}'
    HANDLERS["save_weights_for_sampler"](Request(front, "key", "", body, "kept"))
    wanted = Wanted(np.array([1]), num_samples=1, seed=0, max_tokens=1, temperature=1.0, stop=None)
    asked, _ = front.sample(front.find_sampler("s:sample:0", "key"), 0, wanted, has_prompt=False)
    await asyncio.sleep(0)
    assert asked.answer is None
    front.unload([model], "it was unloaded")
    async with asyncio.timeout(5):
        await asked.done.wait()
    assert b"it was unloaded" in asked.answer.body

"""Scripted engines: the file that says how they behave, and the times of their steps."""

import asyncio
import json
from pathlib import Path

import pytest

from megatron_rl.errors import InputError
from megatron_rl.shared.protocol.wire import Sampling
from megatron_rl.sidecar.engines import GroupRequest
from megatron_rl.sidecar.engines.decoding import Decoding, StepCosts
from megatron_rl.sidecar.engines.scripted import Script, read_script
from tests import virtual_time


def written(folder: Path, content: object) -> Path:
    path = folder / "script.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def delays(path: Path) -> list[float]:
    script = read_script(path, None)
    requests = [
        GroupRequest(str(seed), (1,), 1, seed, Sampling(max_tokens=4), can_wait=False) for seed in range(0, 4000, 100)
    ]
    return [script.delay(request) for request in requests]


def test_a_script_sets_vocabulary_lengths_and_speed_of_scripted_engines(tmp_path: Path) -> None:
    script = read_script(written(tmp_path, {"vocab_size": 50, "lengths": [3, 9], "tokens_per_second": 200}), 131)
    assert (script.vocab_size, script.lengths, script.tokens_per_second) == (50, (3, 9), 200.0)


def test_a_script_sets_the_seconds_of_a_step_and_the_flag_how_many_responses_run_in_it(tmp_path: Path) -> None:
    path = written(tmp_path, {"step_seconds": [0.004, 0.0001]})
    assert read_script(path, None, 16).decoding == StepCosts(step=0.004, per_response=0.0001, max_running=16)
    assert read_script(written(tmp_path, {}), None, 16).decoding is None


def test_without_a_file_or_a_field_the_vocabulary_is_that_of_the_model(tmp_path: Path) -> None:
    assert read_script(None, 131).vocab_size == 131
    assert read_script(written(tmp_path, {}), 131).vocab_size == 131
    assert read_script(None, None).vocab_size == Script().vocab_size


def test_delays_lie_in_their_range_differ_between_groups_and_follow_from_their_seed(tmp_path: Path) -> None:
    first = delays(written(tmp_path, {"delay": [0.1, 0.5], "delay_seed": 3}))
    assert len(set(first)) == len(first)
    assert 0.1 <= min(first) < 0.2
    assert 0.4 < max(first) <= 0.5
    assert delays(written(tmp_path, {"delay": [0.1, 0.5], "delay_seed": 3})) == first
    assert delays(written(tmp_path, {"delay": [0.1, 0.5], "delay_seed": 4})) != first
    assert set(delays(written(tmp_path, {"delay_seed": 3}))) == {0.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"delays": [0, 1]}, "unknown field delays, the nearest is delay; there are vocab_size, lengths"),
        ({"lengths": [0, 4]}, r"lengths \[0, 4\]: write \[LEAST, MOST\] with 1 <= LEAST <= MOST"),
        ({"lengths": [5, 4]}, r"lengths \[5, 4\]"),
        ({"lengths": 4}, "lengths"),
        ({"delay": [-1, 4]}, r"delay \[-1, 4\]: write seconds"),
        ({"delay": [2, 1]}, r"delay \[2, 1\]"),
        ({"tokens_per_second": 0}, "tokens_per_second 0.0: write a number above 0"),
        ({"step_seconds": [0, 0]}, r"step_seconds \[0.0, 0.0\]: write \[STEP, RESPONSE\]"),
        ({"step_seconds": [-1, 2]}, r"step_seconds \[-1.0, 2.0\]"),
        ({"step_seconds": [1]}, "step_seconds"),
        ({"step_seconds": [1, 0], "tokens_per_second": 5}, "tokens_per_second and step_seconds: write one of them"),
        ({"vocab_size": 0}, "vocab_size 0: write at least 1"),
        ({"vocab_size": 132}, "vocab_size 132: the model of --hf-model has 131 tokens"),
        ("{", "is not JSON"),
        ("[1]", "Expected `object`"),
    ],
)
def test_a_script_that_cannot_be_played_is_refused_with_file_field_and_remedy(tmp_path, content, message) -> None:
    with pytest.raises(InputError, match=f"--rollout-script .*script.json.*{message}"):
        read_script(written(tmp_path, content), 131)


def test_a_script_that_is_not_there_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none.json cannot be read: No such file"):
        read_script(tmp_path / "none.json", None)


def test_a_step_takes_longer_the_more_responses_run_in_it() -> None:
    async def sample() -> list[float]:
        decoding, clock = Decoding(StepCosts(1.0, 0.5, max_running=8)), asyncio.get_running_loop().time
        ends: list[float] = []

        async def one(lengths: list[int]) -> None:
            assert await decoding.sample(lengths) == lengths
            ends.append(clock())

        await asyncio.gather(one([4, 2]), one([10]))
        return ends

    # Two steps with three responses, two with two, six with one.
    assert virtual_time.run(sample()) == pytest.approx([2 * 2.5 + 2 * 2, 2 * 2.5 + 2 * 2 + 6 * 1.5])


def test_responses_beyond_those_that_run_wait_in_the_order_in_which_they_came() -> None:
    async def sample() -> list[tuple[str, float]]:
        decoding, clock = Decoding(StepCosts(1.0, 0.0, max_running=2)), asyncio.get_running_loop().time
        ends: list[tuple[str, float]] = []

        async def one(name: str, lengths: list[int]) -> None:
            await decoding.sample(lengths)
            ends.append((name, clock()))

        await asyncio.gather(one("first", [5, 3]), one("second", [4]), one("third", [1]))
        return ends

    assert virtual_time.run(sample()) == [("first", 5.0), ("third", 6.0), ("second", 7.0)]


def test_a_cancelled_group_leaves_its_place_to_others() -> None:
    async def sample() -> float:
        decoding = Decoding(StepCosts(0.0, 1.0, max_running=4))
        cancelled = asyncio.create_task(decoding.sample([100, 100]))
        other = asyncio.create_task(decoding.sample([10]))
        await asyncio.sleep(6)
        cancelled.cancel()
        await other
        return asyncio.get_running_loop().time()

    # Two of ten steps with three responses, and eight alone.
    assert virtual_time.run(sample()) == pytest.approx(6 + 8)


def test_a_group_that_is_cut_has_the_tokens_of_the_steps_so_far() -> None:
    async def sample() -> list[int]:
        decoding, cut = Decoding(StepCosts(1.0, 0.0, max_running=2)), asyncio.Event()
        asyncio.get_running_loop().call_later(4.5, cut.set)
        return await decoding.sample([3, 9, 9], cut)

    assert virtual_time.run(sample()) == [3, 4, 1]

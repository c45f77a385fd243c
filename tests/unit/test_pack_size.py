"""The size of micro-batches that follows from a device's memory, and what is computed again where that is short."""

import concurrent.futures
import dataclasses
import datetime
import itertools
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_rl import platforms
from megatron_rl.command_line import pack_size, rank_store, resolve
from megatron_rl.command_line.pack_size import ENOUGH_TOKENS, LEAST_MICRO_BATCHES, Size, choose_pack
from megatron_rl.command_line.rank_store import find_least
from megatron_rl.errors import UsageError
from megatron_rl.shared import device_memory as memory
from megatron_rl.shared.device_memory import GIB, Micro, RankMemory, RankSplit, Recomputed
from megatron_rl.sidecar.vllm.flags import read_share
from megatron_rl.trainer.loop.run import check_agreement
from megatron_rl.trainer.loop.saver import compare_rounding, describe_rounding
from megatron_rl.types import Experts
from tests.command_lines import CPU, QWEN3, RUN, folder, keep_one_parser, parse_run, without
from tests.unit.test_examples import QWEN3_4B

GROUP = 8
NORMS = Recomputed(modules=frozenset({"layernorm"}))
SPARSE = dataclasses.replace(QWEN3_4B, experts=Experts(16, 4, 768, True))


def list_sizes(prompt: int, response: int, groups: int) -> list[Size]:
    parts = [size for size in range(1, GROUP) if GROUP % size == 0]
    counts = [GROUP * count for count in range(1, groups + 1) if groups % count == 0]
    return [
        Size(size, max(1, size // GROUP) * prompt + size * response, groups * GROUP // size) for size in parts + counts
    ]


def takes(rank: RankMemory, size: Size) -> int:
    return rank.estimate(Micro(size.tokens, size.num_micro_batches)).total


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("architecture", [QWEN3_4B, SPARSE], ids=["dense", "sparse"])
def test_a_micro_batch_is_the_largest_that_fits_and_leaves_an_update_enough_of_them(architecture, stages: int) -> None:
    plain = RankMemory(architecture, RankSplit(tensor=2, pipeline=stages, replicas=8))
    again = dataclasses.replace(plain, recomputed=NORMS)
    seen = set()
    for (prompt, response), groups, gib in itertools.product(
        [(128, 64), (512, 1536), (4096, 8192)], [1, 8, 64, 96], [8, 16, 24, 32, 40, 48, 64, 80, 140, 4000]
    ):
        sizes, room = list_sizes(prompt, response, groups), gib * GIB
        chosen = choose_pack(sizes, GROUP, ENOUGH_TOKENS, stages, plain, again, room)
        size, rank = chosen.size, again if chosen.recomputes else plain
        assert chosen.taken.total == takes(rank, size)
        assert chosen.fits == (chosen.taken.total <= room)
        larger = [one for one in sizes if one.responses > size.responses]
        if not chosen.fits:
            assert size.responses == 1
            larger = sizes
        for one in larger:
            # Nothing larger fits, or it would be beyond a bound.
            is_enough = one.tokens <= ENOUGH_TOKENS and one.num_micro_batches >= LEAST_MICRO_BATCHES * stages
            if one.responses <= GROUP or is_enough:
                assert takes(again, one) > room
        if size.responses > GROUP:
            assert size.tokens <= ENOUGH_TOKENS
            assert size.num_micro_batches >= LEAST_MICRO_BATCHES * stages
        if chosen.recomputes:
            assert takes(plain, size) > room
        seen.add((min(2, size.responses // GROUP), chosen.recomputes, chosen.fits))
    # A part of a group, a group, several; with and without what is computed again; and what does not fit.
    assert {(0, False, True), (1, False, True), (2, False, True), (0, False, False)} <= seen
    assert any(recomputes for _, recomputes, _ in seen)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the flags of a run of 16 groups of 8 responses; prompts and responses have 64 tokens at most."""
    keep_one_parser(monkeypatch)
    large = dataclasses.replace(QWEN3, hidden_size=1024, ffn_hidden_size=4096, num_layers=16, vocab_size=32000)
    return [*CPU, "--hf-model", folder(tmp_path, large), *RUN]


def give_devices(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    """Let ranks have devices of that size; all else stays as on a CPU."""
    kind = type(platforms.select("cpu"))
    monkeypatch.setattr(kind, "smallest_device", lambda self, num_devices: round(gib * GIB))


def test_a_device_decides_what_no_flag_does(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = parse_run(*words)
    assert on_cpu.training.micro_batch_size == 1
    give_devices(monkeypatch, 80)
    settings = parse_run(*words)
    # Two groups, so that an update has eight micro-batches.
    assert settings.training.micro_batch_size == 16
    assert settings.transformer.recompute_granularity is None
    (note,) = [note for note in settings.notes if note.startswith(pack_size.NOTES)]
    assert "devices of 80 GiB make --micro-batch-size 16: 2 groups, up to 1,152 tokens" in note
    assert "optimizer 2.1" in note
    assert settings.words[-2:] == ("--micro-batch-size", "16")
    for written, size in (("--micro-batch-size 4", 4), ("--max-tokens-per-gpu 600", 8)):
        settings = parse_run(*words, written)
        assert settings.training.micro_batch_size == size
        assert not any(note.startswith(pack_size.NOTES) for note in settings.notes)
    # The more ranks, the fewer groups a replica has, and one is the least.
    assert parse_run(*words, world_size=4).training.micro_batch_size == GROUP


def test_micro_batches_fill_the_schedule_of_virtual_stages(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    give_devices(monkeypatch, 80)
    layout = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    for prompts in (48, 50, 6):
        more = f"--grpo-prompts-per-step {prompts}"
        # Sixteen micro-batches leave at most three groups in each; but 25 of two groups would not fill the schedule.
        settings = parse_run(*without(words, "--grpo-prompts-per-step"), layout, more, world_size=2)
        division = settings.sizes.division
        assert division.slots_per_update % 2 == 0
        assert division.groups_per_unit == {48: 3, 50: 1, 6: 1}[prompts]


def test_norms_are_computed_again_if_more_fits_then_and_no_flag_decides(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for gib in (6.5, 6.7, 6.9, 7.1, 7.3, 7.5, 7.7, 7.9, 8.1, 8.3, 8.5, 9, 10):
        give_devices(monkeypatch, gib)
        settings = parse_run(*words)
        found[settings.transformer.recompute_granularity] = gib, settings
    assert found.keys() == {None, "selective"}
    short, settings = found["selective"]
    assert settings.transformer.recompute_modules == ["layernorm"]
    assert any(note.startswith("memory is short, ") for note in settings.notes)
    assert settings.words[-4:] == ("--recompute-granularity", "selective", "--recompute-modules", "layernorm")
    give_devices(monkeypatch, short)
    full = parse_run(*words, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    assert full.transformer.recompute_granularity == "full"
    modules = parse_run(*words, "--recompute-granularity selective --recompute-modules core_attn").transformer
    assert modules.recompute_modules == ["core_attn"]
    size = settings.training.micro_batch_size
    tokens = 64 * max(1, size // GROUP) + 64 * size
    switched = parse_run(*words, f"--max-tokens-per-gpu {tokens}")
    assert (switched.training.micro_batch_size, switched.transformer.recompute_granularity) == (size, None)
    # The least size fits without it.
    assert parse_run(*words, "--micro-batch-size 1").transformer.recompute_granularity is None
    # A size that is written fits with that too, and is kept.
    given = parse_run(*words, f"--micro-batch-size {size}")
    assert (given.training.micro_batch_size, given.transformer.recompute_granularity) == (size, "selective")


def test_an_engine_on_the_same_device_gets_its_part(tmp_path: Path) -> None:
    needs = memory.count_needs(QWEN3_4B, "bfloat16", 1, 64, 2048)
    for gib, fixed in itertools.product((80, 140), (10, 30)):
        room = memory.count_room(gib * GIB, fixed * GIB, needs)
        alone = memory.count_room(gib * GIB, fixed * GIB)
        assert fixed * GIB < room < alone - needs.weights - needs.work
        # The division of the device accepts a rank that fills its room, and the engine has a cache.
        division = memory.divide(gib * GIB, room, needs)
        beside = 0.97 * gib * GIB - GIB - needs.weights - needs.work - 1.15 * fixed * GIB
        assert division.cache == pytest.approx(min(beside / 2, 65 * needs.response), rel=0.01)
        assert division.rank <= gib * GIB * 0.97
    assert read_share("--gpu-memory-utilization 0.3") == 0.3
    assert read_share("--gpu-memory-utilization=0.25 --max-logprobs 3") == 0.25
    assert read_share("--kv-cache-memory-bytes 1000") == 0.5


def test_demonstrations_are_packed_too(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_devices(monkeypatch, 80)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    of_stage = [*words[:4], "--stage", "sft", "--prompts", str(rows), "--seq-length", "128", "--lr", "1e-6"]
    more = ["--train-iters", "2", "--rollout-folder", str(tmp_path / "run"), "--global-batch-size", "32"]
    settings = parse_run(*of_stage, *more)
    assert settings.training.micro_batch_size == 4
    assert any("4 demonstrations, up to 512 tokens" in note for note in settings.notes)


def test_an_update_that_does_not_divide_is_reported_as_without_devices(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_devices(monkeypatch, 80)
    with pytest.raises(UsageError, match="do not divide over 32 replicas"):
        parse_run(*words, world_size=32)
    with pytest.raises(UsageError, match="--seq-length is missing"):
        parse_run(*without(without(words, "--seq-length"), "--rollout-max-tokens"), "--max-prompt-tokens 9")


def test_only_modules_that_the_layers_have_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, sparse = QWEN3_4B, SPARSE
    assert resolve.list_cheap_modules(("layernorm",), dense, {}) == ("layernorm",)
    monkeypatch.setattr(resolve, "find_engine_refusal", lambda: None)
    assert resolve.list_cheap_modules(("layernorm",), dense, {}) == ()
    assert resolve.list_cheap_modules(("layernorm",), sparse, {}) == ("layernorm",)
    assert resolve.list_cheap_modules((), sparse, {}) == ()


def test_the_smallest_device_of_all_hosts_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=60))
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        found = [threads.submit(find_least, size, store, rank, 3) for rank, size in enumerate((9, 7, 8))]
        assert [one.result() for one in found] == [7, 7, 7]
    # A rank that never answers does not count.
    store.set_timeout(datetime.timedelta(seconds=0.1))
    assert find_least(9, store, 0, 4) == 7
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(rank_store, "find_store", lambda prefix: pytest.fail("one host needs no store"))
    assert rank_store.find_smallest_device(5) == 5


def test_ranks_with_devices_that_differ_end_by_name() -> None:
    check_agreement([16, 16])
    with pytest.raises(UsageError, match="write --micro-batch-size 8"):
        check_agreement([16, 8, 16])


def test_a_run_that_resumes_with_other_sums_says_so(words: list[str]) -> None:
    norms = "--recompute-granularity selective --recompute-modules layernorm"
    few, more, again = (
        describe_rounding(parse_run(*words, f"--micro-batch-size {size} {flags}"))
        for size, flags in ((4, ""), (8, ""), (4, norms))
    )
    for saved, own in ((few, few), (again, again)):
        assert not list(compare_rounding(saved, own))
    (note,) = compare_rounding(few, more)
    assert "have 8 responses, and had 4 before" in note
    assert "--micro-batch-size 4 keeps it" in note
    (note,) = compare_rounding(few, again)
    assert note.startswith("norms were not computed again")
    assert note.endswith("--max-tokens-per-gpu keeps that")
    (note,) = compare_rounding(again, few)
    assert note.endswith(f"{norms} keeps that")

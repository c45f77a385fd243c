"""The slot of adapters in a worker, with stand-ins for vLLM's layers: what is proved of it, refused, and ended."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.shared.weights.adapters import name_factors
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.shared.weights.files import Checkpoint, write_digests
from megatron_rl.shared.weights.fingerprint import compute_fingerprint, digest
from megatron_rl.shared.weights.folders import COUNTS_FILE, writing
from megatron_rl.shared.weights.mapping import Mapping as WeightMapping
from megatron_rl.sidecar.vllm.adapters import AdapterSlot, OtherAdapters
from megatron_rl.sidecar.vllm.answers import find_wrongly_shared
from megatron_rl.sidecar.vllm.held import LoadProof, NotHeld, Rectangle, join_proofs
from megatron_rl.sidecar.vllm.held_model import HeldModel
from megatron_rl.sidecar.vllm.parts import encode_places
from megatron_rl.sidecar.vllm.received import Refusal, list_specs, map_file_tensors
from megatron_rl.sidecar.vllm.worker import WorkerExtension
from tests.hf_models import draw

RANK, MOST, INPUTS, HEAD, KEYS, VALUES = 3, 8, 8, 12, 4, 4
QKV, OUT = "model.layers.0.qkv_proj", "model.layers.0.o_proj"
MODULES = {f"model.layers.0.{name}_proj": rows for name, rows in zip("qkv", (HEAD, KEYS, VALUES), strict=True)}
FACTORS = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(number))
    for number, (name, shape) in enumerate(
        pair
        for module, (rows, columns) in {**{name: (rows, INPUTS) for name, rows in MODULES.items()}, OUT: (6, 8)}.items()
        for pair in zip(name_factors(module), ((RANK, columns), (rows, RANK)), strict=True)
    )
}
DIGESTS = {name: digest(factor).tolist() for name, factor in FACTORS.items()}
SPECS = list_specs(FACTORS)


@pytest.fixture(autouse=True)
def _renaming(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(name: str, mapper: Any) -> tuple[str, bool]:
        module, _, factor = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        return module, factor == "lora_A"

    for name in ("vllm", "vllm.lora"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.lora.utils", SimpleNamespace(parse_fine_tuned_lora_name=parse))


def layer(kind: str, rank: int, size: int, **members: Any) -> Any:
    return type(kind, (SimpleNamespace,), {})(tp_rank=rank, tp_size=size, **members)


def filled(rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32, num_keys: int | None = None) -> Any:
    """Return a runner whose slot holds this rank's parts; there are `num_keys` parts of keys, and values, at most."""
    numbers = [rank, *(rank * (num_keys or size) // size for _ in "kv")]
    a_stacks, b_stacks = [], []
    for number, (module, rows) in zip(numbers, MODULES.items(), strict=True):
        a, b = (FACTORS[name] for name in name_factors(module))
        parts = size if rows == HEAD else num_keys or size
        a_stacks.append(stack(a, dtype))
        b_stacks.append(stack(b.chunk(parts)[number], dtype, is_a=False))
    qkv = layer(
        "MergedQKVParallelLinearWithLoRA", rank, size, n_slices=3, output_ids=tuple(numbers),
        lora_a_stacked=tuple(a_stacks), lora_b_stacked=tuple(b_stacks), is_merged_col_linear=False,
    )  # fmt: skip
    a, b = (FACTORS[name] for name in name_factors(OUT))
    out = layer(
        "RowParallelLinearWithLoRA", rank, size, n_slices=1, input_size=8 // size,
        lora_a_stacked=(stack(a.chunk(size, 1)[rank], dtype),), lora_b_stacked=(stack(b, dtype, is_a=False),),
    )  # fmt: skip
    manager = SimpleNamespace(
        modules={QKV: qkv, OUT: out}, packed_modules={QKV: list(MODULES)}, model=SimpleNamespace(),
        lora_index_to_id=[5], remove_all_adapters=lambda: None, lora_config=SimpleNamespace(max_lora_rank=MOST),
    )  # fmt: skip
    activated: list[Any] = []
    return SimpleNamespace(
        lora_manager=SimpleNamespace(_adapter_manager=manager),
        manager=manager,
        activated=activated,
        _set_active_loras=lambda prompts, tokens, requests: activated.append(tokens),
    )


def stack(factor: torch.Tensor, dtype: torch.dtype, is_a: bool = True) -> torch.Tensor:
    """Pad a factor to the rank of a slot, as vLLM does."""
    rows, columns = factor.shape
    padded = torch.zeros(1, 1, MOST if is_a else rows, columns if is_a else MOST, dtype=dtype)
    padded[0, 0, :rows, :columns] = factor
    return padded


def prove(runner: Any) -> LoadProof:
    slot = AdapterSlot(runner)
    slot.number = 5
    return slot.prove(SPECS, DIGESTS)


def test_a_worker_alone_proves_all_factors() -> None:
    proof = prove(filled())
    assert (proof.num_compared, proof.num_parameters, proof.uncompared, proof.shares) == (8, 8, (), {})
    assert proof.proved == FACTORS.keys()


@pytest.mark.parametrize("num_keys", [2, 1])
def test_two_workers_prove_divided_factors_together(num_keys: int) -> None:
    """Let workers also share the parts of keys and values, as with fewer heads of them than workers."""
    proofs = [prove(filled(rank, 2, num_keys=num_keys)) for rank in range(2)]
    answers = [proof.describe(DIGESTS) for proof in proofs]
    assert not list(find_wrongly_shared(answers))
    whole = {name for name in FACTORS if "lora_A" in name and OUT not in name} | {name_factors(OUT)[1]}
    keys = {name_factors(module)[1] for module in MODULES if module[-6] in "kv"}
    assert proofs[0].proved == (whole if num_keys == 2 else whole | keys)
    wrong = filled(1, 2, num_keys=num_keys)
    wrong.manager.modules[QKV].lora_b_stacked[0][0, 0, 1, 1] += 1
    answers[1] = prove(wrong).describe(DIGESTS)
    assert set(find_wrongly_shared(answers)) == {name_factors(f"{QKV[:-8]}q_proj")[1]}


@pytest.mark.parametrize(
    ("module", "stacks", "place"),
    [(QKV, "lora_a_stacked", (2, 0, 7)), (QKV, "lora_b_stacked", (1, 3, 2)), (OUT, "lora_b_stacked", (0, 5, 0))],
)
def test_a_number_that_differs_is_found(module: str, stacks: str, place: tuple[int, int, int]) -> None:
    runner = filled()
    index, row, column = place
    getattr(runner.manager.modules[module], stacks)[index][0, 0, row, column] += 1e-6
    with pytest.raises(NotHeld, match="1 factors of adapters"):
        prove(runner)


def test_what_a_longer_adapter_left_is_found() -> None:
    runner = filled()
    runner.manager.modules[OUT].lora_b_stacked[0][0, 0, 2, RANK] = 1
    with pytest.raises(NotHeld, match="other adapters too"):
        prove(runner)


def test_adapters_of_a_rank_above_their_outputs_are_proved() -> None:
    names = name_factors(OUT)
    wide = {name: torch.randn(shape) for name, shape in zip(names, ((MOST, 8), (6, MOST)), strict=True)}
    runner = filled()
    one, qkv = runner.manager.modules[OUT], runner.manager.modules[QKV]
    for empty in (*qkv.lora_a_stacked, *qkv.lora_b_stacked):
        empty.zero_()
    one.lora_a_stacked, one.lora_b_stacked = (stack(wide[names[0]], torch.float32),), (wide[names[1]][None, None],)
    slot = AdapterSlot(runner)
    slot.number = 5
    digests = {name: digest(factor).tolist() for name, factor in wide.items()}
    assert slot.prove(list_specs(wide), digests).proved == wide.keys()


@pytest.mark.parametrize("factor", [0, 1])
def test_adapters_of_a_rank_above_the_slots_are_refused(factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, member in (("lora_model", "LoRAModel"), ("peft_helper", "PEFTHelper")):
        monkeypatch.setitem(sys.modules, f"vllm.lora.{name}", SimpleNamespace(**{member: None}))
    tensor = torch.zeros(((MOST + 1, 8), (6, MOST + 1))[factor])
    with pytest.raises(Refusal, match=f"the adapters have rank {MOST + 1}, and the engine takes {MOST}"):
        AdapterSlot(filled()).put(1, {name_factors(OUT)[factor]: tensor})


def test_a_narrower_slot_compares_nothing() -> None:
    proof = prove(filled(dtype=torch.bfloat16))
    assert (proof.num_compared, set(proof.uncompared)) == (0, FACTORS.keys())


def test_a_number_that_only_a_wider_slot_tells_apart_is_found() -> None:
    given = {name: factor.bfloat16() for name, factor in FACTORS.items()}
    digests = {name: digest(factor).tolist() for name, factor in given.items()}
    runner = filled()
    for one in runner.manager.modules.values():
        for stacked in (*one.lora_a_stacked, *one.lora_b_stacked):
            stacked.copy_(stacked.bfloat16())
    slot = AdapterSlot(runner)
    slot.number = 5
    assert slot.prove(list_specs(given), digests).num_compared == 8
    runner.manager.modules[OUT].lora_b_stacked[0][0, 0, 1, 1] *= 1 + 1e-6
    with pytest.raises(NotHeld, match="1 factors"):
        slot.prove(list_specs(given), digests)


@pytest.mark.parametrize("kind", ["MergedColumnParallelLinearVariableSliceWithLoRA", "FusedMoEWithLoRA"])
def test_a_layer_that_cannot_be_read_back_is_refused_by_its_module(kind: str) -> None:
    runner = filled()
    old = runner.manager.modules[OUT]
    runner.manager.modules[OUT] = layer(kind, 0, 1, **{k: v for k, v in vars(old).items() if k[:2] != "tp"})
    with pytest.raises(Refusal, match=f"adapters of {OUT} here"):
        prove(runner)


def test_an_engine_without_slots_is_refused() -> None:
    with pytest.raises(Refusal, match="start it with --rollout-lora-rank"):
        AdapterSlot(SimpleNamespace())


def test_a_step_with_other_adapters_is_ended() -> None:
    runner = filled()
    slot = AdapterSlot(runner)
    # vLLM's warm-up names adapters of its own.
    for tokens in ((0, 0), (1, 1)):
        runner._set_active_loras(tokens[:1], tokens, set())
    slot.number = 5
    runner._set_active_loras((5,), (5, 5, 5), set())
    for tokens in ((5, 0), (4, 4)):
        with pytest.raises(OtherAdapters, match="the worker holds 5"):
            runner._set_active_loras(tokens[:1], tokens, set())
    assert runner.activated == [(0, 0), (1, 1), (5, 5, 5)]


class HalfModel(HeldModel):
    """A stand-in for a model that holds half of the embedding."""

    num_loads, is_damaged = 0, False

    def map_files(self, folder: Path) -> Any:
        return map_file_tensors(folder)

    def replace_weights(self, tensors: Any, is_in_place: bool) -> Any:
        self.forget_base()
        self.num_loads += 1
        self.half = dict(tensors)[EMBEDDING].chunk(2)[self._worker.rank].clone()
        self.half[0, 0] += self.is_damaged

    def compare(self, record: Any, digests: Any) -> LoadProof:
        rows, columns = self.half.shape
        part = Rectangle(self._worker.rank * rows, 0, rows, columns)
        share = [(part, tuple(digest(self.half, part.first_row).tolist()))]
        return LoadProof(1, 1, (), {EMBEDDING: share}, (), frozenset())


class HalfWorker(WorkerExtension):
    """One of two workers."""

    megatron_rl_model = HalfModel

    def __init__(self, rank: int, model: Path) -> None:
        self.rank = rank
        self.model_runner = filled(rank, 2)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(model=str(model)), parallel_config=SimpleNamespace(world_size=2)
        )


EMBEDDING = "model.embed_tokens.weight"


def test_each_answer_has_what_all_workers_together_prove_of_the_base_and_a_wrong_base_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdapterSlot, "put", lambda slot, number, tensors: setattr(slot, "number", number))
    model, folder = draw("qwen3", tmp_path / "model", vocab_size=130), tmp_path / "version"
    folder.mkdir(mode=0o700)
    save_file(FACTORS, folder / "adapters.safetensors")
    write_digests(folder, DIGESTS)
    for path in folder.iterdir():
        path.chmod(0o600)
    with Checkpoint(model) as checkpoint:
        specs = WeightMapping(read_architecture(model)).manifest("float32")
        base = compute_fingerprint(specs, {one.name: digest(checkpoint.tensor(one.name)).tolist() for one in specs})
    expected, places = compute_fingerprint(SPECS, DIGESTS, base), encode_places([(str(folder), os.getuid())])
    workers = [HalfWorker(rank, model) for rank in range(2)]
    workers[1].megatron_rl_held.is_damaged = True

    def load() -> list[Any]:
        return [one.megatron_rl_load(places, expected, base, "5") for one in workers]

    with writing(folder, len(FACTORS), 1):
        pass
    assert [answer["code"] for answer in load()] == ["not written"] * 2
    (folder / COUNTS_FILE).unlink()
    for _ in range(2):
        assert set(find_wrongly_shared(load())) == {EMBEDDING}
    assert [one.megatron_rl_held.num_loads for one in workers] == [1, 1]
    workers[1].megatron_rl_held.is_damaged = False
    assert [one.megatron_rl_check_files(places, EMBEDDING) for one in workers] == [{}, {}]
    for _ in range(2):
        assert not set(find_wrongly_shared(load()))
    assert [one.megatron_rl_held.num_loads for one in workers] == [2, 2]


def test_joined_proofs_keep_what_the_base_leaves_to_all_workers() -> None:
    base = LoadProof(3, 4, ("x",), {"w": []}, ("u",), frozenset("p"))
    joined = join_proofs(base, LoadProof(2, 2, (), {"a": []}, (), frozenset("q")))
    assert joined == LoadProof(5, 6, ("x",), {"w": [], "a": []}, ("u",), frozenset("pq"))

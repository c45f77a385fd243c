"""The patches of vLLM, with stand-ins for its classes: what they change, and the vLLM that they leave alone."""

import importlib.util
import mmap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.errors import PlatformError
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.shared.weights.mapping import Mapping
from megatron_rl.sidecar.vllm.patches import (
    NOT_APPLIED,
    describe_draft_model,
    expand_values,
    find_wrong_rotations,
    join_projections,
    patch_expansion,
    patch_method,
    patch_runner,
    patch_stacked_experts,
    patch_wrapper,
    take_names_off,
)
from megatron_rl.sidecar.vllm.received import read_started_from
from tests import hf_models

TOKENS, INPUTS, WIDTHS, RANK, SLOTS, SCALE = 5, 24, (16, 8, 8), 4, 3, 0.5


class Wrapper:
    """vLLM's class for the products of adapters; it counts the products that are left to it."""

    num_left = 0

    def update_metadata(
        self, mapping: Any, lora_index_to_id: Any, max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        self.token_lora_indices = torch.tensor(mapping, dtype=torch.long)

    def add_lora_linear(
        self, y: Any, x: Any, lora_a_stacked: Any, lora_b_stacked: Any, scale: float, output_slices: Any, *,
        buffer: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        self.num_left += 1


class Experts:
    """vLLM's method for experts, with the parts that the patch reads."""

    def __init__(self) -> None:
        self.moe_kernel = None
        self.packed = []

    def process_weights_after_loading(self, layer):
        self._setup_kernel(layer)

    def _setup_kernel(self, layer):
        is_weight_update = self.moe_kernel is not None
        if not is_weight_update:
            self.moe_kernel = SimpleNamespace(
                fused_experts=SimpleNamespace(process_weights_after_loading=self.packed.append)
            )
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)


class MendedExperts(Experts):
    """A method that packs updates itself."""

    def _setup_kernel(self, layer):
        self.packed.append(layer)


class Runner:
    """vLLM's runner of models, which takes a generator's offset back."""

    def _sample(self, logits, spec_decode_metadata): ...

    def _bookkeeping_sync(
        self, scheduler_output, sampler_output, logits, hidden_states, num_scheduled_tokens
    ):  # fmt: skip
        return "set_offset"


class OtherRunner(Runner):
    def _sample(self, logits, something_new): ...


class MendedRunner(OtherRunner):
    def _bookkeeping_sync(self): ...


class Inner(torch.nn.Module):
    """The parts of vLLM's GPT-OSS that the patch reads."""

    def _load_weights_other(self) -> None: ...

    def _try_load_streamed_expert(self) -> None: ...


class OlderInner(torch.nn.Module):
    def _load_weights_other(self) -> None: ...


class Stacked(torch.nn.Module):
    def __init__(self, inner: type[torch.nn.Module] = Inner) -> None:
        super().__init__()
        self.model = inner()
        self.model.attn = torch.nn.Module()
        self.model.attn.sinks = torch.nn.Parameter(torch.zeros(2, device="meta"))
        self.given: dict[str, torch.Tensor] = {}

    def load_weights(self, weights):
        self.given |= dict(weights)
        return set(self.given)


def copy(kind: type) -> type:
    """Derive a class, for a patch to change."""
    return type(kind.__name__, (kind,), {})


def patch_second_rank(model: Any) -> str:
    return patch_stacked_experts(model, 1)


@pytest.mark.parametrize(
    ("patch", "target"),
    [
        (patch_wrapper, copy(Wrapper)),
        (patch_method, copy(Experts)),
        (patch_runner, copy(Runner)),
        (patch_second_rank, copy(Stacked)()),
    ],
)
def test_a_patch_is_applied_once(patch: Callable[[Any], str], target: Any) -> None:
    assert [patch(target), patch(target)] == ["applied", "applied before"]


def broken(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Return memory that was not written, as vLLM does on a CPU; it may hold what was there before."""
    return torch.tensor([0.5, 0.5, 1.0, 1.0, 1.0, 1.0])


def expand_otherwise(x: torch.Tensor, something_new: int) -> torch.Tensor: ...


@pytest.mark.parametrize(
    ("patch", "target", "report"),
    [
        (patch_wrapper, SimpleNamespace(add_lora_linear=broken, update_metadata=broken), NOT_APPLIED),
        (patch_method, MendedExperts, NOT_APPLIED),
        (patch_runner, MendedRunner, "not needed"),
        (patch_runner, OtherRunner, PlatformError("something_new")),
        (patch_expansion, SimpleNamespace(expand_batch_to_tokens=expand_values), "not needed"),
        (patch_expansion, SimpleNamespace(expand_batch_to_tokens=expand_otherwise), PlatformError("something_new")),
        (patch_second_rank, torch.nn.Linear(1, 1), "not needed"),
        (patch_second_rank, copy(Stacked)(OlderInner), NOT_APPLIED),
    ],
)
def test_a_vllm_of_another_form_is_left_as_it_is(
    patch: Callable[[Any], str], target: Any, report: str | Exception
) -> None:
    owner = type(target) if isinstance(target, torch.nn.Module) else target
    before = dict(vars(owner))
    if isinstance(report, str):
        assert patch(target).startswith(report)
    else:
        with pytest.raises(PlatformError, match=str(report)):
            patch(target)
    assert dict(vars(owner)) == before


def test_the_method_of_the_vllm_that_is_installed_is_known():
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    assert patch_method(copy(UnquantizedFusedMoEMethod)) == "applied"


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_the_only_slot_are_those_of_the_definition(dtype: torch.dtype) -> None:
    kind = copy(Wrapper)
    patch_wrapper(kind)
    wrapper = kind()
    x, y = draw(TOKENS, INPUTS).to(dtype), draw(TOKENS, sum(WIDTHS)).to(dtype)
    a_stacks = [draw(SLOTS, 1, RANK, INPUTS).to(dtype) + number for number in range(len(WIDTHS))]
    b_stacks = [draw(SLOTS, 1, width, RANK).to(dtype) for width in WIDTHS]
    expected, first = y.double(), 0
    for a, b, width in zip(a_stacks, b_stacks, WIDTHS, strict=True):
        for token in range(TOKENS):
            inner = a[1, 0].double() @ x[token].double()
            expected[token, first : first + width] += SCALE * (b[1, 0].double() @ inner)
        first += width
    wrapper.update_metadata([1] * TOKENS, [], SLOTS, 9)
    wrapper.add_lora_linear(y, x, a_stacks, b_stacks, SCALE, WIDTHS)
    assert wrapper.num_left == 0
    # Two roundings of the largest number: that of the inner product, and that of the sum.
    assert (y.double() - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("slots", [[1, 1, 0], [-1, -1, -1], [1, -1, 1], []], ids=str)
def test_tokens_with_several_slots_or_none_are_left_to_vllm(slots: list[int]) -> None:
    kind = copy(Wrapper)
    patch_wrapper(kind)
    wrapper, y = kind(), torch.zeros(3, 2)
    wrapper.update_metadata([1, 1, 1], [], SLOTS, 9)
    wrapper.update_metadata(slots, [], SLOTS, 9)
    wrapper.add_lora_linear(y, torch.ones(3, 4), [torch.ones(2, 1, 1, 4)], [torch.ones(2, 1, 2, 1)], 1.0, (2,))
    assert wrapper.num_left == 1
    assert not y.any()


def test_weights_of_experts_are_packed_once_each_time_they_are_loaded():
    kind = copy(Experts)
    patch_method(kind)
    experts = kind()
    for load in range(3):
        experts.process_weights_after_loading(load)
    assert experts.packed == [0, 1, 2]


def test_sinks_are_loaded_by_their_loader_and_each_rank_takes_its_heads() -> None:
    model = copy(Stacked)()
    patch_second_rank(model)
    loads: list[torch.Tensor] = []
    model.model.attn.sinks.weight_loader = lambda parameter, given: loads.append(given)
    names = model.load_weights([("model.self_attn.sinks", torch.arange(4.0)), ("norm", torch.ones(1))])
    assert names == {"model.attn.sinks", "norm"}
    assert [one.tolist() for one in loads] == [[2.0, 3.0]]
    assert list(model.given) == ["norm"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.draw("gpt_oss", tmp_path_factory.mktemp("model"))


def test_the_checkpoint_of_an_engine_has_the_tensors_that_are_published(folder: Path) -> None:
    published = {spec.name: spec.shape for spec in Mapping(read_architecture(folder)).manifest()}
    assert {name: tuple(tensor.shape) for name, tensor in read_started_from(folder).items()} == published


@pytest.mark.parametrize("num_calls", [1, 7])
def test_an_expert_comes_as_the_files_store_it_however_the_weights_are_divided(folder: Path, num_calls: int) -> None:
    stored = load_file(folder / "model.safetensors")
    # An order in which the parts of an expert are far apart.
    given = sorted(read_started_from(folder).items(), key=lambda one: one[0][::-1])
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    found: dict[str, torch.Tensor] = {}
    for call in range(num_calls):
        # A stream's memory, which is used again after each call.
        weights = [(name, tensor.clone()) for name, tensor in given[call::num_calls]]
        found |= {name: tensor.clone() for name, tensor in join_projections(iter(weights), waiting)}
        for _, tensor in weights:
            tensor.fill_(torch.nan)
    assert not waiting
    experts = {"gate_up_proj": "w13_weight", "gate_up_proj_bias": "w13_bias"}
    experts |= {"down_proj": "w2_weight", "down_proj_bias": "w2_bias"}
    for name, tensor in stored.items():
        block, _, stem = name.rpartition(".")
        if stem in experts:
            for expert, own in enumerate(tensor):
                assert torch.equal(found.pop(f"{block}.{expert}.{experts[stem]}"), own), name
        else:
            assert torch.equal(found.pop(name), tensor), name
    assert not found


def test_the_gpt_oss_of_the_vllm_that_is_installed_is_known() -> None:
    # Importing it takes as long as all tests here.
    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    text = (Path(package.origin).parent / "model_executor" / "models" / "gpt_oss.py").read_text()
    for part in ("def _load_weights_other(", "def _try_load_streamed_expert(", '"w13_bias": "gpt_oss_w13"'):
        assert part in text
    _, model = text.split("class GptOssForCausalLM(")
    assert "    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:" in model


def test_each_drafted_token_gets_the_temperature_of_its_request():
    ends = torch.tensor([2, 2, 3, 7], dtype=torch.int32)
    found = expand_values(torch.tensor([0.5, 9.0, 0.0, 1.5]), ends, 7, replace_from=0, replace_to=1)
    assert found.tolist() == [0.5, 0.5, 1.0, 1.5, 1.5, 1.5, 1.5]
    assert found.dtype == torch.float32


def test_a_sampler_that_gives_tokens_other_temperatures_is_patched():
    sampler = SimpleNamespace(expand_batch_to_tokens=broken)
    assert patch_expansion(sampler) == "applied"
    assert sampler.expand_batch_to_tokens is expand_values


def test_the_parameters_that_a_draft_shares_with_the_policy_are_named():
    policy, draft = torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    draft[1].weight = policy.weight
    runner = SimpleNamespace(get_model=lambda: policy, get_draft_model=lambda: draft)
    assert describe_draft_model(runner) == {"num_parameters": 4, "shared": ["1.weight"]}
    for without in (SimpleNamespace(), SimpleNamespace(get_draft_model=lambda: None)):
        assert describe_draft_model(without) is None


def test_memory_that_is_mapped_here_keeps_its_content_and_loses_its_name(tmp_path: Path) -> None:
    names = ("vllm_dist_mine", "psm_other", "vllm_dist_of_others")
    for name in names:
        (tmp_path / name).write_bytes(b"x" * mmap.PAGESIZE)
    opened = [(tmp_path / name).open("r+b") for name in names[:2]]
    mapped = [mmap.mmap(file.fileno(), mmap.PAGESIZE) for file in opened]
    assert take_names_off(folder=tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"psm_other", "vllm_dist_of_others"}
    assert mapped[0][0] == ord("x")
    # Another worker of the same engine comes second.
    assert take_names_off(folder=tmp_path) == 0
    for thing in (*mapped, *opened):
        thing.close()


WIDTH, PLAIN, NARROW = 8, 4, 6
FAULTS = ("position of another token", "query left as it was", "key left as it was", "each head for a token")


class Rotary(torch.nn.Module):
    """A rope as vLLM's, whose operation has a fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def forward_native(
        self, positions: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._turn(positions, queries), self._turn(positions, keys)

    def forward(
        self, positions: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fault == "position of another token":
            positions = positions.flip(0)
        rotated_queries, rotated_keys = self.forward_native(positions, queries, keys)
        if self.fault == "each head for a token":
            of_heads = torch.arange(1, 1 + queries.shape[0] * queries.shape[1])
            rotated_queries = self._turn(of_heads, queries.flatten(0, 1).unsqueeze(1)).view(queries.shape)
        return (
            queries if self.fault == "query left as it was" else rotated_queries,
            keys if self.fault == "key left as it was" else rotated_keys,
        )

    def _turn(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        angle = positions[:, None, None] / 10 ** torch.arange(WIDTH // 2)
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.exp(1j * angle)).flatten(-2).to(x.dtype)


def make_model(*faults: str) -> torch.nn.Module:
    model = torch.nn.Module()
    for number, fault in enumerate(faults):
        layer = torch.nn.Linear(2, 2)
        layer.rotary_emb, layer.mla_attn = Rotary(fault), torch.nn.Module()
        layer.kv_a_layernorm = torch.nn.LayerNorm(2)
        layer.qk_rope_head_dim, layer.qk_nope_head_dim, layer.kv_lora_rank = WIDTH, PLAIN, NARROW
        model.add_module(f"layer_{number}", layer)
    return model


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_rotation_is_found(fault: str) -> None:
    assert find_wrong_rotations(make_model("", fault)) == ["layer_1"]


@pytest.mark.parametrize("model", [make_model("", ""), make_model("").bfloat16(), torch.nn.Linear(2, 2)])
def test_a_right_rotation_is_not_found_wrong(model: torch.nn.Module) -> None:
    assert find_wrong_rotations(model) == []

"""The doctor of differences on the trainer's model: planted causes are named, and a healthy model is named healthy."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl.command_line.describe import describe_run
from megatron_rl.command_line.parse import parse_run
from megatron_rl.drift.definition import Definition
from megatron_rl.drift.diagnosis import Diagnosis, Examiner, Recorded
from megatron_rl.drift.trained_model import TrainedModelWatch
from megatron_rl.drift.trainer import compute
from megatron_rl.errors import InputError
from megatron_rl.observe.run_folder import SavedConfig, Value
from megatron_rl.ops.elementwise import plain
from megatron_rl.shared.records.model_parts import ModelPart, Recording, join_ranks
from megatron_rl.trainer.data.packing import pack_groups
from megatron_rl.trainer.mcore.model import fusions, self_attention
from megatron_rl.trainer.mcore.model.gpt import PackedGPTModel, unwrap
from megatron_rl.trainer.mcore.step.forward_step import compute_log_probs
from tests import hf_models
from tests.command_lines import RUN
from tests.distributed.layouts import CASES, build, start_session
from tests.distributed.test_transformer_engine import fusions_of_cuda
from tests.nursery import WITH_TRANSFORMER_ENGINE
from tests.ranks import run_ranks

pytestmark = pytest.mark.each_change

LENGTHS, NUM_SAMPLED, TEMPERATURE = (23, 9), 6, 0.8
ELSE = "it computes something else than the definition"


@dataclasses.dataclass(frozen=True)
class Planted:
    """A change of the trainer's model, and the parts and reasons that must be found for it."""

    change: Callable[[PackedGPTModel], Any] = lambda model: None
    found: tuple[tuple[str, str], ...] = ()
    family: str = "qwen3"
    dtype: torch.dtype = torch.float32
    temperature: float = TEMPERATURE
    backend: str = "torch"
    """The backend of heads, and of the work between products."""


def scale_scores(model: PackedGPTModel) -> None:
    model.decoder.layers[1].self_attention.core_attention.scale *= 1.01


def turn_faster(model: PackedGPTModel) -> None:
    model._rope_frequencies_F = model._rope_frequencies_F * 1.001


def change_epsilon(model: PackedGPTModel) -> None:
    model.decoder.layers[0].pre_mlp_layernorm.eps = 1e-4


def change_epsilon_of_heads(model: PackedGPTModel) -> None:
    attention = model.decoder.layers[0].self_attention
    attention.q_layernorm.eps = attention.k_layernorm.eps = 1e-4


def round_products(model: PackedGPTModel) -> None:
    model.decoder.layers[0].mlp.linear_fc1.register_forward_hook(
        lambda _, given, out: (out[0].bfloat16().float(), out[1])
    )


def scale_router(model: PackedGPTModel) -> None:
    model.decoder.layers[1].mlp.router.register_forward_hook(lambda _, given, out: (out[0] * 1.001, out[1]))


@contextlib.contextmanager
def summed_in_bfloat16() -> Iterator[None]:
    """Have tensor-parallel ranks add up their products in bfloat16."""
    add = torch.distributed.all_reduce

    def add_rounded(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dim() < 3:
            return add(tensor, *args, **kwargs)
        rounded = tensor.bfloat16()
        add(rounded, *args, **kwargs)
        return tensor.copy_(rounded)

    with mock.patch("torch.distributed.all_reduce", add_rounded):
        yield


PLANTED = {
    "healthy": Planted(),
    "healthy in bfloat16": Planted(dtype=torch.bfloat16),
    "healthy with experts": Planted(family="qwen3_moe"),
    "healthy without norms of heads": Planted(family="llama"),
    "healthy with kernels": Planted(backend="triton"),
    "a norm with kernels": Planted(
        change_epsilon_of_heads, ((ModelPart.NORMED_ROTATION, ELSE),), backend="triton"
    ),
    "scale of attention": Planted(scale_scores, ((ModelPart.ATTENTION, ELSE),)),
    "rotation": Planted(turn_faster, ((ModelPart.ROTATION, ELSE),)),
    "norm": Planted(change_epsilon, ((ModelPart.MLP_NORM, ELSE),)),
    "precision of a product": Planted(round_products, ((ModelPart.GATE_UP, "it computes in bfloat16"),)),
    "experts": Planted(scale_router, ((ModelPart.EXPERTS, ELSE),), family="qwen3_moe"),
    "temperature": Planted(
        temperature=1.0, found=((ModelPart.LOG_PROBS, "its log-probs are those of temperature 1, and not 0.8"),)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: hf_models.draw(family, root / family) for family in ("qwen3", "qwen3_moe", "llama")}


Found = list[tuple[list[int], list[float], Path]]


def record_model(session: Any, layout: str, folder: Path, planted: Planted, to: Path, fusions: Any = None) -> Found:
    """Compute the sequences with a model of the trainer's; return them with log-probs and recordings."""
    case = dataclasses.replace(CASES[layout], elementwise_backend=planted.backend)
    model = build(
        session, case, folder, qkv_backend=planted.backend, fusions=fusions, params_dtype=planted.dtype,
        bf16=planted.dtype == torch.bfloat16,
    )  # fmt: skip
    chunk = unwrap(model.wrapped[0]).eval()
    planted.change(chunk)
    watch = TrainedModelWatch(chunk)
    found = []
    for number, tokens in enumerate(hf_models.sequences(list(LENGTHS))):
        pack = pack_groups([(tokens[:-NUM_SAMPLED], [tokens[-NUM_SAMPLED:]])], multiple_of=4)
        (log_probs,) = compute_log_probs(model.wrapped, [pack], planted.temperature)
        path = to.with_name(f"{to.name}-{number}-{session.rank}")
        watch.take(len(tokens)).save(path)
        found.append((tokens, log_probs.tolist(), path))
    return found


@contextlib.contextmanager
def stand_ins_for_kernels() -> Iterator[None]:
    """Compute in torch what Triton's kernels would."""
    of_heads = mock.patch.object(self_attention.FusedSelfAttention, "backend", "torch")
    with of_heads, mock.patch.object(fusions, "_find_kernels", return_value=plain):
        yield


def record_all(folders: dict[str, Path], to: Path) -> dict[str, Found]:
    with start_session(CASES["TP1"]) as session, stand_ins_for_kernels():
        return {
            name: record_model(session, "TP1", folders[planted.family], planted, to / str(number))
            for number, (name, planted) in enumerate(PLANTED.items())
        }


def record_with_transformer_engine(folder: Path, to: Path) -> Found:
    with start_session(CASES["TP1"]) as session, stand_ins_for_kernels():
        planted = Planted(backend="triton")
        return record_model(session, "TP1", folder, planted, to / "engine", fusions=fusions_of_cuda())


def record_two_ranks(folder: Path, to: Path) -> dict[str, Found]:
    with start_session(CASES["TP2"]) as session:
        healthy = record_model(session, "TP2", folder, Planted(), to / "healthy")
        with summed_in_bfloat16():
            return {"healthy": healthy, "sum": record_model(session, "TP2", folder, Planted(), to / "sum")}


def diagnose(folder: Path, ranks: list[Found], dtype: torch.dtype = torch.float32) -> Diagnosis:
    recorded = [
        Recorded(tokens, log_probs, TEMPERATURE, join_ranks([Recording.load(found[number][2]) for found in ranks]))
        for number, (tokens, log_probs, _) in enumerate(ranks[0])
    ]
    definitions = Definition(folder, torch.float64, weights_dtype=dtype), Definition(folder, dtype)
    return Examiner(*definitions, len(ranks)).diagnose(recorded)


@pytest.fixture(scope="module")
def one_rank(folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    (found,) = run_ranks(record_all, 1, folders, tmp_path_factory.mktemp("recordings"))
    return found


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_named_and_nothing_else_is(folders, one_rank, name: str) -> None:
    planted = PLANTED[name]
    found = diagnose(folders[planted.family], [one_rank[name]], planted.dtype)
    assert {(cause.name, cause.reason) for cause in found.causes} == set(planted.found)
    total = sum(finding.effect for finding in found.findings)
    assert 0 < found.difference <= 1.05 * total
    if planted.found:
        # It is also what log-probs differ by.
        assert found.causes[0] is found.findings[0]


def test_norms_within_products_are_compared_with_both(folders, tmp_path: Path) -> None:
    ranks = run_ranks(record_with_transformer_engine, 1, folders["qwen3"], tmp_path, platform=WITH_TRANSFORMER_ENGINE)
    found = diagnose(folders["qwen3"], ranks)
    assert not found.causes
    assert {ModelPart.NORMED_QKV, ModelPart.NORMED_GATE_UP} <= {finding.name for finding in found.findings}
    assert 0 < found.difference <= 1.05 * sum(finding.effect for finding in found.findings)


def test_a_run_is_computed_again_by_tensor_parallel_ranks_alone(folders, tmp_path: Path) -> None:
    words = [
        *RUN, "--platform", "cpu", "--hf-model", str(folders["qwen3"]), "--rollout-folder", str(tmp_path / "run"),
        *["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--sequence-parallel"],
    ]  # fmt: skip
    config = describe_run(parse_run(words, world_size=4))
    sampled = [
        Recorded(tokens, [0.0] * NUM_SAMPLED, TEMPERATURE, Recording({}))
        for tokens in hf_models.sequences(list(LENGTHS))
    ]
    computed = compute(config, folders["qwen3"], sampled)
    assert (computed.num_ranks, computed.dtype) == (2, torch.float32)
    definitions = (Definition(folders["qwen3"], dtype) for dtype in (torch.float64, torch.float32))
    found = Examiner(*definitions, 2).diagnose(computed.responses)
    assert not found.causes
    assert 0 < found.difference < 1e-5


def test_a_trainer_that_cannot_be_computed_says_why(folders) -> None:
    size, dtype = Value("1", "default"), Value("torch.float32", "default")
    sections = {"transformer": {"tensor_model_parallel_size": size, "params_dtype": dtype}}
    config = SavedConfig(words=["--platform", "cpu", "--no-such-flag"], sections=sections)
    with pytest.raises(InputError, match=r"the trainer's model could not be computed: .*--no-such-flag"):
        compute(config, folders["qwen3"], [])


def test_a_sum_over_ranks_in_bfloat16_is_named(folders, tmp_path: Path) -> None:
    ranks = run_ranks(record_two_ranks, 2, folders["qwen3"], tmp_path)
    assert not diagnose(folders["qwen3"], [found["healthy"] for found in ranks]).causes
    causes = diagnose(folders["qwen3"], [found["sum"] for found in ranks]).causes
    assert {cause.reason for cause in causes} == {"it computes in bfloat16, or the sum over 2 ranks does"}
    assert {ModelPart.ATTENTION_OUTPUT, ModelPart.DOWN} <= {cause.name for cause in causes}

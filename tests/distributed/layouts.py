"""The layouts that results are compared over, and a model set up in one of them on the ranks of a test."""

import contextlib
import dataclasses
import datetime
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.utils import get_model_config

from megatron_rl import platforms
from megatron_rl.command_line.resolve import build_transformer_config
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.shared.weights.shards import map_shards
from megatron_rl.trainer.data.packing import Pack
from megatron_rl.trainer.mcore.model import gpt
from megatron_rl.trainer.mcore.model.weights import ModelWeights
from megatron_rl.trainer.mcore.session import ParallelSizes, Session
from megatron_rl.trainer.mcore.step import auxiliary
from megatron_rl.trainer.mcore.step.forward_step import ForwardStep, Report, compute_log_probs, loss_scale, run_schedule
from megatron_rl.types import Architecture
from tests import hf_models
from tests.nursery import platform_name


@dataclasses.dataclass(frozen=True)
class Case:
    """One way of dividing a model over ranks."""

    name: str
    world_size: int
    sizes: ParallelSizes = ParallelSizes()
    config: tuple[tuple[str, Any], ...] = ()
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    fuses_accumulation: bool = False
    """True if weight gradients are added to main gradients in their products, which the CPU's platform switches off."""
    elementwise_backend: str = "torch"
    overlap_param_gather: bool = False


_SP = (("sequence_parallel", True),)
CASES = {
    case.name: case
    for case in (
        Case("TP1", 1),
        Case("TP2", 2, ParallelSizes(tensor=2)),
        Case("TP2+SP", 2, ParallelSizes(tensor=2), _SP),
        Case("PP2", 2, ParallelSizes(pipeline=2)),
        Case("PP2xVPP2", 2, ParallelSizes(pipeline=2, virtual_pipeline=2)),
        Case("DP2+distopt", 2, distributed_optimizer=True),
        Case("CP2", 2, ParallelSizes(context=2)),
        Case("TP2xPP2", 4, ParallelSizes(tensor=2, pipeline=2)),
        Case("CP4", 4, ParallelSizes(context=4)),
        Case("TP2xCP2", 4, ParallelSizes(tensor=2, context=2)),
        Case("CP2xPP2", 4, ParallelSizes(pipeline=2, context=2)),
        Case("TP2+SPxCP2", 4, ParallelSizes(tensor=2, context=2), _SP),
        Case("EP2", 2, ParallelSizes(expert=2)),
        Case("EP2xCP2", 2, ParallelSizes(context=2, expert=2)),
        Case("EP2xPP2", 4, ParallelSizes(pipeline=2, expert=2)),
        Case("TP2+SP,EP2,ETP1", 2, ParallelSizes(tensor=2, expert=2, expert_tensor=1), _SP),
    )
}
DENSE_LAYOUTS = (
    "TP1", "TP2", "TP2+SP", "PP2", "PP2xVPP2", "DP2+distopt", "TP2xPP2", "CP2", "CP4", "CP2xPP2", "TP2+SPxCP2",
)  # fmt: skip
EXPERT_LAYOUTS = ("TP1", "EP2", "EP2xCP2", "PP2", "DP2+distopt", "EP2xPP2", "TP2+SP,EP2,ETP1")
# Virtual stages must find the layers that have experts, are linear, or have a window.
LAYOUTS_WITH_SEVERAL_KINDS = (*EXPERT_LAYOUTS, "PP2xVPP2")


def list_layouts(model: str) -> tuple[str, ...]:
    """List the layouts that a model of `hf_models` is compared in."""
    if model == "gpt_oss":
        # Ranks that divide sinks, experts that have the gradients of tensor-parallel ranks, and stages with windows.
        return ("TP1", "EP2xCP2", "TP2+SP,EP2,ETP1", "PP2xVPP2", "EP2xPP2")
    if model in (
        "glm4_moe", "qwen3_next", "qwen3_5_moe", "deepseek_v3", "deepseek_v3_direct", "glm4_moe_lite", "deepseek_v2",
    ):  # fmt: skip
        return LAYOUTS_WITH_SEVERAL_KINDS
    return EXPERT_LAYOUTS if model in hf_models.WITH_EXPERTS else DENSE_LAYOUTS


def divisor(sizes: ParallelSizes) -> int:
    """Return the number that the rows of a pack must be a multiple of, with sequence parallelism or without."""
    return sizes.tensor * sizes.context


Loss = Callable[[torch.Tensor, Pack], torch.Tensor]
"""The sum of a pack's losses, computed from its targets' log-probs."""


class LossStep(ForwardStep):
    """A step with a loss of log-probs, in which the auxiliary losses of routers count once for each pack."""

    def __init__(self, loss: Loss, temperature: float, scale: float):
        super().__init__(temperature)
        self._loss = loss
        self._scale = scale

    def forward_step(self, data_iterator: Iterator[Pack], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        pack = next(data_iterator)
        output_tensor = model(pack, self._temperature)
        auxiliary.weigh_losses(output_tensor, 1.0, get_model_config(model))
        return output_tensor, functools.partial(self.loss_func, pack)

    def loss_func(self, pack: Pack, output_tensor: torch.Tensor) -> tuple[torch.Tensor, Report]:  # type: ignore[override]
        return self._loss(output_tensor, pack) * self._scale, {"log_probs": output_tensor.detach()}


def forward_backward(
    wrapped: Sequence[torch.nn.Module], packs: Sequence[Pack], loss: Loss, temperature: float = 1.0
) -> list[torch.Tensor]:
    """Leave the gradient of the sum of losses in every `main_grad`; log-probs on the last pipeline stage."""
    reports = run_schedule(LossStep(loss, temperature, loss_scale(len(packs))), wrapped, packs)
    return [report["log_probs"] for report in reports]


@dataclasses.dataclass
class Model:
    """One rank's part of a model in a session."""

    session: Session
    architecture: Architecture
    chunks: list[gpt.PackedGPTModel]
    weights: ModelWeights
    wrapped: list[DistributedDataParallel]

    def mine(self, packs: Sequence[Pack]) -> list[Pack]:
        """Return the packs of this rank's replica."""
        size = parallel_state.get_data_parallel_world_size()
        return list(packs)[parallel_state.get_data_parallel_rank() :: size]

    def forward(self, packs: Sequence[Pack], temperature: float = 1.0) -> list[torch.Tensor]:
        """Gather the log-probs of all packs in their order, on every rank."""
        return self._everywhere(compute_log_probs(self.wrapped, self.mine(packs), temperature))

    def forward_backward(self, packs: Sequence[Pack], loss: Loss, temperature: float = 1.0) -> list[torch.Tensor]:
        """Compute the same, and leave gradients in `main_grad`."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        results = forward_backward(self.wrapped, self.mine(packs), loss, temperature)
        for chunk in self.wrapped:
            gather_reduced_shards(chunk)
        return self._everywhere(results)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return gradients under the names and in the shapes of the checkpoint; on rank 0, elsewhere nothing."""
        trained = [item for item in gpt.named_shards(self.chunks) if item[1].requires_grad]
        return self.whole({name: parameter.main_grad for name, parameter in trained})

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return weights likewise."""
        return self.whole({name: parameter.detach() for name, parameter in gpt.named_shards(self.chunks)})

    def whole(self, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Combine the values that every rank has for its parameters in the same way."""
        session, mapping = self.session, self.weights.mapping
        shards = map_shards(mapping, session.coordinates, self.chunks[0].vocab_size, named.items())
        pieces = [
            (piece, shard.parameter.narrow(piece.dim, piece.target, piece.length).clone())
            for shard in shards
            if shard.map.owned
            for piece in shard.map.pieces
        ]
        everyone: list[Any] = [None] * session.world_size
        torch.distributed.all_gather_object(everyone, pieces, group=session.control_group)
        if session.rank != 0:
            return {}
        whole = {spec.name: torch.full(spec.shape, float("nan")) for spec in mapping.manifest()}
        given = [item for items in everyone for item in items]
        for piece, values in given:
            whole[piece.name].narrow(piece.dim, piece.source, piece.length).copy_(values)
        return {name: whole[name] for name in whole.keys() & {piece.name for piece, _ in given}}

    def _everywhere(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        everyone: list[Any] = [None] * self.session.world_size
        replica = parallel_state.get_data_parallel_rank()
        is_reporter = bool(results) and parallel_state.get_tensor_and_context_parallel_rank() == 0
        mine = (replica, results) if is_reporter else None
        torch.distributed.all_gather_object(everyone, mine, group=self.session.control_group)
        by_replica = dict(item for item in everyone if item is not None)
        num_packs = sum(len(results) for results in by_replica.values())
        return [by_replica[i % len(by_replica)][i // len(by_replica)] for i in range(num_packs)]


@contextlib.contextmanager
def start_session(case: Case, timeout_seconds: int = 600) -> Iterator[Session]:
    """Start Megatron's groups for one case.

    If several cases follow each other, torch.distributed must have been started before.
    """
    platform = platforms.select(platform_name())
    with Session(case.sizes, platform, seed=1, timeout=datetime.timedelta(seconds=timeout_seconds)) as session:
        yield session


def build(
    session: Session,
    case: Case,
    folder: Path,
    architecture: Architecture | None = None,
    attention_backend: str = "naive",
    qkv_backend: str = "torch",
    fusions: Any | None = None,
    **changes: Any,
) -> Model:
    """Build the model of a Hugging Face folder with its weights, wrapped for training.

    `fusions` are those of the session's platform, unless others are given.
    """
    architecture = architecture or read_architecture(folder)
    sizes = case.sizes
    overrides: dict[str, Any] = {
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "virtual_pipeline_model_parallel_size": sizes.virtual_pipeline,
        "context_parallel_size": sizes.context,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": sizes.expert_tensor,
        **dict(case.config),
        **changes,
    }
    config = build_transformer_config(architecture, overrides, fusions or session.platform)
    config.gradient_accumulation_fusion = case.fuses_accumulation
    chunks = gpt.build_chunks(
        config,
        architecture,
        attention_backend=attention_backend,
        elementwise_backend=case.elementwise_backend,
        qkv_backend=qkv_backend,
        device=session.device,
    )
    weights = ModelWeights(chunks, session)
    weights.load_hf(folder)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=case.distributed_optimizer,
        overlap_grad_reduce=case.overlap_grad_reduce or case.overlap_param_gather,
        overlap_param_gather=case.overlap_param_gather,
        # Several buckets even for a tiny model; megatron allows them for overlapped reductions only.
        bucket_size=5000 if case.overlap_grad_reduce else None,
    )
    return Model(session, architecture, chunks, weights, gpt.wrap(chunks, ddp))


def gather_reduced_shards(chunk: DistributedDataParallel) -> None:
    """Gather reduced gradients: with the distributed optimizer, a rank holds only its share of them."""
    if not chunk.ddp_config.use_distributed_optimizer:
        return
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        for bucket in buffer.buckets:
            own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            torch.distributed.all_gather_into_tensor(bucket.grad_data, own, group=group)

"""A micro-batch, from its slot to the loss: what Megatron's schedules call, and how they are called.

Letters: N targets.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_rl.algorithm.objective import Objective, RoleLogProbs
from megatron_rl.data.batch import Batch
from megatron_rl.data.packing import Pack
from megatron_rl.mcore.model.gpt import unwrap
from megatron_rl.mcore.step import auxiliary
from megatron_rl.mcore.step.piggyback import Piggyback

M_co = TypeVar("M_co", covariant=True)

Model = Sequence[torch.nn.Module]
"""This rank's stages of one: several with virtual pipeline stages."""

Report = dict[str, Any]
"""What a micro-batch says of itself."""

# What the schedules and the finalization of gradients use, as they would look it up themselves.
_GROUPS = ["tp", "pp", "cp", "embd", "pos_embd", "dp", "dp_cp", "tp_dp_cp"]


class MicroBatches(Protocol[M_co]):
    """What a run of the schedule consumes. Each of a rank's chunks goes through it once, from its start.

    The next one may not be there yet: iterating waits for it, inside the schedule.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[M_co]: ...


class ForwardStep:
    """What a schedule calls for each micro-batch and chunk; here log-probs of its targets, and no loss."""

    communicator: Piggyback | None = None
    """Takes the place of what Megatron sends and receives between pipeline stages with."""

    def __init__(self, temperature: float = 1.0):
        self._temperature = temperature

    def forward_step(self, data_iterator: Iterator[Any], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        """The next micro-batch through a chunk: hidden states for the next one, or log-probs; and their loss."""
        micro_batch: Pack | Batch = next(data_iterator)
        pack = micro_batch.pack if isinstance(micro_batch, Batch) else micro_batch
        return model(pack, self._temperature), self.loss_func

    def loss_func(self, output_tensor: torch.Tensor) -> tuple[torch.Tensor, Report]:
        """On the last stage, of a micro-batch's log-probs."""
        return output_tensor.new_zeros(()), {"log_probs": output_tensor.detach()}


@dataclasses.dataclass(frozen=True)
class Cast:
    """Who plays which role in one update: the number of a frozen model from 1, or 0 for the policy."""

    old: int = 0
    reference: int | None = None
    frozen: Sequence[Model] = ()
    """Models that are run beside the policy."""
    known: Sequence[Mapping[int, torch.Tensor]] = ()
    """Or the log-probs of models that were run before, by slot."""


class PolicyStep(ForwardStep):
    """A micro-batch of an update through the policy, and through the frozen models beside it; its GRPO loss.

    Each stage runs a micro-batch through its part of the frozen models, without gradients, and then of the policy. What
    the frozen ones send to the next stage goes in the policy's messages (`piggyback.py`); nothing of theirs comes back.
    """

    def __init__(self, policy: Model, cast: Cast, objective: Objective, temperature: float, scale: float):
        """The loss is multiplied by `scale`, since the schedule divides it: see `loss_scale`."""
        super().__init__(temperature)
        self._cast = cast
        self._objective = objective
        self._scale = scale
        if cast.frozen and parallel_state.get_pipeline_model_parallel_world_size() > 1:
            self.communicator = Piggyback(get_model_config(policy[0]), len(cast.frozen))

    def forward_step(self, data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        """The next micro-batch through a chunk of the frozen models and of the policy."""
        batch = next(data_iterator)
        frozen_outputs = self._forward_frozen(batch.pack, model)
        output_tensor = model(batch.pack, self._temperature)
        if self.communicator is not None and not unwrap(model).post_process:
            self.communicator.put(output_tensor, frozen_outputs)
        share = self._objective.share(batch.num_targets, batch.num_responses)
        auxiliary.weigh_losses(output_tensor, share, get_model_config(model))
        return output_tensor, partial(self.loss_func, batch, frozen_outputs)

    def loss_func(  # type: ignore[override] # the schedules give the last argument alone
        self, batch: Batch, frozen_outputs: list[torch.Tensor], output_tensor: torch.Tensor
    ) -> tuple[torch.Tensor, Report]:
        """The sum of a micro-batch's losses, of its log-probs under each role, and its statistics.

        Nothing is divided here: `training/learner.py` divides once an update, by the denominator over all replicas.
        """
        cast, sequences_N = self._cast, batch.pack.target_sequences_N
        known = (of_model[batch.index] for of_model in cast.known)
        log_probs_N = [output_tensor.detach(), *frozen_outputs, *known]
        reference_N = None if cast.reference is None else log_probs_N[cast.reference]
        loss, statistics = self._objective.loss(
            RoleLogProbs(output_tensor, log_probs_N[cast.old], reference_N),
            batch.engine_log_probs_N,
            # index_select: its result does not depend on the number of threads.
            batch.advantages_S.index_select(0, sequences_N),
            sequences_N,
            batch.lengths_S,
        )
        return loss * self._scale, {"statistics": statistics}

    def _forward_frozen(self, pack: Pack, model: torch.nn.Module) -> list[torch.Tensor]:
        """What the same chunk of each frozen model makes of a micro-batch."""
        chunk = unwrap(model)
        hidden = chunk.decoder.input_tensor
        inputs: list[torch.Tensor | None] = [None] * len(self._cast.frozen)
        if self.communicator is not None and hidden is not None:
            inputs = [*self.communicator.take(hidden)]
        chunks = [frozen[chunk.vp_stage or 0] for frozen in self._cast.frozen]
        return [self._run_frozen(pack, *given) for given in zip(chunks, inputs, strict=True)]

    @torch.no_grad()
    def _run_frozen(self, pack: Pack, chunk: torch.nn.Module, hidden: torch.Tensor | None) -> torch.Tensor:
        unwrap(chunk).set_input_tensor([hidden])
        output = chunk(pack, self._temperature)
        # It would keep what came from the stage before until the next micro-batch.
        unwrap(chunk).set_input_tensor([None])
        return output


def run_schedule(
    step: ForwardStep, model: Model, micro_batches: MicroBatches, forward_only: bool = False
) -> list[Report]:
    """Micro-batches through Megatron's own schedule. Reports of all of them on the last pipeline stage, else none.

    Every `main_grad` receives the gradient of the sum of losses, over all replicas, unless `forward_only`.
    """
    config = get_model_config(model[0])
    config.finalize_model_grads_func = None if forward_only else finalize_model_grads
    # Without it an overlapped reduction starts after as many micro-batches as the first call had, and what the later
    # ones add is lost.
    config.no_sync_func = _no_sync(model)
    iterators = [iter(micro_batches) for _ in model]
    is_interleaved = len(model) > 1
    return get_forward_backward_func()(
        forward_step_func=step.forward_step,
        data_iterator=iterators if is_interleaved else iterators[0],
        model=list(model) if is_interleaved else model[0],
        num_microbatches=len(micro_batches),
        # Stages tell each other the length of what they send; this one is only divided by the parallel sizes.
        seq_length=config.tensor_model_parallel_size * config.context_parallel_size,
        micro_batch_size=1,
        forward_only=forward_only,
        p2p_communicator=step.communicator,
        # The schedules take both from outside, or neither.
        pg_collection=None if step.communicator is None else ProcessGroupCollection.use_mpu_process_groups(_GROUPS),
    )


def loss_scale(num_micro_batches: int) -> int:
    """What undoes that the schedule divides by the micro-batches, and the gradient buffers by the replicas.

    Context-parallel ranks need no undoing: the schedule multiplies by them what the buffers divide by them.
    """
    return num_micro_batches * parallel_state.get_data_parallel_world_size()


def compute_log_probs(model: Model, micro_batches: MicroBatches, temperature: float = 1.0) -> list[torch.Tensor]:
    """Of each micro-batch's targets, without gradients; on the last pipeline stage, elsewhere nothing."""
    # The schedules leave that to their caller.
    with torch.no_grad(), _last_message_awaited(get_model_config(model[0])):
        reports = run_schedule(ForwardStep(temperature), model, micro_batches, forward_only=True)
    return [report["log_probs"] for report in reports]


def is_reporter() -> bool:
    """Whether this rank speaks for its replica: the one of its ranks that sees losses, or the first of several."""
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_and_context_parallel_rank() == 0


@contextlib.contextmanager
def _last_message_awaited(config: ModelParallelConfig) -> Iterator[None]:
    """An interleaved pass that overlaps its messages from the start waits for its last one while gradients go back.

    Where none do it ends without, and the message may be lost: then the next stage waits for good.
    """
    is_overlapped, config.overlap_p2p_comm_warmup_flush = config.overlap_p2p_comm_warmup_flush, False
    try:
        yield
    finally:
        config.overlap_p2p_comm_warmup_flush = is_overlapped


def _no_sync(model: Model) -> Any:
    """What keeps gradients from being reduced before the last micro-batch, in the form that the schedules want."""
    functions = [chunk.no_sync for chunk in model if isinstance(chunk, DistributedDataParallel)]
    if not functions:
        return None
    return functions if len(model) > 1 else functions[0]

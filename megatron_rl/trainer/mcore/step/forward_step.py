"""The way of a micro-batch from its slot to the loss: Megatron's schedules, and the functions that they call.

Letters: N targets.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_rl.algorithm.declaration import OLD, POLICY, RoleLogProbs, find_role
from megatron_rl.algorithm.objective import Objective, PreferenceObjective
from megatron_rl.ops.log_probs import TargetRows
from megatron_rl.platforms.megatron_patches import replaced
from megatron_rl.trainer.data.batch import Batch
from megatron_rl.trainer.data.device_copier import DeviceCopier
from megatron_rl.trainer.data.packing import Pack, pack_sequences
from megatron_rl.trainer.data.slots import IterationSlots
from megatron_rl.trainer.mcore.model.gpt import PackedGPTModel, unwrap, unwrap_module
from megatron_rl.trainer.mcore.model.replay import RoutingRecord
from megatron_rl.trainer.mcore.session import Session
from megatron_rl.trainer.mcore.step import auxiliary
from megatron_rl.trainer.mcore.step.piggyback import Piggyback

if TYPE_CHECKING:
    from megatron_rl.trainer.mcore.step.trace import StepTrace

M_co = TypeVar("M_co", covariant=True)

Model = Sequence[torch.nn.Module]
"""This rank's chunks of a model: one, or one for each virtual pipeline stage."""

Report = dict[str, Any]
"""The results of a micro-batch that `loss_func` reports, by name."""

# The process groups that the schedules and the finalization of gradients would otherwise look up themselves.
_GROUPS = ["tp", "pp", "cp", "embd", "pos_embd", "dp", "dp_cp", "tp_dp_cp"]


class MicroBatches(Protocol[M_co]):
    """The micro-batches of one run of the schedule. Each of a rank's chunks iterates over them once, from the first.

    Iterating waits, inside the schedule, until the next micro-batch has arrived.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[M_co]: ...


class ForwardStep:
    """The functions that a schedule calls for each micro-batch and chunk; these compute log-probs and no loss."""

    def __init__(
        self,
        temperature: float = 1.0,
        trace: "StepTrace | None" = None,
        role: str = POLICY,
        communicator: Piggyback | None = None,
        record: RoutingRecord | None = None,
    ):
        """`trace` records when each pass of `role` runs. `communicator` replaces Megatron's between pipeline stages.

        `record` takes the experts that the model's routers choose for batches.
        """
        self.trace = trace
        self.others: list[Model] = []
        """Models that are trained beside the one that the schedule runs."""
        self._record = record
        self.communicator = communicator
        self._temperature = temperature
        self._role = role

    def forward_step(self, data_iterator: Iterator[Any], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        """Run the next micro-batch through a chunk; return its hidden states or log-probs, and the loss function."""
        micro_batch: Pack | Batch = next(data_iterator)
        if isinstance(micro_batch, Pack):
            return model(micro_batch, self._temperature), self.loss_func
        self._begin(self._role, micro_batch, model)
        with _recorded(self._record, micro_batch, model):
            return model(micro_batch.pack, self._temperature), self.loss_func

    def loss_func(self, output_tensor: torch.Tensor) -> tuple[torch.Tensor, Report]:
        """Return a zero loss and the micro-batch's log-probs; the schedule calls this on the last stage."""
        return output_tensor.new_zeros(()), {"log_probs": output_tensor.detach()}

    def _begin(self, role: str, batch: Batch, model: torch.nn.Module) -> None:
        """Tell the trace that a role's forward pass through a chunk begins; the schedule tells it the end."""
        if self.trace is not None:
            self.trace.begin_forward(role, unwrap(model).vp_stage or 0, batch.index, batch.pack.num_tokens)


@dataclasses.dataclass(frozen=True)
class RoleAssignment:
    """The models of an update, by name, and the one whose results each role but the policy's takes."""

    results: Mapping[str, str] = dataclasses.field(default_factory=lambda: {OLD: POLICY})
    frozen: Mapping[str, Model] = dataclasses.field(default_factory=dict)
    """Models without gradients that run next to the policy, in this order."""
    known: Mapping[str, Mapping[int, torch.Tensor]] = dataclasses.field(default_factory=dict)
    """The log-probs of models that ran earlier, by slot."""
    trained: Mapping[str, Model] = dataclasses.field(default_factory=dict)
    """Models that are trained beside the policy, in this order."""
    heads: Mapping[str, Mapping[str, Model]] = dataclasses.field(default_factory=dict)
    """Heads by their names, each of one chunk, on the models that are named; those on the policy are trained."""
    record: RoutingRecord | None = None
    """The experts of the old policy, which the policy's routers take: it is one of the frozen models, which is
    recorded, or ran earlier. None if the policy's routers choose."""


class PolicyStep(ForwardStep):
    """Runs a micro-batch of an update through the frozen models and the policy, and computes its GRPO loss.

    Each stage first runs a micro-batch through its part of the frozen models, without gradients, and then through its
    part of the policy and of the other models that are trained. The hidden states of these are one tensor, so that
    Megatron's messages carry them and their gradients. Those of the frozen models, which have no backward pass, travel
    to the next stage in the same messages (`piggyback.py`).
    """

    def __init__(
        self,
        policy: Model,
        assignment: RoleAssignment,
        objective: Objective | PreferenceObjective,
        temperature: float,
        scale: float,
        trace: "StepTrace | None" = None,
        num_kept: int = 0,
    ):
        """Multiply the loss by `scale`, since the schedule divides it: see `loss_scale`.

        Keep the log-probs of the iteration's first `num_kept` slots.
        """
        trained = (policy, *assignment.trained.values())
        self._widths = [unwrap(model[0]).architecture.hidden_size if model else 0 for model in trained]
        carrier = None
        if assignment.frozen and parallel_state.get_pipeline_model_parallel_world_size() > 1:
            carrier = Piggyback(get_model_config(policy[0]), sum(self._widths))
        super().__init__(temperature, trace, communicator=carrier)
        on_policy = assignment.heads.get(POLICY, {})
        self.others = [*assignment.trained.values(), *on_policy.values()]
        self._columns = [*on_policy, *assignment.trained]
        self._assignment = assignment
        self._objective = objective
        self._scale = scale
        self._num_kept = num_kept
        self.kept: dict[int, torch.Tensor] = {}
        """The log-probs of each kept slot's targets under the policy that sampled, as the trainer computes them."""
        self._with_entropies = objective.takes_entropies
        self._divergences = {name: objective.divergences.get(find_role(name)) for name in assignment.frozen}

    def forward_step(self, data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        """Run the next micro-batch through a chunk of the frozen models and of the policy."""
        batch = next(data_iterator)
        frozen_outputs = self._forward_frozen(batch, model)
        teachers = [
            (output, self._divergences[name])
            for name, output in frozen_outputs.items()
            if isinstance(output, TargetRows)
        ]
        chunk = unwrap(model)
        trained = {name: one[chunk.vp_stage or 0] for name, one in self._assignment.trained.items()}
        self._divide_input([chunk, *map(unwrap, trained.values())])
        self._begin(POLICY, batch, model)
        record = self._assignment.record
        routing = None if record is None else record.take(batch.index, chunk)
        heads = self._list_heads(POLICY)
        outputs = [model(batch.pack, self._temperature, self._with_entropies, routing, teachers, heads=heads)]
        for name, part in trained.items():
            self._begin(name, batch, model)
            outputs.append(part(batch.pack))
        output_tensor = outputs[0]
        if trained:
            output_tensor = torch.column_stack(outputs) if chunk.post_process else torch.cat(outputs, dim=-1)
        if self.communicator is not None and not chunk.post_process:
            states = [output for output in frozen_outputs.values() if isinstance(output, torch.Tensor)]
            self.communicator.put(output_tensor, states)
        share = self._objective.share(batch.num_targets, batch.num_responses)
        auxiliary.weigh_losses(output_tensor, share, get_model_config(model))
        return output_tensor, partial(self.loss_func, batch, frozen_outputs)

    def loss_func(  # type: ignore[override] # the schedules give the last argument alone
        self, batch: Batch, frozen_outputs: Mapping[str, torch.Tensor | TargetRows], output_tensor: torch.Tensor
    ) -> tuple[torch.Tensor, Report]:
        """Return the sum of a micro-batch's losses, computed from its log-probs under each role, and its statistics.

        Nothing is divided here: `trainer/loop/learner.py` divides once per update, by the denominator of all replicas.
        """
        assignment, sequences_N = self._assignment, batch.pack.target_sequences_N
        policy_N, *columns = output_tensor.unbind(1) if output_tensor.dim() > 1 else (output_tensor,)
        entropies_N = columns.pop(0) if self._with_entropies else None
        of_models = {
            name: columns.pop(0) if isinstance(output, TargetRows) else output
            for name, output in frozen_outputs.items()
        }
        of_models |= {name: columns.pop(0) for name in self._columns}
        of_models |= {name: of_slots[batch.index] for name, of_slots in assignment.known.items()}
        of_models[POLICY] = policy_N.detach()
        results = {name: of_models[model] for name, model in assignment.results.items() if batch.needs(name)}
        old_N = results.pop(OLD)
        results |= batch.known_N
        loss, statistics = self._objective.loss(
            RoleLogProbs(policy_N, old_N, _combine_models(results, batch), entropies_N, batch.is_of_model_N),
            batch.engine_log_probs_N,
            batch.spread_advantages(),
            sequences_N,
            batch.lengths_S,
        )
        if batch.index < self._num_kept:
            self.kept[batch.index] = old_N
        return loss * self._scale, {"statistics": statistics}

    def _forward_frozen(self, batch: Batch, model: torch.nn.Module) -> dict[str, torch.Tensor | TargetRows]:
        """Run the micro-batch through the same chunk of each frozen model that it needs.

        The last stage returns log-probs of targets, or the rows that a divergence is computed of.
        """
        assignment, chunk = self._assignment, unwrap(model)
        parts = {name: one[chunk.vp_stage or 0] for name, one in assignment.frozen.items() if batch.needs(name)}
        hidden = chunk.decoder.input_tensor
        inputs: list[torch.Tensor | None] = [None] * len(parts)
        if self.communicator is not None and hidden is not None:
            widths = [unwrap(part).architecture.hidden_size for part in parts.values()]
            inputs = [*self.communicator.take(hidden, widths)]
        outputs: dict[str, torch.Tensor | TargetRows] = {}
        for (name, part), of_stage_before in zip(parts.items(), inputs, strict=True):
            self._begin(name, batch, model)
            gives_rows, heads = self._divergences[name] is not None, self._list_heads(name)
            with _recorded(assignment.record if name == assignment.results[OLD] else None, batch, part):
                output = self._run_frozen(batch.pack, part, of_stage_before, gives_rows, heads)
            if heads and chunk.post_process:
                assert isinstance(output, torch.Tensor), "a model gives values or rows"
                output, *values = output.unbind(1)
                outputs |= zip(assignment.heads[name], values, strict=True)
            outputs[name] = output
        return outputs

    def _list_heads(self, model: str) -> list[torch.nn.Module]:
        """List the heads on a model, in the order of their columns."""
        return [unwrap_module(chunk) for (chunk,) in self._assignment.heads.get(model, {}).values()]

    def _divide_input(self, chunks: Sequence[PackedGPTModel]) -> None:
        """Give each of the trained models its part of the tensor that came from the stage before."""
        hidden = chunks[0].decoder.input_tensor
        if len(chunks) > 1 and hidden is not None:
            for chunk, part in zip(chunks, hidden.split(self._widths, dim=-1), strict=True):
                chunk.set_input_tensor([part.contiguous()])

    @torch.no_grad()
    def _run_frozen(
        self,
        pack: Pack,
        chunk: torch.nn.Module,
        hidden: torch.Tensor | None,
        gives_rows: bool,
        heads: Sequence[torch.nn.Module],
    ) -> torch.Tensor | TargetRows:
        inner = unwrap(chunk)
        # A model that shares the policy's parameters has the policy's input. Any other one has none: it would be kept
        # until the next micro-batch.
        before = inner.decoder.input_tensor
        inner.set_input_tensor([hidden])
        # Mixed precision's wrapper would widen the rows.
        called = inner if gives_rows else chunk
        output: torch.Tensor | TargetRows = called(pack, self._temperature, gives_rows=gives_rows, heads=heads)
        inner.set_input_tensor([before])
        return output


class SupervisedStep(ForwardStep):
    """Runs a pack of demonstrations through the model; the loss of a target is minus its log-prob."""

    def __init__(self, scale: float, trace: "StepTrace | None" = None):
        """Multiply the loss by `scale`, since the schedule divides it: see `loss_scale`."""
        super().__init__(trace=trace)
        self._scale = scale
        # The number of micro-batches that each chunk was given.
        self._num_given: collections.Counter[int] = collections.Counter()

    def forward_step(self, data_iterator: Iterator[Pack], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        """Run the next pack through a chunk."""
        pack = next(data_iterator)
        chunk = unwrap(model).vp_stage or 0
        if self.trace is not None:
            self.trace.begin_forward(self._role, chunk, self._num_given[chunk], pack.num_tokens)
        self._num_given[chunk] += 1
        output_tensor = model(pack, self._temperature)
        auxiliary.weigh_losses(output_tensor, pack.num_targets, get_model_config(model))
        return output_tensor, self.loss_func

    def loss_func(self, output_tensor: torch.Tensor) -> tuple[torch.Tensor, Report]:
        """Return the sum of a micro-batch's losses. `trainer/loop/supervised.py` divides once per update."""
        loss = -output_tensor.sum()
        return loss * self._scale, {"loss": loss.detach()}


def _recorded(
    record: RoutingRecord | None, batch: Batch, model: torch.nn.Module
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a batch's pass through a chunk is recorded, if there is a record."""
    return contextlib.nullcontext() if record is None else record.record(batch.index, unwrap(model), batch.pack)


def _combine_models(results: Mapping[str, torch.Tensor], batch: Batch) -> dict[str, torch.Tensor]:
    """Return the result of each role: if it has several models, each target gets that of its own model."""
    of_roles: dict[str, torch.Tensor] = {}
    for name, result_N in results.items():
        role = find_role(name)
        is_of_model_N = batch.is_of_model_N.get(name)
        if is_of_model_N is not None and role in of_roles:
            result_N = torch.where(is_of_model_N, result_N, of_roles[role])
        of_roles[role] = result_N
    return of_roles


def _finalize_all(others: Sequence[Model], model: Model, *arguments: Any, **options: Any) -> None:
    """Complete the gradients of the model that the schedule gives, and of others."""
    for one in (model, *others):
        finalize_model_grads(list(one), *arguments, **options)


def run_schedule(
    step: ForwardStep, model: Model, micro_batches: MicroBatches, forward_only: bool = False
) -> list[Report]:
    """Run micro-batches through Megatron's own schedule; return their reports on the last pipeline stage, else none.

    Every `main_grad` receives the gradient of the sum of losses, over all replicas, unless `forward_only`.
    """
    config = get_model_config(model[0])
    config.finalize_model_grads_func = None if forward_only else partial(_finalize_all, step.others)
    # Without it, an overlapped reduction starts after the number of micro-batches of the first call, and the gradients
    # of later micro-batches are lost.
    config.no_sync_func = _no_sync(model)
    iterators = [iter(micro_batches) for _ in model]
    is_interleaved = len(model) > 1
    with _timed(config, step.trace, len(model)):
        return get_forward_backward_func()(
            forward_step_func=step.forward_step,
            data_iterator=iterators if is_interleaved else iterators[0],
            model=list(model) if is_interleaved else model[0],
            num_microbatches=len(micro_batches),
            # Stages tell each other the length of each message; this number only has to be divisible by the parallel
            # sizes.
            seq_length=config.tensor_model_parallel_size * config.context_parallel_size,
            micro_batch_size=1,
            forward_only=forward_only,
            p2p_communicator=step.communicator,
            # The schedules take both communicator and groups from their caller, or neither.
            pg_collection=None if step.communicator is None else ProcessGroupCollection.use_mpu_process_groups(_GROUPS),
        )


def loss_scale(num_micro_batches: int) -> int:
    """Return the factor that undoes the schedule's division by micro-batches and the gradient buffers' by replicas.

    Context-parallel ranks cancel out: the schedule multiplies by their number, and the buffers divide by it.
    """
    return num_micro_batches * parallel_state.get_data_parallel_world_size()


def compute_log_probs(
    model: Model,
    micro_batches: MicroBatches,
    temperature: float = 1.0,
    trace: "StepTrace | None" = None,
    role: str = POLICY,
    record: RoutingRecord | None = None,
) -> list[torch.Tensor]:
    """Compute log-probs of each micro-batch's targets, without gradients; only the last pipeline stage returns any."""
    reports = run_forward_only(ForwardStep(temperature, trace, role, record=record), model, micro_batches)
    return [report["log_probs"] for report in reports]


def run_forward_only(step: ForwardStep, model: Model, micro_batches: MicroBatches) -> list[Report]:
    """Run micro-batches through the schedule without gradients; return their reports on the last pipeline stage."""
    # With this overlap, an interleaved pass waits for its last message only in the backward pass. There is none, so the
    # message may be lost, and the next stage would wait forever.
    waiting = replaced(get_model_config(model[0]), "overlap_p2p_comm_warmup_flush", False)
    # The schedules leave no_grad to their caller.
    with torch.no_grad(), waiting:
        return run_schedule(step, model, micro_batches, forward_only=True)


def is_reporter() -> bool:
    """Check whether this rank reports for its replica: it is the first of the ranks that compute losses."""
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_and_context_parallel_rank() == 0


def _timed(
    config: ModelParallelConfig, trace: "StepTrace | None", num_chunks: int
) -> contextlib.AbstractContextManager[None]:
    """Have Megatron tell the trace when its passes begin and end, through its hook for timers."""
    if trace is None:
        return contextlib.nullcontext()
    trace.begin_schedule(num_chunks)
    return replaced(config, "timers", trace.timer if config.timers is None else trace.combine_with(config.timers))


def _no_sync(model: Model) -> Any:
    """Return the contexts that delay the reduction of gradients to the last micro-batch, in the schedules' form."""
    functions = [chunk.no_sync for chunk in model if isinstance(chunk, DistributedDataParallel)]
    if not functions:
        return None
    return functions if len(model) > 1 else functions[0]


class SequencePass:
    """Computes the log-probs of one sequence on all ranks, by every replica of a model in one pass of the schedule."""

    def __init__(self, chunks: Sequence[PackedGPTModel], session: Session, multiple_of: int = 1):
        """Compute with `chunks` that are not wrapped: parameters that are gathered late must have been gathered."""
        self._chunks = list(chunks)
        self._session = session
        self._multiple_of = multiple_of
        self._copier = DeviceCopier(session.platform)

    def compute(self, tokens: list[int]) -> list[list[float]]:
        """Compute the log-probs of every token but the first, by each replica; every rank takes part."""
        config = get_model_config(self._chunks[0])
        pack = pack_sequences([tokens], self._multiple_of)
        pack, pending = self._copier.copy(pack, pack.layout)
        pending.wait()
        # An interleaved schedule requires a micro-batch for each stage.
        is_interleaved = len(self._chunks) > 1
        count = parallel_state.get_pipeline_model_parallel_world_size() if is_interleaved else 1
        # The parameters are already gathered: the pass must not gather them again.
        with replaced(config, "param_sync_func", None):
            results = compute_log_probs(self._chunks, [pack] * count)
        own = results[0].to(torch.float32).tolist() if is_reporter() else None
        return [log_probs for log_probs in self._session.gather(own) if log_probs is not None]


INTERVAL = 10


@dataclasses.dataclass(frozen=True)
class Unreplayed:
    """The mismatch that an iteration would have if routers chose experts themselves, where their choice is replayed.

    Every `INTERVAL` versions a replica's first micro-batches go through the policy once more, forward only and without
    the experts that engines chose. Nothing else depends on this pass.
    """

    total: float
    num_tokens: int


def measure_unreplayed(policy: Model, slots: IterationSlots, temperature: float) -> Unreplayed | None:
    """Measure on the replica's reporting rank; None on others, in other iterations, and if nothing is replayed."""
    if slots.identity.version % INTERVAL:
        return None
    # Virtual stages take as many micro-batches as there are stages, or more.
    count = parallel_state.get_pipeline_model_parallel_world_size() if len(policy) > 1 else 1
    batches = [slots.batch(index) for index in range(count)]
    if any(batch.pack.routing is None for batch in batches):
        return None
    packs = [dataclasses.replace(batch.pack, routing=None) for batch in batches]
    found = compute_log_probs(policy, packs, temperature)
    if not is_reporter():
        return None
    apart = [
        (log_probs_N - batch.engine_log_probs_N).abs().double().sum()
        for log_probs_N, batch in zip(found, batches, strict=True)
    ]
    return Unreplayed(float(sum(apart)), sum(batch.num_targets for batch in batches))

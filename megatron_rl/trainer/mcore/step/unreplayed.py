"""The mismatch that an iteration would have if routers chose experts themselves, where their choice is replayed.

Every INTERVAL versions a replica's first micro-batches go through the policy once more, forward only and without the
experts that engines chose. Nothing else depends on this pass.
"""

import dataclasses

from megatron.core import parallel_state

from megatron_rl.trainer.data.slots import IterationSlots
from megatron_rl.trainer.mcore.step.forward_step import Model, compute_log_probs, is_reporter

INTERVAL = 10


@dataclasses.dataclass(frozen=True)
class Unreplayed:
    """Differences of log-probs over some of a replica's tokens."""

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

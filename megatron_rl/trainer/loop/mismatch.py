"""The difference between the log-probs of trainer and engines, and the bounds beyond which a run warns or ends."""

import dataclasses
import math
from collections.abc import Iterable

import msgspec

from megatron_rl.config.settings import Settings
from megatron_rl.errors import ExitCode, MegatronRLError
from megatron_rl.shared.protocol.probe import find_allowance, find_coarsest_dtype
from megatron_rl.shared.protocol.wire import EngineKind, Mismatch
from megatron_rl.trainer.mcore.step.forward_step import Unreplayed

HEALTHY = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
"""Mean difference of a healthy run in each precision, with some room."""
_ERROR = 5.0
LEAST_CORRECTED = 1e-3
"""Mean difference above which tokens should be weighed for it."""


class MismatchBeyond(MegatronRLError):
    """Raised if the policy to be trained did not sample an iteration's tokens."""

    exit_code = ExitCode.RUN

    def __init__(self, version: int, mismatch: Mismatch) -> None:
        super().__init__(
            f"iteration {version}: the trainer's log-probs differ from those that the tokens were sampled with by "
            f"{mismatch.mean:.3g} on average, beyond {mismatch.bound:g} (--rollout-mismatch-error). The update was not "
            "made: an engine computes with other weights, or in another precision. See `mismatch` in the metrics of "
            "the iterations before"
        )
        self.mismatch = mismatch


@dataclasses.dataclass(frozen=True)
class ReplicaMismatch:
    """Differences of log-probs over one replica's tokens in an update: their sum and the largest."""

    total: float
    largest: float
    num_tokens: int
    unreplayed: Unreplayed | None = None
    num_differing: int = 0
    """The tokens whose log-probs are not equal to the last bit."""


@dataclasses.dataclass(frozen=True)
class MismatchBounds:
    """Bounds of the mean difference: given by a flag, or derived from the precisions of trainer and engines."""

    dtypes: tuple[str, ...]
    """The precisions in which the trainer computes and weights are published."""
    temperature: float
    given: float | None = None
    replays_routing: bool = False
    """True if the trainer goes to the experts that engines chose: then a model with experts is as near as another."""

    def error(self, kind: EngineKind) -> float | None:
        """Return the bound beyond which a run ends; None if engines draw tokens at random."""
        if not kind.has_model:
            return None
        if self.given is not None:
            return self.given
        if self.replays_routing:
            kind = msgspec.structs.replace(kind, has_experts=False)
        healthy = HEALTHY[find_coarsest_dtype(kind.dtype, *self.dtypes)] * find_allowance(kind)
        # Log-probs come from logits divided by the temperature, which scales their differences too.
        return _ERROR * healthy / min(1.0, self.temperature)


def build_mismatch_bounds(settings: Settings, trainer_dtype: str) -> MismatchBounds:
    """Build the bounds from the flags, for a trainer that computes in `trainer_dtype`."""
    given = settings.observe.mismatch_error
    if given is None and settings.rollout.is_batch_invariant and settings.platform == "cpu":
        # One token that differs ends the run.
        given = 0.0
    return MismatchBounds(
        dtypes=(trainer_dtype, settings.publish.dtype or settings.architecture.dtype),
        temperature=settings.sampling.temperature,
        given=given,
        replays_routing=settings.rollout.replay_routing,
    )


def find_warning_bound(settings: Settings) -> float:
    """Return the mean difference to warn beyond: infinite for engines that draw at random, unless a flag gives one."""
    if settings.observe.mismatch_warning is not None:
        return settings.observe.mismatch_warning
    if settings.rollout.engine == "scripted":
        return math.inf
    dtypes = (settings.rollout.dtype, settings.publish.dtype or settings.architecture.dtype)
    return HEALTHY[find_coarsest_dtype(*(dtype for dtype in dtypes if dtype is not None))]


def combine_parts(parts: Iterable[ReplicaMismatch], bound: float | None) -> Mismatch:
    """Combine the parts of all replicas; NaN counts as the largest."""
    known = list(parts)
    num_tokens = sum(part.num_tokens for part in known)
    largest = max((part.largest for part in known), key=lambda value: (value != value, value))
    unreplayed = [part.unreplayed for part in known if part.unreplayed is not None]
    num_unreplayed = sum(part.num_tokens for part in unreplayed)
    without_replay = sum(part.total for part in unreplayed) / num_unreplayed if num_unreplayed else msgspec.UNSET
    mean = sum(part.total for part in known) / max(1, num_tokens)
    num_differing = sum(part.num_differing for part in known)
    return Mismatch(mean=mean, largest=largest, bound=bound, num_differing=num_differing, without_replay=without_replay)

"""How well the model predicts the responses of held-out demonstrations: their mean loss, a token each."""

from collections.abc import Sequence
from typing import Any

from megatron_rl.data.demonstrations import Demonstration
from megatron_rl.mcore.session import Session
from megatron_rl.mcore.step.forward_step import compute_log_probs, is_reporter
from megatron_rl.mcore.step.policy import Policy
from megatron_rl.training.supervised.packs import Packer, Packs


class SupervisedEvaluator:
    """Evaluates on all ranks together."""

    def __init__(
        self, policy: Policy, session: Session, parts: Sequence[Sequence[Demonstration]], packer: Packer, interval: int
    ):
        """`parts` are the micro-batches of this rank's replica."""
        self._policy = policy
        self._session = session
        self._parts = parts
        self._packer = packer
        self._interval = interval

    def is_due(self, version: int, is_last: bool = False) -> bool:
        """Whether to evaluate now: every `interval` iterations, and at the end."""
        return is_last or version % self._interval == 0

    def evaluate(self) -> dict[str, Any]:
        """Return the mean over the tokens of all held-out responses, on every rank."""
        self._policy.synchronize()
        packs = Packs(self._parts, self._packer)
        log_probs = compute_log_probs(self._policy.wrapped, packs)
        found = (0.0, 0, 0)
        if is_reporter():
            loss = -sum(float(of_pack_N.double().sum()) for of_pack_N in log_probs)
            found = loss, sum(map(len, log_probs)), packs.num_demonstrations
        loss, num_tokens, num_demonstrations = map(sum, zip(*self._session.gather(found), strict=True))
        return {"loss": loss / num_tokens, "num_demonstrations": num_demonstrations, "num_tokens": num_tokens}

"""The policy's own log-probs of a version's probe, which engines that hold the version must match."""

from collections.abc import Sequence

from megatron_rl.errors import ExitCode, MegatronRLError
from megatron_rl.shared.protocol import probe
from megatron_rl.shared.protocol.client import RolloutClient
from megatron_rl.shared.protocol.wire import EngineKind, ProbeAnswer, encode_log_probs, encode_tokens
from megatron_rl.trainer.mcore.model.gpt import PackedGPTModel
from megatron_rl.trainer.mcore.session import Session
from megatron_rl.trainer.mcore.step.forward_step import SequencePass


class ReplicasDiffer(MegatronRLError):
    """Data-parallel ranks hold different weights."""

    exit_code = ExitCode.RUN


class Probe:
    """Computes the probe of a version with its weights, in one pass of the schedule. Every rank takes part."""

    def __init__(
        self,
        chunks: Sequence[PackedGPTModel],
        session: Session,
        run: str,
        longest: int,
        multiple_of: int = 1,
        bound: float | None = None,
        agreement: float | None = None,
        is_base_proved: bool = False,
    ):
        """Compute with `chunks` that are not wrapped: parameters that are gathered late must have been gathered.

        `longest` is the most tokens of a sequence. `bound` limits the mean difference between the policy's log-probs
        and an engine's, `agreement` the mean difference between engines'. None derives a limit from the precisions.
        `is_base_proved` says that versions are adapters of one base, and that each engine proves it bit for bit.
        """
        architecture, experts = chunks[0].architecture, chunks[0].architecture.experts
        count = probe.count_tokens(experts.num_experts, experts.num_active) if experts else probe.count_tokens()
        self._session = session
        self._pass = SequencePass(chunks, session, multiple_of)
        self._run = run
        self._vocab_size = architecture.vocab_size
        self._num_tokens = min(count, longest)
        self._num_later = probe.count_later_tokens(self._num_tokens, is_base_proved)
        self._first: int | None = None
        self._bound = bound
        self._agreement = agreement
        self._dtype = str(chunks[0].config.params_dtype).removeprefix("torch.")

    def tokens(self, version: int) -> bytes:
        """Return the tokens whose log-probs engines are asked for."""
        return encode_tokens(self._tokens(version))

    def send(self, version: int, fingerprint: str, receiver: RolloutClient | None) -> None:
        """Compute the log-probs, and have rank 0, which has the receiver, send them."""
        by_replica = self._pass.compute(self._tokens(version))
        self._session.run_or_raise_everywhere(lambda: self._send(version, fingerprint, by_replica, receiver))

    def _tokens(self, version: int) -> list[int]:
        if self._first is None:
            self._first = version
        # A version that is published again has the same tokens.
        return probe.draw_tokens(
            version, self._vocab_size, self._num_tokens if version == self._first else self._num_later
        )

    def _send(
        self, version: int, fingerprint: str, by_replica: Sequence[Sequence[float]], receiver: RolloutClient | None
    ) -> None:
        first, *others = by_replica
        kind = EngineKind(dtype=self._dtype, device=self._session.device.type)
        bound = self._bound if self._bound is not None else probe.find_bound(kind, self._dtype)
        for replica, log_probs in enumerate(others, start=1):
            found = probe.measure_difference(log_probs, first)
            if not found.mean <= bound:
                raise ReplicasDiffer(
                    f"replica {replica} differs from replica 0: with version {version} their log-probs of the same "
                    f"tokens differ by {found.mean:.3g} on average, and {bound:g} is the limit. Nothing was published: "
                    "start the run again from its checkpoint, and check the ranks' devices and reductions"
                )
        if self._session.rank == 0:
            assert receiver is not None
            receiver.probed(
                ProbeAnswer(
                    run=self._run,
                    version=version,
                    fingerprint=fingerprint,
                    log_probs=encode_log_probs(first),
                    dtype=self._dtype,
                    bound=self._bound,
                    agreement=self._agreement,
                )
            )

"""The trainer's client of the rollout service. Every call may be repeated: the second one changes nothing."""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from megatron_rl.errors import MegatronRLError
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.hosts import DeliveryHosts, LeftOut, is_loopback

_POLL_SECONDS = 30.0
_RETRY_SECONDS = 0.5
_CONNECT_SECONDS = 5.0
# Seconds beyond the deadline of a publish, an evaluation or an iteration, in which the reason of its failure may come.
_GRACE_SECONDS = 10.0


class RolloutError(MegatronRLError):
    """The sidecar refused a request, failed or could not be reached."""


class IterationLost(RolloutError):
    """The iteration failed in the sidecar; all ranks get the same reason."""


class WorkersChanged(RolloutError):
    """The trainer opened a stream for another number of workers than can receive it, and must count again."""


class EvaluationLost(RolloutError):
    """The evaluation failed in the sidecar; an iteration that runs beside it continues."""


_ERRORS: dict[wire.ErrorCode, type[RolloutError]] = {
    wire.ErrorCode.ITERATION_FAILED: IterationLost,
    wire.ErrorCode.EVALUATION_FAILED: EvaluationLost,
    wire.ErrorCode.WORKERS_CHANGED: WorkersChanged,
}
"""The errors that callers tell apart, by their codes."""


class RolloutClient(contextlib.AbstractContextManager["RolloutClient"]):
    """A rank's client. A sidecar that cannot be reached for `patience` seconds is an error.

    Threads may share a client: each call has a connection of its own, so a call that waits delays no other. The lease
    belongs to the client: take it before threads start.
    """

    def __init__(
        self, endpoint: str, token: str, patience: float = 120.0, transport: httpx.BaseTransport | None = None
    ):
        self.endpoint = endpoint
        self._patience = patience
        self._lease: int | None = None
        self._http = httpx.Client(
            base_url=endpoint,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(_POLL_SECONDS * 2, connect=_CONNECT_SECONDS),
            transport=transport,
            # A proxy of the environment would be handed the token.
            trust_env=False,
        )

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def take_lease(self, run: str) -> int:
        """Take the sidecar's lease for this run. One rank does so and sends the number to the others (`use_lease`)."""
        answer = self._call("POST", "/v1/lease", params={"run": run, "wire": wire.WIRE_VERSION}).json()
        # A sidecar of wire version 1 does not answer with its version.
        wire.check_version(answer.get("wire", 1), f"the sidecar at {self.endpoint}")
        self.use_lease(answer["lease"])
        assert self._lease is not None
        return self._lease

    @property
    def lease(self) -> int:
        """The number of the lease, which grows from trainer to trainer; 0 without one."""
        return self._lease or 0

    def use_lease(self, number: int) -> None:
        """Send the lease of this number with every request."""
        self._lease = number

    def publish(self, weights: wire.Weights, deadline_seconds: float) -> wire.PublishAnswer:
        """Return once every engine holds the version."""
        seconds = deadline_seconds + _GRACE_SECONDS
        answer = self._call("POST", "/v1/publish", content=wire.encode(weights), timeout=seconds)
        return msgspec.convert(answer.json()["published"], wire.PublishAnswer)

    def hosts(self) -> DeliveryHosts:
        """Return the hosts to which weights are delivered before the next publish."""
        return wire.decode(self._call("GET", "/v1/hosts").content, DeliveryHosts)

    def lose_host(self, name: str, version: int, reason: str) -> None:
        """Tell that a version was not delivered to a host: its engines wait for the next one."""
        self._call("POST", f"/v1/hosts/{name}/lost", content=wire.encode(LeftOut(version=version, reason=reason)))

    def probed(self, answer: wire.ProbeAnswer) -> None:
        """Send the trainer's log-probs of a probe, for which the publish of its version waits."""
        self._call("POST", "/v1/probe", content=wire.encode(answer))

    def submit(self, submission: wire.Submission) -> None:
        self._call("POST", "/v1/iterations", content=wire.encode(submission))

    def slot(self, version: int, replica: int, index: int, deadline_seconds: float) -> wire.Slot:
        """Wait for a slot of an iteration that has this deadline."""
        return wire.decode(self.encoded_slot(version, replica, index, deadline_seconds), wire.Slot)

    def encoded_slot(self, version: int, replica: int, index: int, deadline_seconds: float) -> bytes:
        """Wait for a slot and leave it encoded: other ranks need the same bytes."""
        path = f"/v1/iterations/{version}/slots/{replica}/{index}"
        answer = self._poll(path, deadline_seconds + _GRACE_SECONDS)
        if answer is not None:
            return answer
        raise RolloutError(
            f"slot {index} of replica {replica} did not come within {deadline_seconds:.0f} s in iteration {version}: "
            f"{self.endpoint}/v1/status shows what is missing"
        )

    def evaluate(self, evaluation: wire.Evaluation) -> wire.Evaluated:
        """Have the version that engines hold answer prompts, and have the answers scored; wait until the deadline.

        An iteration may run meanwhile, and its groups go first. The next publish must wait.
        """
        self._call("POST", "/v1/evaluations", content=wire.encode(evaluation))
        answer = self._poll(f"/v1/evaluations/{evaluation.version}", evaluation.deadline_seconds + _GRACE_SECONDS)
        if answer is None:
            raise RolloutError(
                f"the evaluation of version {evaluation.version} was not answered within "
                f"{evaluation.deadline_seconds:.0f} s, its deadline: {self.endpoint}/v1/status shows what is missing"
            )
        return wire.decode(answer, wire.Evaluated)

    def sleep(self, version: int, deadline_seconds: float) -> None:
        """Wait until engines have given their devices to the ranks, which have all slots of this iteration."""
        self._call("POST", f"/v1/iterations/{version}/sleep", timeout=deadline_seconds)

    def complete(
        self,
        version: int,
        mismatch: wire.Mismatch | None = None,
        plug_ins: Mapping[str, str] | None = None,
        seconds: float | None = None,
        objective: Mapping[str, str] | None = None,
    ) -> wire.Ended:
        """Report that the whole iteration was trained on; return the audit log's head and the prompts' census.

        If the head is kept elsewhere, `megatron-rl audit RUN --head HEAD` proves that the log up to here is unchanged.
        `plug_ins` and `objective` are written into the log, and `seconds` are the trainer's, as in `wire.Trained`.
        """
        content = None
        if mismatch is not None:
            trained = wire.Trained(
                version=version,
                mismatch=mismatch,
                plug_ins=dict(plug_ins) if plug_ins else msgspec.UNSET,
                objective=msgspec.UNSET if objective is None else dict(objective),
                seconds=msgspec.UNSET if seconds is None else seconds,
            )
            content = wire.encode(trained)
        answer = self._call("POST", f"/v1/iterations/{version}/complete", content=content).json()
        return msgspec.convert(answer, wire.Ended)

    def refuse(self, version: int, mismatch: wire.Mismatch) -> None:
        """Report that the iteration will not be trained on, and why."""
        content = wire.encode(wire.Trained(version=version, mismatch=mismatch))
        self._call("POST", f"/v1/iterations/{version}/refuse", content=content)

    def take_work(self, seconds: float) -> bytes | None:
        """Wait for the next work that clients of Tinker's interface have for the ranks; None if none comes in time."""
        return self._poll("/v1/work", seconds)

    def give_result(self, number: int, result: bytes) -> None:
        self._call("POST", f"/v1/work/{number}", content=result)

    def status(self) -> dict[str, Any]:
        """Return the state of the sidecar, its engines and the requests that wait."""
        return self._call("GET", "/v1/status").json()

    def clock(self) -> float:
        """Read the sidecar's steady clock, in seconds."""
        return float(self._call("GET", "/v1/clock").json()["clock"])

    def num_workers(self) -> int:
        """Count the workers of all engines that a publish would reach now."""
        return self.status()["engines"]["num_workers"]

    def find_engine_hosts(self) -> list[str]:
        """Return the names or addresses of the hosts that have engines, as this host reaches them."""
        status, own = self.status(), urlsplit(self.endpoint).hostname or ""
        elsewhere = {engine for host in status["hosts"].values() for engine in host["engines"]}
        found = [own] if status["engines"]["engines"].keys() - elsewhere else []
        for agent, host in status["hosts"].items():
            if host["state"] == "up" and host["engines"]:
                name = agent.rpartition(":")[0].strip("[]")
                # To the sidecar, the loopback address means its own host.
                found.append(own if is_loopback(name) else name)
        return found

    def shutdown(self) -> None:
        self._call("POST", "/v1/shutdown")

    def _poll(self, path: str, seconds: float) -> bytes | None:
        """Wait for the answer at this path; return None if it does not come in time."""
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            answer = self._call("GET", path, params={"patience": min(remaining, _POLL_SECONDS)})
            if answer.status_code == 200:
                return answer.content
        return None

    def _call(self, method: str, path: str, timeout: float | None = None, **keywords: Any) -> httpx.Response:
        """Repeat a request until it is answered: a broken connection does not show whether it arrived.

        A request whose answer has a `timeout` of its own is not repeated after it.
        """
        headers = {"X-Lease": str(self._lease)} if self._lease is not None else {}
        if timeout is not None:
            keywords["timeout"] = httpx.Timeout(timeout, connect=_CONNECT_SECONDS)
        silent_since: float | None = None
        while True:
            asked = time.monotonic()
            try:
                answer = self._http.request(method, path, headers=headers, **keywords)
                break
            except httpx.TransportError as error:
                if timeout is not None and isinstance(error, httpx.ReadTimeout):
                    raise RolloutError(
                        f"{method} {path} was not answered within {timeout:.0f} s: {self.endpoint}/v1/status shows "
                        "what is missing"
                    ) from None
                failed = time.monotonic()
                # Before its connection breaks, a sidecar that lives may take longer for an answer than the patience.
                silent_since = silent_since or (asked if isinstance(error, httpx.ReadTimeout) else failed)
                if failed - silent_since >= self._patience:
                    raise RolloutError(
                        f"the sidecar at {self.endpoint} did not answer for {failed - silent_since:.0f} s ({error!r}): "
                        "read its log, or start one"
                    ) from None
                time.sleep(_RETRY_SECONDS)
        if answer.is_success:
            return answer
        raise _build_error(answer, f"{method} {path}")


def read_token(path: Path) -> str:
    """Read a sidecar's token from a file that only its owner may read."""
    mode = path.stat().st_mode & 0o077
    if mode:
        raise RolloutError(f"{path} is readable by others (mode {path.stat().st_mode & 0o777:o}): chmod 600 it")
    return path.read_text().strip()


def _build_error(answer: httpx.Response, what: str) -> RolloutError:
    try:
        found = msgspec.json.decode(answer.content, type=wire.ErrorAnswer)
    except msgspec.DecodeError:
        return RolloutError(f"{what} was answered {answer.status_code}: {answer.text[:300]}")
    if found.code in _ERRORS:
        return _ERRORS[found.code](found.error)
    hint = ": --rollout-token-file must name the file `token` of the sidecar's folder" * (answer.status_code == 401)
    return RolloutError(f"{what} was answered {answer.status_code}: {found.error}{hint}")

"""A scheduler of vLLM that sends the output of a request when it ends, and not after each step.

vLLM's core sends, after each step, an output for each request, which its front end unpacks and adds up. A group's
responses are read only when all have ended, so these outputs are joined in the core. Invariants:

- what is sent for a request, joined, is what vLLM would have sent, joined: the same tokens, log-probs and events;
- a request is held only if its caller takes the final output alone, and vLLM's front end need not look for stop strings
  in it. The outputs of every other request are sent after each step;
- what is held is sent at least every SECONDS while the core steps, so the front end's counters show progress;
- nothing is held over a change of weights: it is sent before a pause that keeps requests begins;
- a request that is aborted ends with an output that has all its tokens, also where none of them is held, if its caller
  takes the final output alone.

vLLM loads `build_scheduler` by its flag --scheduler-cls.
"""

import dataclasses
import logging
import operator
import pkgutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

SCHEDULER = f"{__name__}.build_scheduler"
SECONDS = 1.0
"""The longest time that tokens are held."""
STATISTICS_SECONDS = 0.1
"""The shortest time between two reports of statistics, unless there are some that only one step has."""
# Pieces of a request that are joined into one, so that a held token takes a few bytes.
_MOST_PIECES = 64
_log = logging.getLogger(__name__)


def _join_lists(values: Sequence[Any]) -> Any:
    return [item for value in values for item in value]


def _join_log_probs(values: Sequence[Any]) -> Any:
    """Join vLLM's lists of log-probs, each a tuple of arrays over tokens."""
    columns = zip(*values, strict=True)
    joined = (
        np.concatenate([part for part in parts if part is not None]) if isinstance(parts[0], np.ndarray) else None
        for parts in columns
    )
    return type(values[0])._make(joined)


_take_first, _take_last = operator.itemgetter(0), operator.itemgetter(-1)
# How the values of each field of an output are joined, in the order of steps. Others are never held.
_JOINS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "request_id": _take_last,
    "new_token_ids": _join_lists,
    "new_logprobs": _join_log_probs,
    "new_prompt_logprobs_tensors": _take_first,
    "prompt_token_id_logprobs": _take_first,
    "finish_reason": _take_last,
    "stop_reason": _take_last,
    "events": _join_lists,
    "kv_transfer_params": _take_last,
    "ec_transfer_params": _take_last,
    "trace_headers": _take_last,
    "prefill_stats": _take_first,
    "routed_experts": np.concatenate,
    "num_nans_in_logits": _take_last,
    "spec_decode_metrics": _take_last,
    "error": _take_last,
}
# Fields that only the outputs of requests have which are not held.
_NEVER_HELD = ("pooling_output", "mm_cache_miss_hashes", "new_sampling_mask")


def join_outputs(outputs: Sequence[Any]) -> Any:
    """Join the outputs of a request, in the order of steps."""
    if len(outputs) == 1:
        return outputs[0]
    kind = type(outputs[0])
    joined: dict[str, Any] = {}
    for name in kind.__struct_fields__:
        given = [value for output in outputs if (value := getattr(output, name)) is not None]
        if name in _JOINS:
            joined[name] = _JOINS[name](given) if given else None
    return kind(**joined)


def find_unknown_fields(output: type) -> list[str]:
    """List the fields of vLLM's output that cannot be joined."""
    known = {*_JOINS, *_NEVER_HELD}
    return [name for name in output.__struct_fields__ if name not in known]  # type: ignore[attr-defined]


@dataclasses.dataclass
class _Held:
    """The outputs of a request that were not sent."""

    client: int
    """The number of the front end that they are for."""
    pieces: list[Any] = dataclasses.field(default_factory=list)

    def add(self, output: Any) -> None:
        self.pieces.append(output)
        if len(self.pieces) == _MOST_PIECES:
            self.pieces = [join_outputs(self.pieces)]


class HoldsOutputs:
    """The methods that `build_scheduler` adds to a scheduler of vLLM."""

    requests: dict[str, Any]
    pause_state: Any

    def __init__(self, *args: Any, **keywords: Any) -> None:
        from vllm.v1.engine import EngineCoreOutput

        super().__init__(*args, **keywords)
        self._held: dict[str, _Held] = {}
        # The last outputs of aborted requests, with the numbers of their front ends.
        self._ended: list[tuple[int, Any]] = []
        self._held_since = self._last_statistics = 0.0
        self._unknown = find_unknown_fields(EngineCoreOutput)
        if self._unknown:
            _log.warning(
                "outputs are sent after each step, because this vLLM's have unknown fields: %s",
                ", ".join(self._unknown),
            )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Do as vLLM does with the results of a step, and hold what can be held of the messages to front ends."""
        from vllm.v1.engine import EngineCoreOutputs

        if (log_probs := model_runner_output.logprobs) is not None:
            # vLLM's arrays lie in pinned memory that it uses again once nothing refers to it.
            copied = (np.array(part) if isinstance(part, np.ndarray) else part for part in log_probs)
            model_runner_output.logprobs = type(log_probs)._make(copied)
        messages = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for client, message in messages.items():
            message.outputs = [sent for output in message.outputs if (sent := self._pass(client, output)) is not None]
        for client, output in [*self._ended, *self._take_due()]:
            messages.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        self._ended.clear()
        return {client: message for client, message in messages.items() if _says_something(message)}

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]:
        """End requests; one that is aborted gets an output with the tokens that were not sent."""
        from vllm.v1.engine import EngineCoreOutput, FinishReason
        from vllm.v1.request import RequestStatus

        ended: list[Any] = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        if finished_status == RequestStatus.FINISHED_ABORTED:
            for request in ended:
                held = self._held.pop(request.request_id, None)
                if held is not None or _takes_final_output(request):
                    last = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT)
                    self._ended.append((request.client_index, join_outputs([*(held.pieces if held else ()), last])))
        return ended

    def has_requests(self) -> bool:
        """Tell whether the core must step: also to send what is held before a pause."""
        return bool(super().has_requests() or self._ended or (self._keeps_requests() and self._held))  # type: ignore[misc]

    def make_stats(self, *statistics: Any, **named: Any) -> Any:
        """Make statistics, unless the last ones are recent; the counts of an idle core are always reported."""
        now = time.monotonic()
        is_recent = now - self._last_statistics < STATISTICS_SECONDS and self.has_unfinished_requests()  # type: ignore[attr-defined]
        if is_recent and all(value is None for value in (*statistics, *named.values())):
            return None
        self._last_statistics = now
        return super().make_stats(*statistics, **named)  # type: ignore[misc]

    def _pass(self, client: int, output: Any) -> Any:
        """Return what is sent in place of an output; None if it is held."""
        held = self._held.get(output.request_id)
        is_last = output.finish_reason is not None
        if not is_last and self._can_hold(self.requests[output.request_id]) and _is_plain(output):
            if held is None:
                self._held_since = self._held_since if self._held else time.monotonic()
                held = self._held[output.request_id] = _Held(client)
            held.add(output)
            return None
        if held is None:
            return output
        del self._held[output.request_id]
        return join_outputs([*held.pieces, output])

    def _take_due(self) -> list[tuple[int, Any]]:
        """Return what must be held no longer, with the numbers of front ends."""
        if not self._keeps_requests() and time.monotonic() - self._held_since < SECONDS:
            return []
        due = [(held.client, join_outputs(held.pieces)) for held in self._held.values()]
        self._held.clear()
        return due

    def _can_hold(self, request: Any) -> bool:
        is_plain = _takes_final_output(request) and not request.sampling_params.stop
        return is_plain and not request.resumable and not self._unknown

    def _keeps_requests(self) -> bool:
        """Tell whether the scheduler is paused with requests in flight, during which weights may change."""
        from vllm.v1.core.sched.interface import PauseState

        return bool(self.pause_state == PauseState.PAUSED_ALL)


def _takes_final_output(request: Any) -> bool:
    from vllm.sampling_params import RequestOutputKind

    params = request.sampling_params
    return bool(params is not None and params.output_kind == RequestOutputKind.FINAL_ONLY)


def _is_plain(output: Any) -> bool:
    return all(getattr(output, name, None) is None for name in _NEVER_HELD)


def _says_something(message: Any) -> bool:
    return bool(message.outputs) or message.scheduler_stats is not None or message.finished_requests is not None


def holds_outputs(scheduler: Any) -> bool:
    """Tell whether a scheduler holds outputs, and so ends an aborted request with an output of its own.

    `scheduler` is the value of --scheduler-cls: a class, a name, or None for vLLM's choice.
    """
    found = pkgutil.resolve_name(scheduler) if isinstance(scheduler, str) else scheduler
    if isinstance(found, type):
        return issubclass(found, HoldsOutputs)
    if found is None or found is build_scheduler:
        return found is not None
    raise ValueError(
        f"--scheduler-cls {scheduler} must be a class, or {SCHEDULER}: what it builds may hold outputs, and a request "
        "that is aborted would lose them"
    )


def build_scheduler(vllm_config: Any, **arguments: Any) -> Any:
    """Build the scheduler that vLLM would choose, with outputs that are held."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    chosen = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    held = type(f"{chosen.__name__}ThatHolds", (HoldsOutputs, chosen), {})
    return held(vllm_config=vllm_config, **arguments)

"""Reports for people, on rank 0: metrics, display, samples. The other ranks only hand in their measures."""

import contextlib
import dataclasses
import importlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from megatron_rl.algorithm.advantages import GroupAdvantages
from megatron_rl.command_line.describe import describe_run
from megatron_rl.command_line.run import RunSettings
from megatron_rl.errors import MegatronRLError
from megatron_rl.observe import metrics as metrics_file
from megatron_rl.observe import run_folder
from megatron_rl.observe import samples as samples_file
from megatron_rl.observe.metrics import MetricsFile
from megatron_rl.observe.progress import Progress, progress_of
from megatron_rl.observe.samples import (
    SampledGroup,
    SampledPlace,
    SampledResponse,
    SampledTokens,
    SampledTurn,
    SamplesFile,
)
from megatron_rl.observe.sinks import Sink, Sinks, sinks_of
from megatron_rl.observe.timeline import Timeline
from megatron_rl.shared.chat import Decode, build_decoder
from megatron_rl.shared.protocol.client import RolloutClient
from megatron_rl.shared.protocol.turns import Turn, count_sampled, list_turns, mask_sampled
from megatron_rl.shared.protocol.wire import Group, GroupPart, Response, decode_log_probs, decode_tokens
from megatron_rl.trainer.data.batch import BatchFacts
from megatron_rl.trainer.loop.equal_rewards import EqualRewards, Failures
from megatron_rl.trainer.loop.mismatch import LEAST_CORRECTED, find_warning_bound
from megatron_rl.trainer.loop.rank import STAND_ALONE, Rank

if TYPE_CHECKING:
    from megatron_rl.trainer.loop.tracing import RankTrace

# The module that only runs with --trace on import.
_TRACING = "megatron_rl.trainer.loop.tracing"
_FOLLOW_SECONDS = 0.5
# Decimals of a log-prob in the samples.
_DECIMALS = 5


class Reporter:
    """Takes the loop's reports and writes nothing: the reporter of every rank but the first."""

    def begin(self, version: int) -> None:
        """Show that the iteration of this version begins."""

    def phase(self, name: str) -> None:
        """Show that a part of the iteration begins."""

    def say(self, text: str) -> None:
        """Print a line for people."""

    def follow(self, status: Callable[[], dict[str, Any]]) -> None:
        """Show the sidecar's counts of the running iteration if the display has room, and lost hosts, from now on."""

    def evaluation(self, version: int, groups: Sequence[Group]) -> None:
        """Write some of the responses of an evaluation."""

    def iteration(
        self, version: int, metrics: dict[str, Any], batches: Sequence[BatchFacts], log_probs: Mapping[int, np.ndarray]
    ) -> None:
        """Report a finished iteration.

        `batches` are those of this rank's replica, in the order of slots. `log_probs` are the trainer's, for some of
        them.
        """
        self.write(version, metrics)

    def write(self, version: int, metrics: dict[str, Any]) -> None:
        """Write metrics."""

    def close(self) -> None:
        """Close the files and restore the terminal; a second call does nothing."""


class MetricsReporter(Reporter):
    """Writes the metrics of each iteration, and shows the progress of the run."""

    def __init__(self, num_groups: int, metrics: MetricsFile, sinks: Sinks, progress: Progress):
        """`num_groups` are the groups of an iteration that a display counts; 0 for none."""
        self._num_groups = num_groups
        self._metrics = metrics
        self._sinks = sinks
        self._progress = progress

    def begin(self, version: int) -> None:
        self._progress.begin(version, self._num_groups)

    def phase(self, name: str) -> None:
        self._progress.phase(name)

    def say(self, text: str) -> None:
        self._progress.say(text)

    def close(self) -> None:
        self._progress.close()
        self._sinks.close()
        self._metrics.close()

    def write(self, version: int, metrics: dict[str, Any]) -> None:
        self._metrics.write(metrics)
        self._sinks.write(version, metrics)
        self._progress.end(version, metrics)


class HostNews:
    """The hosts that were lost, and those that are back, since the sidecar was asked last."""

    def __init__(self) -> None:
        self._lost: set[str] = set()

    def list_lines(self, hosts: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
        """Yield a line for each host that was lost or is back; `hosts` are those of the sidecar's status."""
        for name, host in hosts.items():
            if host["error"] and name not in self._lost:
                self._lost.add(name)
                yield f"warning: {host['error'].removeprefix('its ')}"
            elif host["state"] != "lost" and name in self._lost:
                self._lost.discard(name)
                yield f"host {name} is back"


class SamplesReporter(MetricsReporter):
    """Writes samples of the responses, too."""

    def __init__(
        self,
        settings: RunSettings,
        metrics: MetricsFile,
        samples: SamplesFile,
        sinks: Sinks,
        progress: Progress,
        decode: Decode,
        advantages: GroupAdvantages,
    ):
        super().__init__(settings.sizes.plan.num_prompts, metrics, sinks, progress)
        self._closed = threading.Event()
        self._has_hosts = settings.rollout.hosts is not None
        self._host_news = HostNews()
        self._samples = samples
        self._decode = decode
        self._advantages = advantages
        self._mismatch_warning = find_warning_bound(settings)
        self._with_tokens = settings.observe.log_sample_tokens
        self._equal_rewards = EqualRewards(settings)
        self._failures = Failures(settings.environment.on_error)
        self._has_turn_credit = settings.algorithm.turn_credit
        self._is_corrected = settings.algorithm.importance_correction
        self._has_suggested = False

    def follow(self, status: Callable[[], dict[str, Any]]) -> None:
        if self._progress.shows_counts or self._has_hosts:
            threading.Thread(target=self._follow, args=(status,), name="follow", daemon=True).start()

    def _follow(self, status: Callable[[], dict[str, Any]]) -> None:
        while not self._closed.wait(_FOLLOW_SECONDS):
            try:
                now = status()
            except MegatronRLError:
                # The loop gets the same error, and reports it.
                continue
            for line in self._host_news.list_lines(now["hosts"]):
                self.say(line)
            if (iteration := now.get("iteration")) is not None:
                groups, waiting = iteration["groups"], now["slots_waited_for"]
                num_finished = groups["finished"] + groups["claimed"]
                self._progress.counts(num_finished, groups["claimed"], f"slot {waiting[0]}" if waiting else "")

    def close(self) -> None:
        self._closed.set()
        self._say_if_any(self._equal_rewards.end())
        super().close()
        self._samples.close()

    def iteration(
        self, version: int, metrics: dict[str, Any], batches: Sequence[BatchFacts], log_probs: Mapping[int, np.ndarray]
    ) -> None:
        self._warn(metrics)
        self._write_samples(version, batches, log_probs)
        self.write(version, metrics)

    def evaluation(self, version: int, groups: Sequence[Group]) -> None:
        for group in groups:
            left = self._samples.left(version, "evaluation")
            if left <= 0:
                return
            responses = [(response, None) for response in group.responses[:left]]
            sampled = self._decode_group(group.prompt.row, group.prompt.tokens, responses)
            self._samples.write(version, [sampled], "evaluation")

    def _warn(self, metrics: dict[str, Any]) -> None:
        difference = metrics["mismatch"]["mean"]
        if not difference <= self._mismatch_warning:
            remedy = "" if self._is_corrected else "; --rl-inference-logprobs-is-correction weighs tokens for it"
            self._progress.say(
                f"warning: engine's and trainer's log-probs differ by {difference:.2g} on average, above "
                f"{self._mismatch_warning:g} (--rollout-mismatch-warning): compare precisions and kernels of the two"
                f"{remedy}"
            )
        elif metrics.get("publish", {}).get("quantized"):
            self._suggest_correction(difference)
        self._say_if_any(self._failures.follow(metrics))
        self._say_if_any(self._equal_rewards.follow(metrics))

    def _suggest_correction(self, difference: float) -> None:
        """Say once that engines which quantize sample from another policy, if tokens are not weighed for it."""
        if difference > LEAST_CORRECTED and not (self._is_corrected or self._has_suggested):
            self._has_suggested = True
            self._progress.say(
                f"warning: the engines quantize, and their log-probs differ from the trainer's by {difference:.2g} on "
                "average: --rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef 2 weighs "
                "tokens for it"
            )

    def _say_if_any(self, text: str | None) -> None:
        if text is not None:
            self._progress.say(text)

    def _write_samples(self, version: int, batches: Sequence[BatchFacts], log_probs: Mapping[int, np.ndarray]) -> None:
        parts = (
            (part, of_part)
            for slot, batch in enumerate(batches)
            for part, of_part in _divide_log_probs(batch.parts, log_probs.get(slot))
            # Nothing is shown of responses that are not scored.
            if part.responses
        )
        # A group may be split over several consecutive slots.
        for _, of_group in itertools.groupby(parts, key=lambda item: item[0].prompt_index):
            left = self._samples.left(version)
            if left <= 0:
                return
            of_parts = list(of_group)
            first = of_parts[0][0]
            responses = [item for part, of_part in of_parts for item in zip(part.responses, of_part, strict=True)]
            advantages: Sequence[Sequence[float]] = ()
            if self._has_turn_credit:
                advantages = [of_turns.tolist() for of_turns in self._advantages.compute_turns(first)]
            # Advantages that are divided over the whole update say little about one group.
            elif not self._advantages.is_divided:
                advantages = [[advantage] for advantage in self._advantages(first).tolist()]
            sampled = self._decode_group(first.row, first.prompt_tokens, responses[:left], advantages)
            self._samples.write(version, [sampled])

    def _decode_group(
        self,
        row: str,
        prompt_tokens: bytes,
        responses: Sequence[tuple[Response, np.ndarray | None]],
        advantages: Sequence[Sequence[float]] = (),
    ) -> SampledGroup:
        """Decode a group; each response comes with the trainer's log-probs of its tokens, or with None.

        `advantages` are those of each response: one, or those of its turns.
        """
        tokens = (prompt_tokens, *(response.tokens for response, _ in responses))
        prompt, *texts = self._decode([decode_tokens(data).tolist() for data in tokens])
        sampled = [
            SampledResponse(
                text,
                response.reward,
                {name: value for name, value in response.components.items() if value is not None},
                num_tokens=len(response.tokens) // 4,
                finish_reason=response.finish_reason,
                failure=response.failure,
                advantage=of_response[0] if len(of_response) == 1 else None,
                tokens=self._decode_tokens(response, trainer_N) if self._with_tokens else None,
                turns=sample_turns(
                    response,
                    len(prompt_tokens) // 4,
                    self._decode,
                    advantages=of_response if self._has_turn_credit else (),
                ),
            )
            for text, (response, trainer_N), of_response in zip(
                texts, responses, advantages or itertools.repeat(()), strict=False
            )
        ]
        return SampledGroup(row, prompt, sampled)

    def _decode_tokens(self, response: Response, trainer_N: np.ndarray | None) -> SampledTokens:
        trainer: list[float] | None = None
        if trainer_N is not None:
            # As the engine's: 0 for what the environment wrote.
            spread = np.zeros(len(response.tokens) // 4, dtype=trainer_N.dtype)
            spread[mask_sampled(response)] = trainer_N
            trainer = _round(spread)
        return SampledTokens(
            texts=self._decode([[token] for token in decode_tokens(response.tokens).tolist()]),
            engine=_round(decode_log_probs(response.log_probs)),
            trainer=trainer,
        )


def _divide_log_probs(
    parts: Iterable[GroupPart], log_probs_N: np.ndarray | None
) -> Iterator[tuple[GroupPart, list[np.ndarray | None]]]:
    """Divide the log-probs of a slot, which follow the order of its responses, over these."""
    begin = 0
    for part in parts:
        of_part: list[np.ndarray | None] = []
        for response in part.responses:
            end = begin + count_sampled(response)
            of_part.append(None if log_probs_N is None else log_probs_N[begin:end])
            begin = end
        yield part, of_part


def _round(log_probs: np.ndarray) -> list[float]:
    """Round to the decimals that single precision resolves."""
    return [round(value, _DECIMALS) for value in log_probs.tolist()]


class Untraced:
    """Records nothing: for runs without a trace."""

    recorder = None
    steps = None

    def begin(self) -> None:
        pass

    def end(self, version: int) -> None:
        pass

    def close(self) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class RunLog:
    """The records of a rank while the run lives: reports for people, times, and the trace."""

    reporter: Reporter = dataclasses.field(default_factory=Reporter)
    timeline: Timeline = dataclasses.field(default_factory=Timeline)
    trace: Union["RankTrace", Untraced] = dataclasses.field(default_factory=Untraced)
    finish_iteration: Callable[[int], None] = lambda version: None
    """Called by every rank when the iteration of a version is over."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show a part of an iteration, and count its time."""
        self.reporter.phase(name)
        with self.timeline.span(name):
            yield


def open_log(
    rank: Rank, version: int, client: RolloutClient | None = None, advantages: GroupAdvantages | None = None
) -> RunLog:
    """Open the files that a run writes from a version on; every rank calls it.

    Without engines there are neither a `client` nor `advantages`.
    """
    settings, startup = rank.settings, rank.startup
    trace: RankTrace | Untraced = Untraced()
    if settings.observe.trace == "on":
        trace = importlib.import_module(_TRACING).open_trace(settings.folder, rank.session, version, client, rank.say)
        rank.stack.callback(trace.close)
    timeline, reporter = Timeline(recorder=trace.recorder), Reporter()
    if rank.session.rank == 0:
        others = None if rank.recipe.open_sinks is None else rank.recipe.open_sinks()
        reporter = build_reporter(settings, version, advantages, others)
        rank.stack.callback(reporter.close)
        described = describe_run(settings, has_own_model=rank.recipe is STAND_ALONE)
        run_folder.write_saved_config(settings.folder / run_folder.CONFIG_FILE, described)
        if client is not None:
            reporter.follow(client.status)
        startup.end_part("the rest")
        startup.say(f"rank 0: {startup.describe_parts()}")
        startup.say("all is ready")
        timeline.restart(startup.seconds)
    return RunLog(reporter, timeline, trace, rank.recipe.finish_iteration)


def build_reporter(
    settings: RunSettings,
    version: int,
    advantages: GroupAdvantages | None,
    others: Sequence[Sink] | None = None,
) -> Reporter:
    """Build rank 0's reporter of a run from a version on; drop the records of that version and later ones.

    If a run does not resume, its folder's earlier files are copied first. `advantages` is None without engines.
    `others` replace the sinks that flags ask for.
    """
    observe, folder, num_iterations = settings.observe, settings.folder, settings.training.train_iters
    assert num_iterations is not None
    progress = progress_of(observe, num_iterations, sys.stdout)
    metrics = MetricsFile(folder / metrics_file.FILE_NAME)
    samples = None if advantages is None else SamplesFile(folder / samples_file.FILE_NAME, observe.log_samples)
    for file in filter(None, (metrics, samples)):
        if settings.checkpoint.load is None and (copy := file.set_aside()) is not None:
            progress.say(f"note: what an earlier run wrote into {file.path} is now {copy.name}")
        file.restart(version)
    if not version:
        # Its findings are about the weights of an earlier run.
        (folder / run_folder.DRIFT_FILE).unlink(missing_ok=True)
    sinks = sinks_of(observe, settings.name, version, progress.say) if others is None else Sinks(others, progress.say)
    if advantages is None or samples is None:
        return MetricsReporter(0, metrics, sinks, progress)
    decode = build_decoder(str(settings.model.hf_model))
    return SamplesReporter(settings, metrics, samples, sinks, progress, decode, advantages)


def sample_turns(
    response: Response, num_prompt_tokens: int, decode: Decode, advantages: Sequence[float] = ()
) -> list[SampledTurn] | None:
    """Decode what each side wrote; None if the policy wrote everything in one turn.

    `advantages` are those of the policy's turns, in order, if they have their own.
    """
    turns = list_turns(response)
    if len(turns) < 2:
        return None
    tokens = decode_tokens(response.tokens).tolist()
    texts = decode([tokens[turn.start : turn.end] for turn in turns])
    rewards, of_turns = iter(response.turn_rewards), iter(advantages)
    return [
        SampledTurn(
            "environment" if turn.is_given else "policy",
            text,
            turn.end - turn.start,
            None if turn.is_given else next(rewards, None),
            None if turn.after is None else _find_place(turn.after, num_prompt_tokens, turns),
            None if turn.is_given else next(of_turns, None),
        )
        for turn, text in zip(turns, texts, strict=True)
    ]


def _find_place(after: int, num_prompt_tokens: int, turns: Sequence[Turn]) -> SampledPlace:
    """Find the turn that has the token before `after`, or the prompt's token."""
    if after <= 0:
        return SampledPlace(-1, num_prompt_tokens + after if after else None)
    number, turn = next((number, turn) for number, turn in enumerate(turns) if turn.start < after <= turn.end)
    return SampledPlace(number, None if after == turn.end else after - turn.start)

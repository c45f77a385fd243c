"""Checks of an audit log: its events must contradict neither each other nor the promises of the run."""

import itertools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from megatron_rl.errors import InputError
from megatron_rl.shared.protocol.provenance import (
    FINISH_REASONS,
    derive_group_seed,
    derive_refill_seed,
    name_source,
    tag_version,
)
from megatron_rl.shared.protocol.selection import (
    SelectionByArrival,
    SelectionBySignal,
    has_signal,
    open_selection,
)
from megatron_rl.shared.protocol.slots import Claim, Place, divide
from megatron_rl.shared.protocol.turns import ENVIRONMENT, list_rewards
from megatron_rl.shared.records import audit_events
from megatron_rl.shared.records.audit_chain import Breach, BreachName, Chain
from megatron_rl.shared.records.audit_events import ResponseRecord, SpanRecord, Submit
from megatron_rl.shared.records.audit_log import find_files, find_first_file, name_file, read_links, read_log_lines
from megatron_rl.shared.records.audit_report import (
    IterationSummary,
    ObjectiveChange,
    Proofs,
    PutOff,
    Report,
    SourceSummary,
)
from megatron_rl.shared.records.journal import JOURNALS, find_damage

Problems = Iterator[tuple[BreachName, str]]
"""Breaches, each with a detail."""


class _Attempt:
    """An iteration from its submission to its end."""

    def __init__(self, submit: audit_events.Submit, engines: set[str], line: int) -> None:
        self.submit = submit
        self.engines = engines
        self.summary = IterationSummary(submit.version, submit.fingerprint, line)
        self.selection: SelectionBySignal | SelectionByArrival | None = None
        self.groups: dict[int, int] = {}
        self.claimed: set[int] = set()
        self.units: set[Place] = set()
        self.num_cut = 0
        """Number of groups with a response that was cut off."""


class _EventChecker:
    """The check of the events against earlier events; it takes them in order."""

    def __init__(self) -> None:
        self.run: str | None = None
        self.num_starts = 0
        self.num_recovered = 0
        self.summaries: list[IterationSummary] = []
        self.evaluations: list[audit_events.Evaluate] = []
        self.proofs = Proofs()
        self.changes: list[ObjectiveChange] = []
        self._objective: dict[str, str] | None = None
        self._published: audit_events.Publish | None = None
        self._engines: set[str] = set()
        # Parameters compared and their total, for the version published last, on the engine with the fewest.
        self._compared: tuple[int, int] | None = None
        self._attempt: _Attempt | None = None
        self._highest: int | None = None
        # The prompts that are put off after each complete version.
        self._put_off: dict[int, list[PutOff]] = {-1: []}
        self._puts_off = False

    def take(self, event: audit_events.AnyEvent, line: int) -> Problems:
        match event:
            case audit_events.Start():
                return self._start(event)
            case audit_events.Recovered():
                self.num_recovered += 1
            case audit_events.Publish():
                return self._publish(event)
            case audit_events.NotProven():
                return iter([(BreachName.NOT_PROVEN, f"version {event.version}: {event.reason}")])
            case audit_events.Submit():
                return self._submit(event, line)
            case audit_events.GroupFinished():
                return self._group(event)
            case audit_events.SlotClaimed():
                return self._claim(event)
            case audit_events.MismatchMeasured():
                return self._mismatch(event)
            case audit_events.ObjectiveStated():
                self._compare_objective(event)
            case audit_events.Complete():
                return self._complete(event)
            case audit_events.Fail():
                self._end(event.version, "failed")
            case audit_events.Evaluate():
                self.evaluations.append(event)
                return self._check_published(event, "evaluated")
        return iter(())

    def _start(self, event: audit_events.Start) -> Problems:
        self.num_starts += 1
        if self.run is None:
            self.run = event.run
        elif event.run != self.run:
            yield BreachName.FOREIGN_RUN, f"the log belongs to run {self.run!r}, and this event to {event.run!r}"

    def _compare_objective(self, event: audit_events.ObjectiveStated) -> None:
        if self._objective is not None and (changes := audit_events.list_changes(self._objective, event.values)):
            self.changes.append(ObjectiveChange(event.version, changes))
        self._objective = event.values

    def _publish(self, event: audit_events.Publish) -> Problems:
        before = self._published
        if before is None or (before.version, before.fingerprint) != (event.version, event.fingerprint):
            self._engines, self._compared = set(), None
        self._published = event
        if isinstance(event.base, str) and event.base not in self.proofs.bases:
            if self.proofs.bases:
                detail = f"version {event.version}: {event.base[:12]} after {self.proofs.bases[-1][:12]}"
                yield BreachName.OTHER_BASE, detail
            self.proofs.bases.append(event.base)
        for report in event.engines:
            self._engines.add(report.engine)
            self.proofs.count(report, event.proof)
            if report.parameters:
                found = (report.compared, report.parameters)
                self._compared = found if self._compared is None else min(self._compared, found)
            if event.proof == "digests" and report.compared < report.parameters:
                yield (
                    BreachName.NOT_COMPARED,
                    f"engine {report.engine}, version {event.version}: {report.compared} of {report.parameters}, and "
                    "the run accepts no weaker proof",
                )
            if (report.version, report.fingerprint) != (event.version, event.fingerprint):
                yield (
                    BreachName.ENGINE_DIFFERS,
                    f"engine {report.engine} reports version {report.version} ({report.fingerprint[:12]}), "
                    f"published was {event.version} ({event.fingerprint[:12]})",
                )
            probe = report.probe
            if probe is not None and probe.bound is not None and not probe.mean <= probe.bound:
                yield (
                    BreachName.PROBE_DIFFERS,
                    f"engine {report.engine}, version {event.version}: by {probe.mean:.3g} on average, beyond "
                    f"{probe.bound:g}",
                )

    def _submit(self, event: audit_events.Submit, line: int) -> Problems:
        self._attempt = attempt = _Attempt(event, self._engines, line)
        attempt.summary.compared = self._compared
        self.summaries.append(attempt.summary)
        yield from self._check_published(event, "submitted")
        if self._highest is not None and event.version > self._highest + 1:
            yield BreachName.SKIPPED_VERSION, f"version {event.version} follows {self._highest}"
        self._highest = event.version
        # This attempt decides again what the version puts off.
        self._put_off.pop(event.version, None)
        self._puts_off |= event.plan.tail == "carry" or event.num_carried > 0
        division = None
        try:
            division = divide(event.plan)
        except InputError as error:
            yield BreachName.WRONG_SLOT, str(error)
        num_prompts = event.plan.count_submitted(event.num_carried)
        if num_prompts == len(event.prompts) == len(event.seeds):
            # Only if the prompts prove the number: a forged number may be larger than the memory.
            attempt.selection = None if division is None else open_selection(division, event.num_carried)
        else:
            counts = f"{num_prompts} prompts, {len(event.prompts)} hashes and {len(event.seeds)} seeds"
            yield BreachName.WRONG_COUNT, f"version {event.version} is submitted with {counts}"
        put_off = self._put_off.get(event.version - 1)
        if put_off is not None:
            due = [one.tokens for one in put_off[: event.plan.count_carried(len(put_off))]]
            if event.prompts[: event.num_carried] != due:
                detail = f"version {event.version} takes {event.num_carried} of the {len(put_off)}, {len(due)} are due"
                yield BreachName.NOT_CARRIED, detail
        for prompt, seed in enumerate(event.seeds):
            wanted = derive_group_seed(self.run or "", event.version, prompt)
            if seed != wanted:
                yield BreachName.WRONG_SEED, f"prompt {prompt} is submitted with seed {seed}, wanted {wanted}"

    def _check_published(self, event: audit_events.Submit | audit_events.Evaluate, what: str) -> Problems:
        if self._published is None or self._published.version != event.version:
            yield BreachName.NOT_PUBLISHED, f"version {event.version} is {what} but was not published last"
        elif self._published.fingerprint != event.fingerprint:
            published = self._published.fingerprint[:12]
            yield (
                BreachName.FOREIGN_FINGERPRINT,
                f"version {event.version} is {what} with {event.fingerprint[:12]} and was published with {published}",
            )

    def _group(self, event: audit_events.GroupFinished) -> Problems:
        attempt = self._current(event.version)
        if attempt is None or not 0 <= event.prompt < len(attempt.submit.prompts):
            yield BreachName.NEVER_SUBMITTED, f"prompt {event.prompt} of version {event.version}"
            return
        if event.prompt in attempt.groups:
            yield BreachName.FINISHED_TWICE, f"prompt {event.prompt} of version {event.version}"
            return
        attempt.groups[event.prompt] = len(list_rewards(event.responses))
        if attempt.selection is not None:
            attempt.selection.learn(event.prompt, has_signal(event.responses, attempt.submit.plan))
        _count(attempt.summary, event)
        attempt.num_cut += any(response.finish_reason == "cut" for response in event.responses)
        if attempt.num_cut > attempt.submit.plan.num_tail:
            count = f"{attempt.num_cut} of at most {attempt.submit.plan.num_tail} groups"
            yield BreachName.CUT_OFF, f"version {event.version} has cut off {count}"
        if event.prompt_hash != attempt.submit.prompts[event.prompt]:
            yield BreachName.WRONG_PROMPT, f"prompt {event.prompt} of version {event.version} has other tokens"
        if len(event.responses) != attempt.submit.plan.group_size:
            count = f"{len(event.responses)} responses of {attempt.submit.plan.group_size}"
            yield BreachName.INCOMPLETE_GROUP, f"prompt {event.prompt} of version {event.version} has {count}"
        seed = derive_group_seed(self.run or "", event.version, event.prompt)
        for number, response in enumerate(event.responses):
            where = f"response {number} of prompt {event.prompt} of version {event.version}"
            wanted = derive_refill_seed(seed + number, len(response.refilled))
            if response.seed != wanted:
                yield BreachName.WRONG_SEED, f"{where} has seed {response.seed}, wanted {wanted}"
            for name, detail in find_response_problems(response, attempt.submit, attempt.engines):
                yield name, f"{where} {detail}"

    def _claim(self, event: audit_events.SlotClaimed) -> Problems:
        attempt = self._current(event.version)
        where = f"slot ({event.replica}, {event.index}) of version {event.version}"
        if attempt is None:
            yield BreachName.CLAIM_OUTSIDE, where
            return
        claim = Claim(replica=event.replica, index=event.index, prompts=event.prompts)
        if claim.place in attempt.units:
            yield BreachName.SLOT_CLAIMED_TWICE, where
            return
        attempt.units.add(claim.place)
        attempt.summary.num_claims += 1
        problem = attempt.selection.find_problem(claim) if attempt.selection else None
        if problem:
            yield BreachName.WRONG_SLOT, f"version {event.version}: {problem}"
        for prompt in event.prompts:
            if prompt not in attempt.groups:
                yield BreachName.CLAIM_UNFINISHED, f"{where} holds prompt {prompt}"
            elif prompt in attempt.claimed:
                yield BreachName.CLAIMED_TWICE, f"{where} holds prompt {prompt}, and so does another"
            attempt.claimed.add(prompt)

    def _mismatch(self, event: audit_events.MismatchMeasured) -> Problems:
        attempt = self._current(event.version)
        if attempt is not None:
            attempt.summary.mismatch = event.mean
        if event.bound is not None and (event.mean is None or not event.mean <= event.bound):
            mean = "a number that is not finite" if event.mean is None else f"{event.mean:.3g}"
            yield (
                BreachName.MISMATCH,
                f"version {event.version}: the trainer's log-probs differ from the engines' by {mean} on average, "
                f"beyond {event.bound:g}",
            )

    def _complete(self, event: audit_events.Complete) -> Problems:
        attempt = self._current(event.version)
        if attempt is None:
            yield BreachName.COMPLETE_OUTSIDE, f"version {event.version}"
            return
        for prompt in _list_trained(attempt):
            if prompt not in attempt.groups:
                yield BreachName.NEVER_FINISHED, f"prompt {prompt} of version {event.version}"
            elif prompt not in attempt.claimed:
                yield BreachName.NEVER_CLAIMED, f"prompt {prompt} of version {event.version}"
        said = (event.num_groups, event.num_responses)
        plan = attempt.submit.plan
        is_all = plan.count_submitted(attempt.submit.num_carried) == plan.num_prompts
        trained = attempt.groups if is_all else attempt.claimed & attempt.groups.keys()
        found = (len(trained), sum(attempt.groups[prompt] for prompt in trained))
        if said != found:
            yield (
                BreachName.WRONG_COUNT,
                f"version {event.version}: the trainer reports {said[0]} groups and {said[1]} responses, the log has "
                f"{found[0]} and {found[1]}",
            )
        if attempt.selection is not None:
            self._gather(attempt, attempt.selection.put_off())
        self._end(event.version, "complete")

    def _gather(self, attempt: _Attempt, put_off: Sequence[int]) -> None:
        """Note the prompts that are put off after a version; unknown if the log begins in the middle of a run."""
        submit = attempt.submit
        before = self._put_off.get(submit.version - 1)
        if before is not None:
            self._put_off[submit.version] = before[submit.num_carried :] + [
                PutOff(submit.version, prompt, submit.prompts[prompt], submit.plan.group_size) for prompt in put_off
            ]

    @property
    def put_off(self) -> list[PutOff] | None:
        """Prompts that are put off after the last complete version; None if unknown."""
        if self._highest is None or not self._puts_off:
            return []
        last = self._highest
        return self._put_off.get(last, self._put_off.get(last - 1))

    def _current(self, version: int) -> _Attempt | None:
        attempt = self._attempt
        return attempt if attempt is not None and attempt.submit.version == version else None

    def _end(self, version: int, outcome: str) -> None:
        if (attempt := self._current(version)) is not None:
            attempt.summary.outcome = outcome
            self._attempt = None


def _list_trained(attempt: _Attempt) -> Sequence[int]:
    """List the prompts that must have been trained on, and those without a group that could change the choice."""
    if attempt.selection is None:
        return range(len(attempt.submit.prompts))
    still_wanted = [
        prompt
        for prompt in range(attempt.selection.num_prompts)
        if prompt not in attempt.groups and attempt.selection.is_wanted(prompt, 0)
    ]
    return sorted({*still_wanted, *attempt.selection.chosen()})


def verify(path: Path, heads: Sequence[str] = ()) -> Report:
    """Read and check a log from its first line to its last, over all of its files, and the journals next to it."""
    chain, checker, breaches = Chain(heads), _EventChecker(), []
    files: list[tuple[str, int]] = []
    number, expected, first = 0, 0, find_first_file(path)
    for index, file in find_files(first).items():
        num_before, link = number, chain.head
        if index != expected:
            detail = f"{name_file(first, expected).name} is missing before {file.name}"
            breaches.append(Breach(BreachName.MISSING_FILE, number + 1, detail))
        for number, line in enumerate(read_log_lines(file), start=num_before + 1):
            event = chain.take(number, line)
            if event is not None:
                breaches += [Breach(name, number, detail) for name, detail in checker.take(event, number)]
            if number == num_before + 1 and index == expected and not _follows(index, link, line, event):
                detail = f"{file.name} does not continue where the file before it ends"
                breaches.append(Breach(BreachName.EXCHANGED_FILE, number, detail))
        files.append((file.name, number - num_before))
        expected = index + 1
    chain.finish()
    lines = {summary.version: summary.line for summary in checker.summaries}
    for version, damage in find_damage(first.parent / JOURNALS):
        breaches.append(Breach(BreachName.DAMAGED_JOURNAL, lines.get(version, number), str(damage)))
    return Report(
        run=checker.run or "",
        files=files,
        head=chain.head,
        num_covered=max(chain.heads_found.values(), default=0),
        num_starts=checker.num_starts,
        num_recovered=checker.num_recovered,
        iterations=checker.summaries,
        evaluations=checker.evaluations,
        proofs=checker.proofs,
        changes=checker.changes,
        put_off=checker.put_off,
        breaches=sorted([*chain.breaches, *breaches], key=lambda breach: breach.line),
    )


def _follows(index: int, link: str, line: bytes, event: audit_events.AnyEvent | None) -> bool:
    """Return whether a file's first line, if it can be read, continues the file before it."""
    links = read_links(line.removesuffix(b"\n"))
    expected = audit_events.Continued(file=index) if index else event
    return links is None or (links.prev == link and event in (None, expected))


def _count(summary: IterationSummary, event: audit_events.GroupFinished) -> None:
    summary.num_groups += 1
    summary.num_restored += event.is_restored
    summary.num_responses += len(event.responses)
    summary.num_tokens += sum(response.num_tokens for response in event.responses)
    summary.engines.update(response.engine for response in event.responses if response.engine)
    summary.unscored.update(response.cause for response in event.responses if response.reward is None)
    summary.refilled.update(cause for response in event.responses for cause in response.refilled)
    summary.sources.setdefault(name_source(event.row), SourceSummary()).count(event)


def find_response_problems(response: ResponseRecord, submit: Submit, engines: Collection[str]) -> Problems:
    """Yield what a response contradicts: what was submitted, and the engines that hold the version."""
    if response.reward is None and not response.cause:
        yield BreachName.LEFT_OUT, "has no reward, and no cause of that"
    if response.reward is None and not response.num_tokens:
        # Its environment or agent failed before the policy said a word.
        return
    if response.fingerprint != submit.fingerprint:
        wanted = submit.fingerprint[:12]
        yield BreachName.FOREIGN_FINGERPRINT, f"has fingerprint {response.fingerprint[:12]}, wanted {wanted}"
    for engine in dict.fromkeys(span.engine or response.engine for span in response.spans) or (response.engine,):
        if engine not in engines:
            yield BreachName.UNKNOWN_ENGINE, f"comes from engine {engine}, which did not report the version"
    may_act = submit.sampling.max_turns > 0
    versions = sorted({span.version for span in response.spans if not (may_act and span.version == ENVIRONMENT)})
    position = 0
    for span in response.spans:
        position = span.end if span.start == position and span.end >= span.start else -1
    if len(versions) > 1:
        yield BreachName.TWO_VERSIONS, f"has versions {' and '.join(versions)}"
    elif position != response.num_tokens or versions not in ([], [tag_version(submit.version)]):
        spans = [(span.version, span.start, span.end) for span in response.spans]
        yield BreachName.WRONG_SPAN, f"has {response.num_tokens} tokens and spans {spans}"
    if response.finish_reason not in FINISH_REASONS:
        yield BreachName.NO_FINISH_REASON, f"has finish reason {response.finish_reason!r}"
    yield from _branch_problems(response, may_act)
    num_turns = 0
    for part in _divide_spans(response):
        given = [span.version == ENVIRONMENT for span in part]
        if may_act and (given[-1:] == [True] or any(one and other for one, other in itertools.pairwise(given))):
            yield BreachName.WRONG_SPAN, "ends with a turn of the environment, or has two in a row"
        num_turns += sum(not given for given, _ in itertools.groupby(given))
    if response.turn_rewards and len(response.turn_rewards) != num_turns:
        yield BreachName.WRONG_COUNT, f"has rewards of {len(response.turn_rewards)} turns, and {num_turns} turns"
    if may_act and num_turns > submit.sampling.max_turns:
        yield BreachName.CUT_OFF, f"has {num_turns} turns of {submit.sampling.max_turns}"
    if response.finish_reason in ("limit", "failed") and not may_act:
        yield BreachName.CUT_OFF, f"ends by {response.finish_reason}, without an environment"
    if response.finish_reason == "cut":
        is_allowed = submit.plan.tail == "truncate" and 0 < response.num_tokens < submit.sampling.max_tokens
        if not is_allowed:
            yield BreachName.CUT_OFF, f"is cut off after {response.num_tokens} tokens"
    limit = submit.sampling.max_tokens
    if response.num_tokens > limit or (response.finish_reason == "length" and response.num_tokens != limit):
        yield BreachName.CUT_OFF, f"ends by {response.finish_reason} after {response.num_tokens} tokens of {limit}"


def _divide_spans(response: ResponseRecord) -> list[list[SpanRecord]]:
    """Divide the spans of a response where its branches begin."""
    begins = [0, *(start for start, _ in response.branches)]
    ends = [*begins[1:], response.num_tokens]
    return [
        [span for span in response.spans if begin <= span.start < end]
        for begin, end in zip(begins, ends, strict=True)
        if begin < end
    ]


def _branch_problems(response: ResponseRecord, may_act: bool) -> Problems:
    begins = {span.start for span in response.spans}
    starts = [start for start, _ in response.branches]
    if starts and not may_act:
        yield BreachName.WRONG_SPAN, "branches, without an environment"
    if starts != sorted(set(starts)) or not begins.issuperset(starts):
        yield BreachName.WRONG_SPAN, f"has branches at tokens {starts}, where no spans begin"
    if any(after >= start for start, after in response.branches):
        yield BreachName.WRONG_SPAN, "has a branch that follows a token after it"

"""The responses whose log-probs can be computed again: journals hold them, and the audit log holds their hashes."""

import dataclasses
import itertools
import random
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import msgspec

from megatron_rl.errors import ForeignVersion
from megatron_rl.shared.protocol.wire import Response
from megatron_rl.shared.records import audit_events
from megatron_rl.shared.records.audit_chain import Breach, BreachName
from megatron_rl.shared.records.audit_log import find_files, find_first_file, hash_content, read_log_lines
from megatron_rl.shared.records.journal import JOURNALS, JournalDamaged, find_journal, read_groups


@dataclasses.dataclass(frozen=True)
class Sample:
    """A response as the engine gave it, with its line in the log."""

    version: int
    prompt: int
    number: int
    temperature: float
    prompt_tokens: bytes
    response: Response
    line: int

    def __str__(self) -> str:
        return (
            f"response {self.number} of prompt {self.prompt} of version {self.version} (engine {self.response.engine})"
        )


@dataclasses.dataclass(frozen=True)
class KeptSamples:
    """The responses of a run that can be computed again."""

    fingerprints: dict[int, str]
    """Fingerprint of the last submission of each version."""
    samples: dict[int, list[Sample]]
    """Responses by version, at least one for each."""
    reasons: dict[int, str]
    """Reasons why a version has none, by version."""
    breaches: list[Breach]


@dataclasses.dataclass
class _Logged:
    """The log's record of the last attempt at a version."""

    submit: audit_events.Submit
    groups: dict[int, tuple[int, audit_events.GroupFinished]] = dataclasses.field(default_factory=dict)
    """Groups by prompt, each with its line."""


def read_kept(run: Path) -> KeptSamples:
    """Read log and journals of a run, given by its folder or its log."""
    first = find_first_file(run)
    folder = first.parent / JOURNALS
    result = KeptSamples({}, {}, {}, [])
    for version, logged in sorted(_logged(first, folder).items()):
        result.fingerprints[version] = logged.submit.fingerprint
        path = find_journal(folder, version)
        try:
            samples, breaches = _samples(path, logged)
        except FileNotFoundError:
            result.reasons[version] = f"its journal {path} is no longer kept (--rollout-retain-journals keeps more)"
            continue
        except (OSError, ForeignVersion, JournalDamaged) as error:
            result.reasons[version] = f"its journal cannot be read: {error}"
            continue
        result.breaches.extend(breaches)
        if samples:
            result.samples[version] = samples
        else:
            result.reasons[version] = f"its journal {path} holds no response whose hashes are in the log"
    return result


def choose_samples(samples: Mapping[int, list[Sample]], count: int, seed: str) -> list[Sample]:
    """Choose `count` samples, or all, spread evenly over the versions; the seed decides which."""
    queues = [
        random.Random(f"{seed} {version}").sample(of_version, min(count, len(of_version)))
        for version, of_version in sorted(samples.items())
    ]
    chosen: list[Sample] = []
    while len(chosen) < count and any(queues):
        chosen += [queue.pop() for queue in queues if queue]
        queues = [queue for queue in queues if queue]
    return sorted(chosen[:count], key=lambda sample: (sample.version, sample.prompt, sample.number))


def _logged(first: Path, journals: Path) -> dict[int, _Logged]:
    """Read the log's record of each version; groups, of which a log may have many, only for versions with a journal."""
    logged: dict[int, _Logged] = {}
    decoder = msgspec.json.Decoder(audit_events.Submit | audit_events.GroupFinished)
    lines = itertools.chain.from_iterable(map(read_log_lines, find_files(first).values()))
    for number, line in enumerate(lines, start=1):
        if b'"event":"submit"' not in line and b'"event":"group"' not in line:
            continue
        try:
            event = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            # `verify` has already reported the line.
            continue
        if isinstance(event, audit_events.Submit):
            logged[event.version] = _Logged(event)
        elif event.version in logged and find_journal(journals, event.version).exists():
            logged[event.version].groups[event.prompt] = (number, event)
    return logged


def _samples(path: Path, logged: _Logged) -> tuple[list[Sample], list[Breach]]:
    found: dict[int, list[Sample]] = {}
    others: defaultdict[int, list[str]] = defaultdict(list)
    for group in read_groups(path):
        line, event = logged.groups.get(group.prompt_index, (0, None))
        if event is None or not _is_of_the_same_request(group.responses, event):
            continue
        pairs = zip(group.responses, event.responses, strict=True)
        differing = [number for number, pair in enumerate(pairs) if not _is_same(*pair)]
        if hash_content(group.prompt_tokens) != event.prompt_hash:
            others[line].append(f"prompt {event.prompt} has other tokens")
        elif differing:
            others[line].append(f"response {differing[0]} of prompt {event.prompt} is another response")
        else:
            found[group.prompt_index] = [
                Sample(
                    version=event.version,
                    prompt=event.prompt,
                    number=number,
                    temperature=logged.submit.sampling.temperature,
                    prompt_tokens=group.prompt_tokens,
                    response=response,
                    line=line,
                )
                for number, response in enumerate(group.responses)
                if response.tokens
            ]
    found_lines = {samples[0].line for samples in found.values() if samples}
    breaches = [
        Breach(BreachName.OTHER_JOURNAL, line, f"{path.name}: {details[0]}")
        for line, details in others.items()
        if line not in found_lines
    ]
    return [sample for samples in found.values() for sample in samples], breaches


def _is_of_the_same_request(responses: list[Response], event: audit_events.GroupFinished) -> bool:
    """Return whether both have the same weights and seeds; a journal may also hold groups of other attempts."""
    of_journal = [(response.fingerprint, response.seed) for response in responses]
    return of_journal == [(record.fingerprint, record.seed) for record in event.responses]


def _is_same(response: Response, record: audit_events.ResponseRecord) -> bool:
    hashes = (hash_content(response.tokens), hash_content(response.log_probs))
    return hashes == (record.tokens, record.log_probs)

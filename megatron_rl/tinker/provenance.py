"""The sequences that engines sampled, and the check of what data say of them.

A datum may name, for each of its tokens, the sequence that the token is from: of its prompt, or of what was sampled
after it. A claim that the record does not bear out is refused, and nothing is trained on. Every sequence is in the
service's folder (`sequences.bin`), so that the check holds after a restart.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from megatron_rl.errors import InputError
from megatron_rl.shared.records.append_file import AppendFile
from megatron_rl.tinker.losses import ADVANTAGES, LOG_PROBS, WEIGHTS, ServedLoss, find_weight
from megatron_rl.tinker.work import Datum

FILE_NAME = "sequences.bin"
_MOST_KNOWN = 1 << 17
"""The last sequences, which data can name; the file has all."""


class TokenClaim(NamedTuple):
    """Positions that a datum says to be those of a sequence's prompt, or of what was sampled after it."""

    sequence: str
    is_sampled: bool
    offset: int
    length: int


class Claims(NamedTuple):
    """The sequences that a datum names for its input and for its targets."""

    inputs: tuple[TokenClaim, ...]
    targets: tuple[TokenClaim, ...]


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that engines sampled."""

    identity: str
    owner: str
    """The hash of the key of its client."""
    model: str | None
    """The model whose weights sampled it; None for the base."""
    num_steps: int
    """The steps that the model had made."""
    version: int
    fingerprint: str
    engine: str
    seed: int
    branch: int = 0
    """The loads of checkpoints that its model had seen."""
    temperature: float = 1.0
    prompt: bytes
    tokens: bytes
    log_probs: bytes


@dataclasses.dataclass(frozen=True)
class Bearer:
    """The client and the model that data are for."""

    owner: str
    model: str
    num_steps: int
    loads: Sequence[int] = ()
    """The steps of the model after each load of a checkpoint."""


class SequenceRecord:
    """All sequences of a service."""

    def __init__(self, folder: Path) -> None:
        self._file = AppendFile(folder / FILE_NAME)
        known, size = read_sequences(folder)
        # A process that was killed may have left the begin of a record.
        self._file.cut(size)
        self._known: dict[str, Sampled] = {one.identity: one for one in known}

    def close(self) -> None:
        self._file.close()

    def add(self, sampled: Sampled) -> None:
        encoded = msgspec.msgpack.encode(sampled)
        self._file.append(len(encoded).to_bytes(4, "little") + encoded)
        self._known[sampled.identity] = sampled
        while len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def check(
        self, data: Sequence[Datum], claims: Sequence[Claims], bearer: Bearer, is_required: bool
    ) -> Mapping[str, float]:
        """Raise an InputError for the first claim that is wrong; return metrics of the ages of what was sampled."""
        ages = [
            age
            for number, (datum, one) in enumerate(zip(data, claims, strict=True))
            for age in self._check_datum(f"datum {number}", datum, one, bearer, is_required)
        ]
        if not ages:
            return {}
        return {"age:max": float(max(ages)), "age:min": float(min(ages))}

    def _check_datum(self, name: str, datum: Datum, claims: Claims, bearer: Bearer, is_required: bool) -> Iterator[int]:
        if not claims.inputs and not claims.targets:
            if is_required:
                raise InputError(f"{name} names no sequences, and --require-provenance trains on no other data")
            return
        if not claims.inputs or not claims.targets:
            raise InputError(f"{name} names the sequences of its input or of its targets, and not both: send both")
        if datum.width > 1:
            raise InputError(f"{name} has {datum.width} targets a position, which no sequence has sampled")
        inputs = {kind: np.frombuffer(value, "<f4") for kind, value in datum.inputs.items()}
        weights = inputs.get(WEIGHTS, inputs.get(ADVANTAGES))
        yield from self._check_tiles(f"{name}'s input", claims.inputs, datum.tokens, None, None, bearer)
        yield from self._check_tiles(
            f"{name}'s targets", claims.targets, datum.targets, inputs.get(LOG_PROBS), weights, bearer
        )
        if LOG_PROBS in inputs and weights is not None:
            self._check_contexts(f"{name}'s targets", datum, claims.targets, weights, bearer)

    def _check_contexts(
        self, name: str, datum: Datum, spans: Sequence[TokenClaim], weights: np.ndarray, bearer: Bearer
    ) -> None:
        """Check that each weighted target was sampled, and after the very tokens that it follows here."""
        before, place = np.frombuffer(datum.tokens, "<i4"), 0
        for span in spans:
            used = weights[place : place + span.length].nonzero()[0]
            if len(used) and not span.is_sampled:
                raise InputError(f"{name}: position {place + used[0]} has an advantage, and belongs to a prompt")
            if len(used):
                sampled = self._find(name, span, bearer)
                given = np.frombuffer(sampled.prompt + sampled.tokens[: 4 * span.offset], "<i4")
                if not np.array_equal(before[: place + 1], given):
                    raise InputError(f"{name}: {span.sequence} was sampled after other tokens than these")
            place += span.length

    def _check_tiles(
        self,
        name: str,
        spans: Sequence[TokenClaim],
        tokens: bytes,
        log_probs: np.ndarray | None,
        weights: np.ndarray | None,
        bearer: Bearer,
    ) -> Iterator[int]:
        """Check that spans tile these tokens; yield the age of each that was sampled.

        Clients fill targets without a weight, of a prompt, with any token.
        """
        place, ends = 0, dict[tuple[str, bool], int]()
        wanted = np.frombuffer(tokens, "<i4")
        for span in spans:
            sampled = self._find(name, span, bearer)
            whole = np.frombuffer(sampled.tokens if span.is_sampled else sampled.prompt, "<i4")
            kind = "sampled tokens" if span.is_sampled else "prompt"
            where = f"{name}: positions {place} to {place + span.length} name the {kind} of {span.sequence}"
            if span.offset < 0 or span.length < 0 or span.offset + span.length > len(whole):
                raise InputError(f"{where} from {span.offset} on, which has {len(whole)} tokens")
            key = span.sequence, span.is_sampled
            if span.length and span.offset < ends.get(key, 0):
                raise InputError(f"{where} from {span.offset} on, which came before: they must be in their order")
            ends[key] = span.offset + span.length
            mine = wanted[place : place + span.length]
            theirs = whole[span.offset : span.offset + span.length]
            is_other = mine != theirs if len(mine) == span.length else np.ones(1, dtype=bool)
            if weights is not None and not span.is_sampled and len(mine) == span.length:
                is_other = is_other & (weights[place : place + span.length] != 0)
            if is_other.any():
                raise InputError(f"{where}, whose tokens are others")
            if span.is_sampled and log_probs is not None:
                own = np.frombuffer(sampled.log_probs, "<f4")[span.offset : span.offset + span.length]
                if (log_probs[place : place + span.length].view("<u4") != own.view("<u4")).any():
                    raise InputError(f"{where}, which were sampled with other log-probs")
            if span.is_sampled and span.length:
                yield bearer.num_steps - sampled.num_steps
            place += span.length
        if place != len(wanted):
            raise InputError(f"{name} has {len(wanted)} tokens, and its spans name {place}: name each token once")

    def _find(self, name: str, span: TokenClaim, bearer: Bearer) -> Sampled:
        sampled = self._known.get(span.sequence)
        # The client of another key learns nothing of a sequence, not even that it exists.
        if sampled is None or sampled.owner != bearer.owner:
            raise InputError(f"{name}: the sequence {span.sequence!r} was not sampled here")
        if span.is_sampled and sampled.model != bearer.model:
            raise InputError(
                f"{name}: {span.sequence} was sampled from {sampled.model or 'the base'}, and {bearer.model} is trained"
            )
        if any(sampled.num_steps > steps for steps in bearer.loads[sampled.branch :]):
            raise InputError(f"{name}: {span.sequence} was sampled after step {sampled.num_steps}, which is undone")
        if span.is_sampled and sampled.temperature != 1:
            raise InputError(
                f"{name}: {span.sequence} was sampled at the temperature {sampled.temperature:g}, which log-probs of "
                "training do not have: sample at 1"
            )
        return sampled


def mark_own(datum: Datum, claims: Claims, loss: ServedLoss) -> Datum:
    """Mark the targets that have gradients: those that were sampled, and those that the loss weighs."""
    weights = np.frombuffer(datum.inputs[find_weight(loss)], "<f4")
    is_own = weights != 0 if loss.is_weighed else np.ones(len(weights), np.bool_)
    place = 0
    for span in claims.targets:
        is_own[place : place + span.length] |= span.is_sampled
        place += span.length
    return msgspec.structs.replace(datum, own=is_own.tobytes())


def read_sequences(folder: Path) -> tuple[list[Sampled], int]:
    """Read the sequences of a service's folder, and the bytes that they take: a record may lack its end."""
    path, found, place = folder / FILE_NAME, list[Sampled](), 0
    data = path.read_bytes() if path.exists() else b""
    while place + 4 <= len(data):
        end = place + 4 + int.from_bytes(data[place : place + 4], "little")
        if end > len(data):
            break
        found.append(msgspec.msgpack.decode(data[place + 4 : end], type=Sampled))
        place = end
    return found, place

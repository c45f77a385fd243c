"""What `--rollout-script` names: how the scripted engines of a rehearsal behave, as JSON.

    {"vocab_size": 131, "lengths": [4, 64], "tokens_per_second": 2000, "delay": [0, 0.5], "delay_seed": 7}

Every field may be left out. Each group takes a delay of its own, drawn from `delay_seed` and the group's seed: groups
come back in an order that looks random, and is the same in every run of the same name.
"""

import difflib
import hashlib
import math
from pathlib import Path

import msgspec

from megatron_rl.errors import InputError
from megatron_rl.sidecar.engine import GroupRequest
from megatron_rl.sidecar.scripted import Script


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    vocab_size: int | None = None
    lengths: tuple[int, int] = Script().lengths
    tokens_per_second: float | None = None
    delay: tuple[float, float] = (0.0, 0.0)
    delay_seed: int = 0


def read_script(path: Path | None, vocab_size: int | None) -> Script:
    """The script in a file, or the plain one without a file; `vocab_size` is that of the model, where there is one."""
    fields = _Fields() if path is None else _read(path)
    _check(fields, path, vocab_size)
    return Script(
        vocab_size=fields.vocab_size or vocab_size or Script().vocab_size,
        lengths=fields.lengths,
        tokens_per_second=fields.tokens_per_second,
        delay=lambda request: _delay(fields, request),
    )


def _read(path: Path) -> _Fields:
    try:
        content = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise InputError(f"--rollout-script {path} cannot be read: {error.strerror}; name a JSON file") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--rollout-script {path} is not JSON: {error}") from None
    names = _Fields.__struct_fields__
    for name in content if isinstance(content, dict) else ():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            which = f", the nearest is {near[0]}" if near else ""
            raise InputError(f"--rollout-script {path}: unknown field {name}{which}; there are {', '.join(names)}")
    try:
        return msgspec.convert(content, _Fields)
    except msgspec.ValidationError as error:
        raise InputError(f"--rollout-script {path}: {error}") from None


def _check(fields: _Fields, path: Path | None, vocab_size: int | None) -> None:
    least, most = fields.lengths
    shortest, longest = fields.delay
    speed = fields.tokens_per_second
    for is_right, what in (
        (fields.vocab_size is None or fields.vocab_size >= 1, f"vocab_size {fields.vocab_size}: write at least 1"),
        (
            vocab_size is None or (fields.vocab_size or 0) <= vocab_size,
            f"vocab_size {fields.vocab_size}: the model of --hf-model has {vocab_size} tokens; write no more, or leave "
            f"it out",
        ),
        (1 <= least <= most, f"lengths [{least}, {most}]: write [LEAST, MOST] with 1 <= LEAST <= MOST"),
        (speed is None or 0 < speed < math.inf, f"tokens_per_second {speed}: write a number above 0"),
        (
            0 <= shortest <= longest < math.inf,
            f"delay [{shortest:g}, {longest:g}]: write seconds, [LEAST, MOST] with 0 <= LEAST <= MOST",
        ),
    ):
        if not is_right:
            raise InputError(f"--rollout-script {path}: {what}")


def _delay(fields: _Fields, request: GroupRequest) -> float:
    shortest, longest = fields.delay
    text = f"{fields.delay_seed}\0{request.seed}".encode()
    fraction = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") / 2**64
    return shortest + (longest - shortest) * fraction

"""The requests that change a service, and the journal from which a service that was restarted does them again.

Every such request is written down before it is answered, and so is the answer of its future. After a restart they are
taken from the journal in their order, by the same functions: sessions, models and futures have the same names, and what
was computed has the same bits. Of a model that was saved, only what came after its last checkpoint is computed again.
What is sampled is not in the journal: clients ask for it again.
"""

import dataclasses
import json
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.errors import InputError, MegatronRLError
from megatron_rl.shared.records.append_file import AppendFile
from megatron_rl.tinker import protobuf
from megatron_rl.tinker.front import Front, Restored
from megatron_rl.tinker.futures import Body, Future
from megatron_rl.tinker.saved import SAMPLER, TRAINING

FILE_NAME = "requests.bin"


class Asked(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request as it came."""

    path: str
    owner: str
    idempotency: str
    body: bytes


class Answered(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer of a future."""

    identity: str
    body: bytes
    media_type: str


class Begun(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The begin of a journal, with a mark for the names that follow from it, and the model that is served."""

    mark: str
    model: str


_RECORD = msgspec.msgpack.Decoder(Asked | Answered | Begun)


class RequestFile:
    """The file of all requests and answers; the number of a request is its place."""

    def __init__(self, folder: Path, model: str) -> None:
        """Open the journal of a folder; raise an InputError if it belongs to a service of another model."""
        path = folder / FILE_NAME
        self.records, size = _read(path)
        self._file = AppendFile(path)
        # A process that was killed may have left the begin of a record.
        self._file.cut(size)
        self._count = len(self.records)
        if not self.records:
            self.append(Begun(secrets.token_hex(4), model))
            self.records, _ = _read(path)
        begun = self.records[0]
        assert isinstance(begun, Begun)
        if begun.model != model:
            self.close()
            raise InputError(f"{path} has the requests of {begun.model}, and {model} is served: name another folder")
        self.mark = begun.mark

    def close(self) -> None:
        self._file.close()

    def append(self, record: Asked | Answered | Begun) -> int:
        """Write a record, and return its number."""
        encoded = msgspec.msgpack.encode(record)
        self._file.append(len(encoded).to_bytes(4, "little"), encoded)
        self._count += 1
        return self._count - 1

    def note(self, future: Future) -> None:
        """Write the answer of a future."""
        assert future.answer is not None
        self.append(Answered(future.identity, future.answer.body, future.answer.media_type))


def _read(path: Path) -> tuple[list[Asked | Answered | Begun], int]:
    data, found, place = path.read_bytes() if path.exists() else b"", [], 0
    while place + 4 <= len(data):
        end = place + 4 + int.from_bytes(data[place : place + 4], "little")
        if end > len(data):
            break
        found.append(_RECORD.decode(data[place + 4 : end]))
        place = end
    return found, place


@dataclasses.dataclass(frozen=True)
class Request:
    """A request, in the form that its function takes."""

    front: Front
    owner: str
    idempotency: str
    content: bytes
    name: str
    """The name of its future and of what it makes."""

    @property
    def body(self) -> dict[str, Any]:
        try:
            return msgspec.json.decode(self.content or b"{}", type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise InputError(f"the body is not a JSON object: {error}") from None


class Requests:
    """Takes requests, each after it was written down."""

    def __init__(self, front: Front, journal: RequestFile) -> None:
        self._front = front
        self._journal = journal

    def take(self, path: str, owner: str, idempotency: str, content: bytes) -> dict[str, Any]:
        return self._do(
            self._journal.append(Asked(path, owner, idempotency, content)), path, owner, idempotency, content
        )

    def replay(self) -> None:
        """Take the requests of the journal again."""
        front, records = self._front, self._journal.records
        front.restore(_find_restored(front, records, self._journal.mark))
        for number, record in enumerate(records):
            if isinstance(record, Asked):
                try:
                    self._do(number, record.path, record.owner, record.idempotency, record.body)
                except (MegatronRLError, ValueError, TypeError, KeyError, OverflowError):
                    # It was refused then, too.
                    continue
        self._journal.records = []

    def _do(self, number: int, path: str, owner: str, idempotency: str, content: bytes) -> dict[str, Any]:
        return HANDLERS[path](Request(self._front, owner, idempotency, content, _name(self._journal.mark, number)))


def _name(mark: str, number: int) -> str:
    return f"{mark}{number:08x}"


def _find_restored(front: Front, records: list[Any], mark: str) -> Restored:
    """Find the answers of futures, and the last checkpoint of each model."""
    answers = {one.identity: Body(one.body, one.media_type) for one in records if isinstance(one, Answered)}
    checkpoints = {}
    for number, record in enumerate(records):
        answer = answers.get(_name(mark, number))
        if isinstance(record, Asked) and record.path == "save_weights" and answer is not None:
            answered = json.loads(answer.body)
            # It may have been overwritten since, by a request that has no answer yet: its own number counts.
            if "path" in answered and (saved := front.saved.read(answered["path"])) is not None:
                checkpoints[saved.model] = saved.number, saved
    return Restored(answers, checkpoints)


def _create_session(request: Request) -> dict[str, Any]:
    return {"session_id": request.front.create_session(request.owner, request.idempotency, request.name)}


def _finish(request: Request) -> dict[str, Any]:
    front = request.front
    front.end_session(front.find_session(read_text(request.body, "session_id"), request.owner))
    return {}


def _create_model(request: Request) -> dict[str, Any]:
    front, body = request.front, request.body
    front.check_base(read_text(body, "base_model"))
    session = front.find_session(read_text(body, "session_id"), request.owner)
    number, lora = read_whole(body, "model_seq_id"), body.get("lora_config")
    return begun(front.create_model(session, number, lora, body.get("user_metadata"), request.name))


def _unload(request: Request) -> dict[str, Any]:
    model = request.front.find_model(read_text(request.body, "model_id"), request.owner)
    return begun(request.front.unload([model], f"{model.identity} was unloaded", request.name))


def _train(request: Request) -> dict[str, Any]:
    front, content = request.front, request.content
    identity, number = protobuf.read_place(content)
    model = front.find_model(identity, request.owner)
    return begun(model.order.add(number, lambda: front.train(model, content), request.name), model_id=identity)


def _step(request: Request) -> dict[str, Any]:
    front, body = request.front, request.body
    model = front.find_model(read_text(body, "model_id"), request.owner)
    adam = body.get("optimizer_params") or body.get("adam_params") or {}
    number = read_whole(body, "seq_id")
    return begun(model.order.add(number, lambda: front.step(model, adam), request.name), model_id=model.identity)


def _save(request: Request, kind: str = TRAINING) -> dict[str, Any]:
    front, body = request.front, request.body
    model, number = front.find_model(read_text(body, "model_id"), request.owner), read_whole(body, "seq_id")
    ttl, metadata, is_over = body.get("ttl_seconds"), body.get("user_metadata"), bool(body.get("overwrite"))

    async def save() -> Body:
        return await front.save(model, kind, read_text(body, "path"), number, ttl, metadata, is_over)

    return begun(model.order.add(number, save, request.name), model_id=model.identity)


def _save_for_sampler(request: Request) -> dict[str, Any]:
    front, body = request.front, request.body
    if body.get("path") is not None:
        return _save(request, SAMPLER)
    model = front.find_model(read_text(body, "model_id"), request.owner)
    session, place = front.find_session(model.session, request.owner), read_whole(body, "sampling_session_seq_id")
    number = read_whole(body, "seq_id")
    if number >= model.order.next and place not in session.samplers:
        # At once: after a restart, a client that knows it asks before its weights are kept again. A model that
        # continues from a checkpoint has none of the weights from before.
        model.samplers.append(front.add_sampler(session, place))

    async def keep() -> Body:
        return await front.keep_unnamed(model, session.samplers[place])

    future = model.order.add(number, keep, request.name)
    return begun(future, model_id=model.identity)


def _load(request: Request) -> dict[str, Any]:
    front, body, owner = request.front, request.body, request.owner
    path, has_optimizer = read_text(body, "path"), bool(body.get("optimizer"))
    if body.get("model_id") is not None:
        model, number = front.find_model(read_text(body, "model_id"), owner), read_whole(body, "seq_id")
        return begun(model.order.add(number, lambda: front.load(model, path, has_optimizer), request.name))
    session, number = front.find_session(read_text(body, "session_id"), owner), read_whole(body, "model_seq_id")
    metadata = body.get("user_metadata")
    return begun(front.load_model(session, number, path, has_optimizer, metadata, request.name))


def _create_sampler(request: Request) -> dict[str, Any]:
    front, body = request.front, request.body
    if body.get("base_model") is not None:
        front.check_base(read_text(body, "base_model"))
    session = front.find_session(read_text(body, "session_id"), request.owner)
    number = read_whole(body, "sampling_session_seq_id")
    return {"sampling_session_id": front.create_sampler(session, number, body.get("model_path")).identity}


HANDLERS: Mapping[str, Callable[[Request], dict[str, Any]]] = {
    "create_session": _create_session,
    "finish": _finish,
    "create_model": _create_model,
    "unload_model": _unload,
    "forward_backward": _train,
    "optim_step": _step,
    "save_weights": _save,
    "save_weights_for_sampler": _save_for_sampler,
    "load_weights": _load,
    "create_sampling_session": _create_sampler,
}
"""The functions of the requests in the journal, by their routes."""


def begun(future: Future, **more: Any) -> dict[str, Any]:
    return {"request_id": future.identity, **more}


def read_text(body: Mapping[str, Any], name: str) -> str:
    if not isinstance(value := body.get(name), str) or not value:
        raise InputError(f"{name} must be a text, and is {value!r}")
    return value


def read_whole(body: Mapping[str, Any], name: str) -> int:
    if not isinstance(value := body.get(name), int) or isinstance(value, bool) or value < 0:
        raise InputError(f"{name} must be a number of 0 or more, and is {value!r}")
    return value

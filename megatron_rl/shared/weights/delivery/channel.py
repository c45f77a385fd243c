"""Connections of a delivery: both ends prove that they know a key, and everything else is authenticated with it.

    receiver -> sender   magic, protocol, challenge
    sender -> receiver   magic, protocol, challenge, hello, proof of hello and challenges
    receiver -> sender   proof of the challenges, or a refusal in plain text

The key itself never travels. From the two challenges follows the key of the session. Each frame after these carries a
code over its bytes, its direction and its number, so a changed, repeated or reordered frame ends the connection. A
frame may announce bytes of weights, which follow as they are: their code is in the frame that comes next.
"""

import contextlib
import dataclasses
import enum
import hmac
import secrets
import socket
import struct
import threading
import time
from typing import Literal, NamedTuple

import msgspec
from blake3 import blake3

from megatron_rl.shared.weights.delivery.greetings import GREETING_SECONDS, shut
from megatron_rl.shared.weights.delivery.messages import (
    PROTOCOL,
    Contents,
    DeliveryError,
    Hello,
    Refused,
    Target,
)

_MAGIC = b"mrlweights"
_OPENING = struct.Struct("<10sH32s")
_LENGTH = struct.Struct("<I")
_HEADER = struct.Struct("<BQI")
_CODE_BYTES = 16
_MOST_HELLO_BYTES = 1 << 16
_MOST_PAYLOAD_BYTES = 1 << 30
_CONNECT_SECONDS = 3.0
_MOST_GREETINGS = 3
"""Attempts at a greeting, since a byte that the network changed looks like a wrong token."""
# A connection whose bytes are not acknowledged for this long is opened again, which costs little: only portions that
# had not arrived whole are sent again. TCP by itself would wait for twice the time that a link was cut.
_SILENT_MILLISECONDS = 5000


class FrameKind(enum.IntEnum):
    BEGIN = 1
    BEGUN = 2
    """The version has begun, or is found again; the value tells one beginning from another."""
    FINISHED = 3
    ENDED = 4
    """The version will not be completed; the payload says why."""
    GIVE_UP = 5
    HELD = 6
    PORTION = 7
    CODE = 8
    """The code of the bytes that came before it."""
    TAKEN = 9
    AGAIN = 10
    """A portion's bytes did not have their code."""
    REFUSED = 11
    CUT_OFF = 12
    """A host does not reach its child; the payload names the child."""


class Frame(NamedTuple):
    """A message of a connection."""

    kind: FrameKind
    value: int
    payload: bytes


class Broken(DeliveryError):
    """The connection ended, or a frame was not what the other end sent; another connection may fare better."""


class Channel:
    """One end of a connection after the greeting. One thread receives; any thread sends frames."""

    def __init__(self, connection: socket.socket, key: bytes, is_sender: bool):
        self.connection = connection
        self._key = key
        self._sending, self._receiving = (b"s", b"r") if is_sender else (b"r", b"s")
        self._num_sent = self._num_received = 0
        self._lock = threading.Lock()

    def send(self, kind: FrameKind, value: int = 0, payload: bytes = b"") -> None:
        with self._lock:
            header = _HEADER.pack(kind, value, len(payload))
            parts = [header, self._code(self._sending, self._num_sent, b"h", header)]
            if payload:
                parts += [payload, self._code(self._sending, self._num_sent, b"p", payload)]
            self._num_sent += 1
            self.send_bytes(b"".join(parts))

    def send_bytes(self, data: bytes | memoryview) -> None:
        _send_all(self.connection, data)

    def begin_code(self) -> blake3:
        """Begin the code of bytes that are sent as they are."""
        return blake3(b"w", key=self._key)

    def receive(self) -> Frame:
        header = _read_bytes(self.connection, _HEADER.size)
        self._check(header, b"h")
        kind, value, length = _HEADER.unpack(header)
        payload = b""
        if length:
            if length > _MOST_PAYLOAD_BYTES:
                raise Broken(f"a frame announces {length} bytes")
            payload = bytes(_read_bytes(self.connection, length))
            self._check(payload, b"p")
        self._num_received += 1
        return Frame(FrameKind(kind), value, payload)

    def receive_into(self, target: memoryview) -> None:
        _fill(self.connection, target)

    def end(self) -> None:
        """End the connection; a thread that waits for it returns."""
        shut(self.connection)

    def _check(self, data: bytes | bytearray, part: bytes) -> None:
        code = _read_bytes(self.connection, _CODE_BYTES)
        if not hmac.compare_digest(code, self._code(self._receiving, self._num_received, part, data)):
            raise Broken("a frame arrived corrupted")

    def _code(self, direction: bytes, number: int, part: bytes, data: bytes | bytearray) -> bytes:
        code = blake3(direction + part + number.to_bytes(8, "little"), key=self._key)
        return code.update(data).digest(length=_CODE_BYTES)


@dataclasses.dataclass(frozen=True)
class Shipment:
    """A version on its way to hosts, as a sender knows it."""

    hello: Hello
    key: bytes
    """The token of the hosts' receivers."""
    contents: Contents
    num_streams: int
    patience: float
    """Seconds of silence after which a host is lost."""

    def connect(self, target: Target, purpose: Literal["control", "stream"]) -> Channel:
        hello = msgspec.structs.replace(self.hello, purpose=purpose)
        return connect(target.address, target.port, self.key, hello)


def connect(address: str, port: int, key: bytes, hello: Hello) -> Channel:
    """Open a connection to a receiver that knows the key."""
    for _ in range(_MOST_GREETINGS - 1):
        with contextlib.suppress(Refused):
            return _connect_once(address, port, key, hello)
    return _connect_once(address, port, key, hello)


def _connect_once(address: str, port: int, key: bytes, hello: Hello) -> Channel:
    try:
        connection = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
    except OSError as error:
        raise Broken(f"{address}:{port} does not answer: {error}") from None
    try:
        return _greet(connection, key, hello)
    except BaseException:
        connection.close()
        raise


def _greet(connection: socket.socket, key: bytes, hello: Hello) -> Channel:
    end = time.monotonic() + GREETING_SECONDS
    theirs = _read_opening(connection, end)
    ours = secrets.token_bytes(32)
    body = msgspec.msgpack.encode(hello)
    proof = hmac.digest(key, b"hello" + theirs + ours + body, "sha256")
    opening = _OPENING.pack(_MAGIC, PROTOCOL, ours)
    _send_all(connection, opening + _LENGTH.pack(len(body)) + body + proof)
    answer = _read_bytes(connection, 33, end)
    if answer[:1] != b"\0":
        # Nothing proves who refuses, so nothing but the number of the reason is read.
        raise Refused(_REASONS.get(answer[0], "the receiver refuses"))
    if not hmac.compare_digest(answer[1:], hmac.digest(key, b"welcome" + ours + theirs, "sha256")):
        raise Refused("the receiver does not know the token: something else may listen at its address")
    return _begin_channel(connection, key, theirs, ours, is_sender=True)


_WRONG_TOKEN, _NO_HELLO = 1, 2
_REASONS = {
    _WRONG_TOKEN: "the token is wrong",
    _NO_HELLO: "the receiver cannot read the first message: both ends must have the same release",
}


def accept(connection: socket.socket, key: bytes) -> tuple[Hello, Channel]:
    """Greet a sender; raise Refused if it does not know the key."""
    end = time.monotonic() + GREETING_SECONDS
    connection.settimeout(GREETING_SECONDS)
    ours = secrets.token_bytes(32)
    _send_all(connection, _OPENING.pack(_MAGIC, PROTOCOL, ours))
    theirs = _read_opening(connection, end)
    (length,) = _LENGTH.unpack(_read_bytes(connection, _LENGTH.size, end))
    if length > _MOST_HELLO_BYTES:
        raise Refused(f"a hello announces {length} bytes")
    body, proof = bytes(_read_bytes(connection, length, end)), _read_bytes(connection, 32, end)
    try:
        hello = msgspec.msgpack.decode(body, type=Hello)
    except msgspec.MsgspecError:
        _send_all(connection, bytes([_NO_HELLO]) + bytes(32))
        raise Refused("a hello cannot be read") from None
    if not hmac.compare_digest(proof, hmac.digest(key, b"hello" + ours + theirs + body, "sha256")):
        _send_all(connection, bytes([_WRONG_TOKEN]) + bytes(32))
        raise Refused("the token is wrong")
    _send_all(connection, b"\0" + hmac.digest(key, b"welcome" + theirs + ours, "sha256"))
    return hello, _begin_channel(connection, key, ours, theirs, is_sender=False)


def _begin_channel(
    connection: socket.socket, key: bytes, of_receiver: bytes, of_sender: bytes, is_sender: bool
) -> Channel:
    """Have the system find out that the other end has gone; no call has a timeout of its own."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MILLISECONDS)
    return Channel(connection, hmac.digest(key, b"session" + of_receiver + of_sender, "sha256"), is_sender)


def _read_opening(connection: socket.socket, end: float) -> bytes:
    magic, protocol, challenge = _OPENING.unpack(_read_bytes(connection, _OPENING.size, end))
    if magic != _MAGIC:
        raise Refused("what answers does not speak this protocol: check the address and the port")
    if protocol != PROTOCOL:
        raise Refused(f"the other end speaks protocol {protocol}, and this one {PROTOCOL}: install the same release")
    return challenge


def _send_all(connection: socket.socket, data: bytes | memoryview) -> None:
    try:
        connection.sendall(data)
    except OSError as error:
        raise Broken(f"the connection broke: {error}") from None


def _read_bytes(connection: socket.socket, num_bytes: int, end: float | None = None) -> bytearray:
    """Receive a number of bytes; those of a greeting, which is over at `end` however slowly they come."""
    data = bytearray(num_bytes)
    _fill(connection, memoryview(data), end)
    return data


def _fill(connection: socket.socket, target: memoryview, end: float | None = None) -> None:
    while target:
        if end is not None:
            # A timeout of 0 would mean that no call waits.
            connection.settimeout(max(0.001, end - time.monotonic()))
        try:
            received = connection.recv_into(target, 0, socket.MSG_WAITALL)
        except OSError as error:
            raise Broken(f"the connection broke: {error}") from None
        if not received:
            raise Broken("the other end closed the connection")
        target = target[received:]

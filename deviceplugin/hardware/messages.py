"""What the daemon and its driver child say to each other, and how it is framed.

One socket, both ways: a length of four bytes (big-endian), then one message in
MessagePack. The child answers each request with exactly one answer, in order;
between them it may send ``News`` unasked.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec

from deviceplugin.model import Address, Alarm, CallError, Reading, Scan, XidEvent

LENGTH_BYTES = 4
MESSAGE_MAX_BYTES = 16 * 1024 * 1024


class DoScan(msgspec.Struct, frozen=True, tag=True):
    """Answered by Scanned or Failed."""

    only: tuple[Address, ...] | None = None


class DoRead(msgspec.Struct, frozen=True, tag=True):
    """Answered by Read or Failed."""


class Scanned(msgspec.Struct, frozen=True, tag=True):
    scan: Scan
    errors: tuple[CallError, ...] = ()


class Read(msgspec.Struct, frozen=True, tag=True):
    readings: tuple[Reading, ...]
    errors: tuple[CallError, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The driver as a whole failed, at a request or while waiting for events.

    Attributes:
        code: of the exception in ``deviceplugin.errors``.
    """

    code: str
    text: str
    call: str
    driver_code: int | None
    errors: tuple[CallError, ...] = ()


class News(msgspec.Struct, frozen=True, tag=True):
    """Events; none means that there may be something to read."""

    events: tuple[XidEvent, ...]
    alarms: tuple[Alarm, ...] = ()
    errors: tuple[CallError, ...] = ()


Request = DoScan | DoRead
Message = Scanned | Read | Failed | News

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_messages = msgspec.msgpack.Decoder(Message)


def send(connection: socket.socket, message: Request | Message) -> None:
    """Write one message.

    Raises:
        OSError: the other side is gone.
    """
    body = _encoder.encode(message)
    connection.sendall(len(body).to_bytes(LENGTH_BYTES, "big") + body)


class Frames:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add what arrived; the bodies that are complete now.

        Raises:
            ValueError: the length makes no sense.
        """
        self._data += data
        while len(self._data) >= LENGTH_BYTES:
            length = int.from_bytes(self._data[:LENGTH_BYTES], "big")
            if length > MESSAGE_MAX_BYTES:
                raise ValueError(f"a message of {length} bytes")
            if len(self._data) < LENGTH_BYTES + length:
                return
            body = bytes(self._data[LENGTH_BYTES : LENGTH_BYTES + length])
            del self._data[: LENGTH_BYTES + length]
            yield body


def request(body: bytes) -> Request:
    """A request from its body. Raises ValueError (msgspec's) for anything else."""
    return _requests.decode(body)


def message(body: bytes) -> Message:
    """A message of the child from its body. Raises ValueError for anything else."""
    return _messages.decode(body)

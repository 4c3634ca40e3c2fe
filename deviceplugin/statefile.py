"""A file of ours in the state directory: replaced in one step, with version and checksum.

A file that is damaged or of a newer version is kept aside and counts as lost. A
folder that cannot be written costs the memory, not the service: it is said once, and
in a metric.

Times in such files are seconds since the machine started, which no change of the
wall clock touches. ``moved_by_s`` says by how much those of an earlier boot have to be
moved; they are negative then. Only the wall clock spans two boots.
"""

from __future__ import annotations

import contextlib
import enum
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from deviceplugin import logs
from deviceplugin.clock import Clock
from deviceplugin.stats import Stats

_log = logs.get("memory")

T = TypeVar("T")


class Recall(enum.Enum):
    """How remembering went."""

    GOOD = "good"
    NOTHING = "there is no file"
    LOST = "the file could not be used"


@dataclass(frozen=True, slots=True)
class Recalled(Generic[T]):
    """What was in the file; ``content`` is None unless ``how`` is GOOD.

    Attributes:
        moved_by_s: to be added to its times; None in the boot in which it was written.
    """

    how: Recall
    content: T | None = None
    moved_by_s: float | None = None


class _Newer(ValueError):
    """Of a later release."""


class _Body(msgspec.Struct, frozen=True):
    """What the checksum is of; ``boot`` to ``time_s`` say when it was written."""

    boot: str
    boottime_s: float
    time_s: float
    content: Any


class _Envelope(msgspec.Struct, frozen=True):
    version: int
    checksum: int
    body: msgspec.Raw


class StateFile(Generic[T]):
    """Used by one thread."""

    def __init__(
        self, path: Path, of: type[T], version: int, stats: Stats, clock: Clock, loss: str
    ) -> None:
        """
        Args:
            of: what it holds; anything that msgspec can convert.
            loss: what it means that it cannot be written, for the log.
        """
        self._path = path
        self._of = of
        self._version = version
        self._stats = stats
        self._clock = clock
        self._loss = loss
        self._complained = ""

    def read(self) -> Recalled[T]:
        """Read it. Never raises."""
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return Recalled(Recall.NOTHING)
        except OSError as error:
            _log.warning("state file cannot be read", file=self._path, why=error)
            return Recalled(Recall.LOST)
        try:
            body = self._decode(text)
            content = msgspec.convert(body.content, self._of)
        except _Newer as error:
            self._put_aside("newer", error)
            return Recalled(Recall.LOST)
        except (ValueError, RecursionError) as error:  # of JSON, Unicode and msgspec, too
            self._put_aside("damaged", error)
            return Recalled(Recall.LOST)
        return Recalled(Recall.GOOD, content, self._moved_by_s(body))

    def write(self, content: T, *, durable: bool = True) -> bool:
        """Write it; whether that went well. Never raises.

        Args:
            durable: wait until the disk has it. Without, it survives the process and
                not a loss of power, until ``sync``.
        """
        new = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with new.open("wb") as file:
                file.write(self._encode(content))
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            self._stats.set("state_write_failed", self._path.name, to=1)
            if str(error) != self._complained:
                self._complained = str(error)
                _log.error(self._loss, file=self._path, why=error)
            return False
        self._stats.set("state_write_failed", self._path.name, to=0)
        self._complained = ""
        return True

    def sync(self) -> None:
        """Wait until the disk has what was written. Never raises."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            os.fsync(file.fileno())

    def _moved_by_s(self, body: _Body) -> float | None:
        clock = self._clock
        if body.boot and body.boot == clock.boot_id():
            return None
        return (body.time_s - body.boottime_s) - (clock.time() - clock.boottime())

    def _put_aside(self, suffix: str, error: Exception) -> None:
        aside = self._path.with_suffix(f".{suffix}")
        _log.warning("state file cannot be used, kept aside", file=aside, why=str(error)[:200])
        try:
            self._path.replace(aside)
        except OSError as failure:
            _log.warning("state file cannot be kept aside", file=self._path, why=failure)

    def _encode(self, content: T) -> bytes:
        clock = self._clock
        body = msgspec.json.encode(_Body(clock.boot_id(), clock.boottime(), clock.time(), content))
        envelope = _Envelope(self._version, zlib.crc32(body), msgspec.Raw(body))
        return msgspec.json.encode(envelope) + b"\n"

    def _decode(self, text: bytes) -> _Body:
        envelope = msgspec.json.decode(text, type=_Envelope)
        if envelope.version > self._version:
            raise _Newer(f"version {envelope.version}, this release reads {self._version}")
        if envelope.checksum != zlib.crc32(envelope.body):
            raise ValueError("its checksum is wrong")
        return msgspec.json.decode(envelope.body, type=_Body)

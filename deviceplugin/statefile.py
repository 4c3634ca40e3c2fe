"""A file of ours in the state directory: replaced in one step, with version and checksum.

A file that is damaged or of a newer version is kept aside and counts as lost. A
folder that cannot be written costs the memory, not the service: it is said once, and
in a metric.

Times in such files are seconds since the machine started, which no change of the
wall clock touches. ``moved_by_s`` says by how much those of an earlier boot have to be
moved; they are negative then. Only the wall clock spans two boots.
"""

from __future__ import annotations

import enum
import json
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


class _Whole(msgspec.Struct, frozen=True):
    """What the checksum is of; ``boot`` to ``time_s`` say when it was written."""

    boot: str
    boottime_s: float
    time_s: float
    content: Any


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
            whole = self._decode(text)
            content = msgspec.convert(whole.content, self._of)
        except _Newer as error:
            self._put_aside("newer", error)
            return Recalled(Recall.LOST)
        except (ValueError, RecursionError) as error:  # of JSON, Unicode and msgspec, too
            self._put_aside("damaged", error)
            return Recalled(Recall.LOST)
        return Recalled(Recall.GOOD, content, self._moved_by_s(whole))

    def write(self, content: T) -> bool:
        """Write it; whether that went well. Never raises."""
        new = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with new.open("wb") as file:
                file.write(self._encode(content))
                file.flush()
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

    def _moved_by_s(self, whole: _Whole) -> float | None:
        clock = self._clock
        if whole.boot and whole.boot == clock.boot_id():
            return None
        return (whole.time_s - whole.boottime_s) - (clock.time() - clock.boottime())

    def _put_aside(self, suffix: str, error: Exception) -> None:
        aside = self._path.with_suffix(f".{suffix}")
        _log.warning("state file cannot be used, kept aside", file=aside, why=str(error)[:200])
        try:
            self._path.replace(aside)
        except OSError as failure:
            _log.warning("state file cannot be kept aside", file=self._path, why=failure)

    def _encode(self, content: T) -> bytes:
        clock = self._clock
        body = msgspec.to_builtins(
            _Whole(clock.boot_id(), clock.boottime(), clock.time(), content), str_keys=True
        )
        whole = {"version": self._version, "checksum": _checksum(body), "content": body}
        return json.dumps(whole, indent=1).encode() + b"\n"

    def _decode(self, text: bytes) -> _Whole:
        whole = json.loads(text)
        if not isinstance(whole, dict) or not isinstance(whole.get("version"), int):
            raise ValueError("it has no version")
        if whole["version"] > self._version:
            raise _Newer(f"version {whole['version']}, this release reads {self._version}")
        if whole.get("checksum") != _checksum(whole.get("content")):
            raise ValueError("its checksum is wrong")
        return msgspec.convert(whole["content"], _Whole)


def _checksum(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())

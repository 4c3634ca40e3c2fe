"""What outlives the process: the GPUs that this node is known to have.

One JSON file in the state directory, replaced in one step, with a version and
a checksum. A file that is damaged or of a newer version is kept aside and
counts as none. A folder that cannot be written costs the memory, not the
service: it is said once, and in a metric.

Times in it are seconds since the machine started, which no change of the wall
clock touches. After a reboot they are moved by the wall clock, since nothing
else spans two boots; they are negative then.
"""

from __future__ import annotations

import enum
import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from deviceplugin import logs
from deviceplugin.clock import Clock
from deviceplugin.model import Gpu
from deviceplugin.stats import Stats

VERSION = 1

_log = logs.get("memory")


class Recall(enum.Enum):
    """How remembering went."""

    GOOD = "good"
    NOTHING = "there is no file"
    LOST = "the file could not be used"


@dataclass(frozen=True, slots=True)
class Remembered:
    """What was in the file; no GPUs unless ``how`` is GOOD."""

    how: Recall
    gpus: tuple[Gpu, ...] = ()


class _Newer(ValueError):
    """Of a later release."""


class _Content(msgspec.Struct, frozen=True):
    """The file, but for version and checksum; ``boot`` to ``time_s`` say when it was written."""

    boot: str
    boottime_s: float
    time_s: float
    gpus: tuple[Gpu, ...]


class Memory:
    """The file of one resource. Used by one thread."""

    def __init__(self, state_dir: Path, stem: str, stats: Stats, clock: Clock) -> None:
        self._path = state_dir / f"inventory.{stem}.json"
        self._stats = stats
        self._clock = clock
        self._saved: tuple[Gpu, ...] | None = None
        self._complained = ""

    def recall(self) -> Remembered:
        """Read the file. Never raises."""
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return Remembered(Recall.NOTHING)
        except OSError as error:
            _log.warning("remembered GPUs cannot be read", file=self._path, why=error)
            return Remembered(Recall.LOST)
        try:
            content = _decode(text)
        except _Newer as error:
            self._put_aside("newer", error)
            return Remembered(Recall.LOST)
        except ValueError as error:  # JSON's, Unicode's and msgspec's are of this kind
            self._put_aside("damaged", error)
            return Remembered(Recall.LOST)
        gpus = self._moved(content)
        self._saved = gpus if gpus == content.gpus else None
        return Remembered(Recall.GOOD, gpus)

    def save(self, gpus: Iterable[Gpu]) -> bool:
        """Write the file, if anything differs from what it holds. Never raises.

        Returns:
            Whether the file now says so.
        """
        gpus = tuple(gpus)
        if gpus == self._saved:
            return True
        new = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with new.open("wb") as file:
                file.write(_encode(self._content(gpus)))
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            self._stats.set("state_write_failed", to=1)
            if str(error) != self._complained:
                self._complained = str(error)
                _log.error(
                    "GPUs cannot be remembered: after a restart a missing one will not be missed",
                    file=self._path,
                    why=error,
                )
            return False
        self._stats.set("state_write_failed", to=0)
        self._saved, self._complained = gpus, ""
        return True

    def _content(self, gpus: tuple[Gpu, ...]) -> _Content:
        clock = self._clock
        return _Content(clock.boot_id(), clock.boottime(), clock.time(), gpus)

    def _moved(self, content: _Content) -> tuple[Gpu, ...]:
        """The GPUs with their times on this boot's clock."""
        now = self._content(())
        if content.boot and content.boot == now.boot:
            return content.gpus
        by_s = (content.time_s - content.boottime_s) - (now.time_s - now.boottime_s)

        def move(gpu: Gpu) -> Gpu:
            if gpu.gone_since_s is not None:
                gpu = replace(gpu, gone_since_s=gpu.gone_since_s + by_s)
            if gpu.maintenance is not None:
                since_s = gpu.maintenance.since_s + by_s
                gpu = replace(gpu, maintenance=replace(gpu.maintenance, since_s=since_s))
            return gpu

        return tuple(move(gpu) for gpu in content.gpus)

    def _put_aside(self, suffix: str, error: ValueError) -> None:
        aside = self._path.with_suffix(f".{suffix}")
        _log.warning(
            "remembered GPUs cannot be used, file kept aside", file=aside, why=str(error)[:200]
        )
        try:
            self._path.replace(aside)
        except OSError as failure:
            _log.warning("file cannot be kept aside", file=self._path, why=failure)


def _encode(content: _Content) -> bytes:
    body = msgspec.to_builtins(content)
    whole = {"version": VERSION, "checksum": _checksum(body), "content": body}
    return json.dumps(whole, indent=1).encode() + b"\n"


def _decode(text: bytes) -> _Content:
    whole = json.loads(text)
    if not isinstance(whole, dict) or not isinstance(whole.get("version"), int):
        raise ValueError("it has no version")
    if whole["version"] > VERSION:
        raise _Newer(f"version {whole['version']}, this release reads {VERSION}")
    if whole.get("checksum") != _checksum(whole.get("content")):
        raise ValueError("its checksum is wrong")
    return msgspec.convert(whole["content"], _Content)


def _checksum(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())

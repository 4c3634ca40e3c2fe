"""What outlives the process: the GPUs that this node is known to have.

One JSON file in the state directory, replaced in one step, with a version and
a checksum. A file that is damaged or of a newer version is kept aside and
counts as none. A folder that cannot be written costs the memory, not the
service: it is said once, and in a metric.
"""

from __future__ import annotations

import enum
import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from deviceplugin import logs
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


class Memory:
    """The file of one resource. Used by one thread."""

    def __init__(self, state_dir: Path, stem: str, stats: Stats) -> None:
        self._path = state_dir / f"inventory.{stem}.json"
        self._stats = stats
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
            gpus = _decode(text)
        except _Newer as error:
            self._put_aside("newer", error)
            return Remembered(Recall.LOST)
        except ValueError as error:  # JSON's, Unicode's and msgspec's are of this kind
            self._put_aside("damaged", error)
            return Remembered(Recall.LOST)
        self._saved = gpus
        return Remembered(Recall.GOOD, gpus)

    def save(self, gpus: Iterable[Gpu]) -> None:
        """Write the file, if anything differs from what it holds. Never raises."""
        gpus = tuple(gpus)
        if gpus == self._saved:
            return
        new = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with new.open("wb") as file:
                file.write(_encode(gpus))
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
            return
        self._stats.set("state_write_failed", to=0)
        self._saved, self._complained = gpus, ""

    def _put_aside(self, suffix: str, error: ValueError) -> None:
        aside = self._path.with_suffix(f".{suffix}")
        _log.warning(
            "remembered GPUs cannot be used, file kept aside", file=aside, why=str(error)[:200]
        )
        try:
            self._path.replace(aside)
        except OSError as failure:
            _log.warning("file cannot be kept aside", file=self._path, why=failure)


def _encode(gpus: tuple[Gpu, ...]) -> bytes:
    body = msgspec.to_builtins(gpus)
    content = {"version": VERSION, "checksum": _checksum(body), "gpus": body}
    return json.dumps(content, indent=1).encode() + b"\n"


def _decode(text: bytes) -> tuple[Gpu, ...]:
    content = json.loads(text)
    if not isinstance(content, dict) or not isinstance(content.get("version"), int):
        raise ValueError("it has no version")
    if content["version"] > VERSION:
        raise _Newer(f"version {content['version']}, this release reads {VERSION}")
    if content.get("checksum") != _checksum(content.get("gpus")):
        raise ValueError("its checksum is wrong")
    return msgspec.convert(content["gpus"], tuple[Gpu, ...])


def _checksum(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())

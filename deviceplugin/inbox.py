"""Other people's verdicts: files that a script, DCGM or a node problem detector drops.

Each ``*.json`` in ``verdicts.d`` of the state directory is one verdict on one GPU:

    {"gpu": "GPU-… or PCI bus id", "verdict": "unhealthy" | "healthy",
     "reason": "words", "source": "dcgm", "ttl_s": 600}

It counts for ``ttl_s`` seconds from when it was written, or until it is removed;
"healthy" is the same as no file. Writers create it under another name and rename
it. A bad file is said once, shown in a metric, and ignored.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from deviceplugin import logs
from deviceplugin.clock import Clock
from deviceplugin.stats import Stats

FOLDER: Final = "verdicts.d"
FILE_MAX_BYTES: Final = 64 * 1024
FILES_MAX: Final = 256

_log = logs.get("inbox")


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gpu: Annotated[str, Meta(min_length=1, max_length=128)]
    verdict: Literal["healthy", "unhealthy"]
    source: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9.-]{0,39}$")]
    ttl_s: Annotated[float, Meta(gt=0, le=7 * 86400)]
    reason: Annotated[str, Meta(max_length=1000)] = ""


@dataclass(frozen=True, slots=True)
class Advice:
    """A verdict of somebody else that counts now.

    Attributes:
        gpu: as it was written: an id or a PCI bus id.
        until_s: seconds since the machine started.
    """

    file: str
    gpu: str
    source: str
    reason: str
    until_s: float


@dataclass(frozen=True, slots=True)
class _Read:
    """What a file held when it was read; advice None: nothing that counts."""

    identity: tuple[int, ...]
    advice: Advice | None
    bad: bool = False


class Inbox:
    """Looked into by one thread."""

    def __init__(self, state_dir: Path, stats: Stats, clock: Clock) -> None:
        self.folder = state_dir / FOLDER
        self._stats = stats
        self._clock = clock
        self._read: dict[str, _Read] = {}

    def look(self) -> tuple[Advice, ...]:
        """The verdicts "unhealthy" that count now, by file name. Never raises."""
        names = sorted(self._names())
        if len(names) > FILES_MAX and len(self._read) <= FILES_MAX:
            _log.error("too many files, the last ones are ignored", folder=self.folder)
        self._read = {name: self._file(name) for name in names[:FILES_MAX]}
        self._stats.set("inbox_bad_files", to=sum(read.bad for read in self._read.values()))
        now_s = self._clock.boottime()
        found = (read.advice for read in self._read.values())
        return tuple(advice for advice in found if advice is not None and advice.until_s > now_s)

    def _names(self) -> Iterator[str]:
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(".json") and not entry.name.startswith("."):
                    yield entry.name

    def _file(self, name: str) -> _Read:
        """What a file says; read again only when it is another one."""
        before = self._read.get(name)
        try:
            descriptor = os.open(
                self.folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
            )
        except OSError as error:
            return self._bad(name, before, (0,), str(error.strerror))
        identity: tuple[int, ...] = (0,)
        try:
            found = os.fstat(descriptor)
            identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if before is not None and before.identity == identity:
                return before
            if not stat.S_ISREG(found.st_mode):
                return self._bad(name, before, identity, "it is no regular file")
            if found.st_uid not in (0, os.geteuid()):
                return self._bad(name, before, identity, "it belongs to somebody else")
            if found.st_size > FILE_MAX_BYTES:
                return self._bad(name, before, identity, "it is too large")
            said = msgspec.json.decode(os.read(descriptor, FILE_MAX_BYTES), type=_File)
        except (OSError, ValueError) as error:
            return self._bad(name, before, identity, str(error))
        finally:
            os.close(descriptor)
        age_s = max(0.0, self._clock.time() - found.st_mtime)
        until_s = self._clock.boottime() + said.ttl_s - age_s
        if said.verdict == "healthy":
            return _Read(identity, None)
        return _Read(identity, Advice(name, said.gpu, said.source, said.reason, until_s))

    def _bad(self, name: str, before: _Read | None, identity: tuple[int, ...], why: str) -> _Read:
        if before is None or not before.bad or before.identity != identity:
            _log.warning("verdict ignored", file=self.folder / name, why=why)
        return _Read(identity, None, bad=True)

    def refuse(self, advice: Advice, why: str) -> None:
        """What it says makes no sense on this node, now."""
        read = self._read[advice.file]
        self._read[advice.file] = replace(
            self._bad(advice.file, read, read.identity, why), advice=advice
        )

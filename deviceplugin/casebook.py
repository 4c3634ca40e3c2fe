"""What outlives the process of the GPUs' health: records, and a ledger of faults.

A new boot ends what a reboot cures; the ledger is kept across boots, so its
times are dates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from deviceplugin import health
from deviceplugin.clock import Clock
from deviceplugin.health import Record
from deviceplugin.model import GpuId
from deviceplugin.statefile import StateFile
from deviceplugin.stats import Stats

VERSION: Final = 1
ENTRIES_PER_GPU: Final = 50


@dataclass(frozen=True, slots=True)
class Entry:
    """A change of one GPU's verdict.

    Attributes:
        time_s: seconds since the epoch.
        now: what was said: "healthy" or the reason.
        held: why it was offered all the same, in words; "" when it was not.
    """

    time_s: float
    gpu: GpuId
    was: str
    now: str
    detail: str
    held: str = ""


@dataclass(frozen=True, slots=True)
class _Content:
    records: dict[GpuId, Record]
    ledger: tuple[Entry, ...]


class Casebook:
    """The file of one resource. Used by one thread; ``ledger`` may be read by any."""

    def __init__(self, state_dir: Path, stem: str, stats: Stats, clock: Clock) -> None:
        self._clock = clock
        self._file = StateFile(
            state_dir / f"health.{stem}.json",
            _Content,
            VERSION,
            stats,
            clock,
            loss="health cannot be remembered: a restart of the plugin forgets faults",
        )
        self._saved: _Content | None = None
        self._durable = True
        self.ledger: tuple[Entry, ...] = ()

    def recall(self) -> Mapping[GpuId, Record]:
        """Read the file; what a reboot cures is dropped after one. Never raises."""
        found = self._file.read()
        if found.content is None:
            return {}
        self.ledger = found.content.ledger
        if found.moved_by_s is None:
            self._saved = found.content
            return found.content.records
        now_s, by_s = self._clock.boottime(), found.moved_by_s
        return {
            gpu: health.after_boot(record, now_s, by_s)
            for gpu, record in found.content.records.items()
        }

    def add(self, entry: Entry) -> None:
        """Enter a change into the ledger; the oldest of the same GPU gives way."""
        same = [each for each in self.ledger if each.gpu == entry.gpu]
        ledger = self.ledger
        if len(same) >= ENTRIES_PER_GPU:
            ledger = tuple(each for each in ledger if each is not same[0])
        self.ledger = (*ledger, entry)

    def save(self, records: Mapping[GpuId, Record]) -> bool:
        """Write the file, if anything differs from what it holds. Never raises.

        The disk is waited for only when nothing has changed since the last call: a
        fault is no time to wait, and a loss of power is a new boot in any case.

        Returns:
            Whether the file now says so.
        """
        content = _Content({gpu: _lasting(r) for gpu, r in records.items()}, self.ledger)
        if content == self._saved:
            if not self._durable:
                self._file.sync()
                self._durable = True
            return True
        if not self._file.write(content, durable=False):
            return False
        self._saved, self._durable = content, False
        return True


def _lasting(record: Record) -> Record:
    """Without what matters for seconds only, and changes with each event of a storm."""
    return replace(record, last_xid=None) if record.last_xid is not None else record


def of_gpus(ledger: Iterable[Entry], gpus: frozenset[str]) -> list[Entry]:
    """The entries of these GPUs; of all when none are named."""
    return [entry for entry in ledger if not gpus or entry.gpu in gpus]

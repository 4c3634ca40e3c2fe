"""What outlives the process: the GPUs that this node is known to have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from deviceplugin.clock import Clock
from deviceplugin.model import Gpu
from deviceplugin.statefile import Recall, StateFile
from deviceplugin.stats import Stats

VERSION = 1


@dataclass(frozen=True, slots=True)
class Remembered:
    """What was in the file; no GPUs unless ``how`` is GOOD."""

    how: Recall
    gpus: tuple[Gpu, ...] = ()


class Memory:
    """The file of one resource. Used by one thread."""

    def __init__(self, state_dir: Path, stem: str, stats: Stats, clock: Clock) -> None:
        self._file = StateFile(
            state_dir / f"inventory.{stem}.json",
            tuple[Gpu, ...],
            VERSION,
            stats,
            clock,
            loss="GPUs cannot be remembered: after a restart a missing one will not be missed",
        )
        self._saved: tuple[Gpu, ...] | None = None

    def recall(self) -> Remembered:
        """Read the file. Never raises."""
        found = self._file.read()
        if found.content is None:
            return Remembered(found.how)
        gpus = found.content
        if found.moved_by_s is not None:
            gpus = tuple(_move(gpu, found.moved_by_s) for gpu in gpus)
        self._saved = gpus if gpus == found.content else None
        return Remembered(Recall.GOOD, gpus)

    def save(self, gpus: Iterable[Gpu]) -> bool:
        """Write the file, if anything differs from what it holds. Never raises.

        Returns:
            Whether the file now says so.
        """
        gpus = tuple(gpus)
        if gpus == self._saved:
            return True
        if not self._file.write(gpus):
            return False
        self._saved = gpus
        return True


def _move(gpu: Gpu, by_s: float) -> Gpu:
    if gpu.gone_since_s is not None:
        gpu = replace(gpu, gone_since_s=gpu.gone_since_s + by_s)
    if gpu.maintenance is not None:
        since_s = gpu.maintenance.since_s + by_s
        gpu = replace(gpu, maintenance=replace(gpu.maintenance, since_s=since_s))
    return gpu

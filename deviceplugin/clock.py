"""The time, handed in wherever it is needed so that tests can set it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    """Seconds, of three kinds."""

    def monotonic(self) -> float:
        """Seconds that only grow: for deadlines and ages."""

    def time(self) -> float:
        """Seconds since the epoch: to show to a person."""

    def boottime(self) -> float:
        """Seconds since the machine started, suspends included: for what is remembered.
        No setting of the wall clock touches them."""

    def boot_id(self) -> str:
        """Tells this boot of the machine from any other; "" when it cannot be told."""


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    def boottime(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def boot_id(self) -> str:
        try:
            return _BOOT_ID.read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return ""


def date(clock: Clock, boottime_s: float) -> float:
    """When that was, in seconds since the epoch, to a tenth of a second."""
    return round(clock.time() - (clock.boottime() - boottime_s), 1)

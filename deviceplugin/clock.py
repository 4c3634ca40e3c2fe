"""The time, handed in wherever it is needed so that tests can set it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds, of two kinds."""

    def monotonic(self) -> float:
        """Seconds that only grow: for deadlines and ages."""

    def time(self) -> float:
        """Seconds since the epoch: to show to a person."""


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

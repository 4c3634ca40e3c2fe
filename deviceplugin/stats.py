"""Counters that any part of the daemon bumps and the metrics endpoint reads.

They live below everything else so that no part needs to know about metrics,
and so that the metrics library need not be loaded before the first scrape
can come. Names are those of the exported metrics without the prefix.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

Labels = tuple[str, ...]


class Stats:
    """Named, labelled counts and gauges. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[Labels, float]] = {}
        self._gauges: dict[str, dict[Labels, float]] = {}

    def add(self, name: str, *labels: str, by: float = 1) -> None:
        """Count something that happened."""
        with self._lock:
            series = self._counts.setdefault(name, {})
            series[labels] = series.get(labels, 0) + by

    def set(self, name: str, *labels: str, to: float) -> None:
        """Note how something is now."""
        with self._lock:
            self._gauges.setdefault(name, {})[labels] = to

    def counts(self, name: str) -> Mapping[Labels, float]:
        """A copy of one counter's series."""
        with self._lock:
            return dict(self._counts.get(name, {}))

    def gauges(self, name: str) -> Mapping[Labels, float]:
        """A copy of one gauge's series."""
        with self._lock:
            return dict(self._gauges.get(name, {}))

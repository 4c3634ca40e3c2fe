"""The latest Snapshot: one writer, many readers, and a way to wait for the next.

Readers never block the writer for longer than it takes to swap a reference;
each reader keeps its own place (a generation), so a slow or dead reader takes
nothing away from another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from deviceplugin.model import Snapshot


class Store:
    """Holds one snapshot at a time, the empty one at first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._snapshot = Snapshot()

    @property
    def snapshot(self) -> Snapshot:
        """The latest one."""
        return self._snapshot

    def publish(self, snapshot: Snapshot) -> Snapshot:
        """Replace the latest, and wake whoever waits.

        Returns:
            The stored snapshot: with the next generation if anything differs
            from the latest, else the latest itself.
        """
        with self._changed:
            latest = self._snapshot
            if replace(snapshot, generation=latest.generation) == latest:
                return latest
            self._snapshot = replace(snapshot, generation=latest.generation + 1)
            self._changed.notify_all()
            return self._snapshot

    def wait_newer(self, generation: int, until: Callable[[], bool]) -> Snapshot | None:
        """Block until there is a snapshot newer than ``generation``.

        Args:
            until: gives up when this is true; it is asked after each ``wake``.

        Returns:
            The latest snapshot, or None when ``until`` came true.
        """
        with self._changed:
            self._changed.wait_for(lambda: until() or self._snapshot.generation > generation)
            return None if until() else self._snapshot

    def wake(self) -> None:
        """Make every waiter ask its ``until``."""
        with self._changed:
            self._changed.notify_all()

"""The doors to the machine: what we need of a GPU driver and of the host.

Only plain values of ``deviceplugin.model`` pass, never a handle or a
callback, so that a driver may live in another process. ``nvml`` is the real
driver; ``sysfs`` reads the host's files; simulated ones stand in
``deviceplugin.sim``.
"""

from __future__ import annotations

from typing import Protocol

from deviceplugin.model import Address, Alarm, CallError, HostFacts, Reading, Scan, XidEvent


class Hardware(Protocol):
    """A GPU driver. One thread uses it; ``wake`` and ``interrupt`` come from others.

    Every method may raise ``HardwareError``: the driver as a whole cannot be
    used. The caller then calls ``close`` and, later, ``scan``. A single GPU
    that fails is no error: it is described by a ``Fault`` in the answer.
    """

    def scan(self, only: tuple[Address, ...] | None = None) -> Scan:
        """Open the driver if it is not open, and describe every GPU.

        Args:
            only: describe, and open, these alone: whatever else there is may be in
                an operator's hands, who needs it untouched. After a wider scan
                ``close`` has to come first to let go of the others.
        """

    def read(self) -> tuple[Reading, ...]:
        """Poll the GPUs of the last scan."""

    def wait(self, timeout_s: float) -> tuple[XidEvent | Alarm, ...]:
        """Wait for events, at most ``timeout_s`` seconds.

        () before the time is up means that something may have changed without
        an event: ``read`` tells.
        """

    def wake(self) -> None:
        """End a ``wait`` in progress, or the next one, early, where that is possible.
        Never raises."""

    def interrupt(self) -> None:
        """Make the call in progress, or the next one, raise ``Interrupted``, where that
        is possible; then only ``close`` may follow. Never raises."""

    def errors(self) -> tuple[CallError, ...]:
        """The driver calls that failed since this was asked last. Never raises."""

    def close(self) -> bool:
        """Let go of the driver. Never raises; a second call does nothing.

        Returns:
            Whether nothing of ours is open any more. It is not where a call
            hangs that nothing can end.
        """


class Host(Protocol):
    """The host's files."""

    def facts(self, scan: Scan) -> HostFacts:
        """What the host says about these GPUs. Never raises: a file that
        cannot be read costs the one fact that it would have told."""

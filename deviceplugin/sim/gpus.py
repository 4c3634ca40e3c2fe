"""Simulated GPUs: ``Hardware`` and ``Host`` from a profile, changed while they run.

Owns what is injected until the daemon has heard of it. One thread uses
``SimulatedHardware`` as ``Hardware``; any other may inject meanwhile. Nothing
touches the machine: no driver, no device node, no file.

How a change is noticed at once: every injection ends the ``wait`` in progress,
an Xid by being returned, an outage by being raised, a GPU that is lost, back
or reset by ``()`` before the time is up. Such a ``wait`` goes on returning at
once until ``read`` was called, so a caller that polls after an early ``()``
can't miss a change, however late in its wait that came.

Surprising: Xid errors and resets come out in the order in which they went in.
``read`` withholds a reset while ``wait`` still has an earlier Xid to tell, and
the other way round; else a fault and its cure could be heard in the wrong
order, and the GPU stay unhealthy for good. Unlike with real hardware, a GPU
that is back is seen without a new session, and what happens while the driver
is closed is told after the next ``scan``.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace

from deviceplugin.errors import HardwareError, Interrupted, ProfileError
from deviceplugin.model import (
    Address,
    CallError,
    DriverGpu,
    Fault,
    GpuId,
    HostFacts,
    NumaPlace,
    NumaSource,
    Reading,
    Scan,
    XidEvent,
)
from deviceplugin.sim.profile import Profile

LOST = Fault("lost", "the simulated GPU is lost")

CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm")


class SimulatedHardware:
    """A driver with the GPUs of a profile."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._changed = threading.Condition()
        self._open = False
        self._failure: HardwareError | None = None
        self._lost: set[GpuId] = set()
        self._untold: deque[XidEvent | GpuId] = deque()
        """In order: Xid errors for ``wait`` to tell, GPUs that were reset for ``read``."""
        self._unread = False
        """Something changed that ``read`` has not told yet."""
        self._only: frozenset[GpuId] = frozenset()
        """The GPUs of the last scan."""
        self._interrupted = False

    # --- Hardware -------------------------------------------------------------------

    def scan(self, only: tuple[Address, ...] | None = None) -> Scan:
        with self._changed:
            self._check()
            self._open = True
            wanted = None if only is None else {address.pci_bus_id for address in only}
            gpus = tuple(
                replace(gpu, fault=LOST) if gpu.id in self._lost else gpu
                for gpu in self._profile.gpus
                if wanted is None or gpu.pci_bus_id in wanted
            )
            self._only = frozenset(gpu.id for gpu in gpus)
            return Scan(self._profile.driver, gpus, links=self._profile.links)

    def read(self) -> tuple[Reading, ...]:
        with self._changed:
            self._check()
            if not self._open:
                return ()
            self._unread = False
            reset = set()
            while self._untold and not isinstance(self._untold[0], XidEvent):
                reset.add(self._untold.popleft())
            return tuple(
                Reading(gpu.id, LOST if gpu.id in self._lost else None, gpu.id in reset)
                for gpu in self._profile.gpus
                if gpu.id in self._only
            )

    def wait(self, timeout_s: float) -> tuple[XidEvent, ...]:
        with self._changed:
            self._changed.wait_for(self._has_news, timeout_s)
            self._check()
            events: list[XidEvent] = []
            while self._open and self._untold and isinstance(self._untold[0], XidEvent):
                event = self._untold[0]
                self._untold.popleft()
                if event.gpu in self._only:
                    events.append(event)
            return tuple(events)

    def wake(self) -> None:
        with self._changed:
            self._wake()

    def interrupt(self) -> None:
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def errors(self) -> tuple[CallError, ...]:
        return ()

    def close(self) -> bool:
        with self._changed:
            self._open = self._interrupted = False
        return True

    def _has_news(self) -> bool:
        if self._failure is not None or self._interrupted:
            return True
        return self._open and (self._unread or bool(self._untold))

    def _check(self) -> None:
        if self._interrupted:
            raise Interrupted("given up")
        if self._failure is not None:
            # The same error is raised again and again: its trace must not grow.
            raise self._failure.with_traceback(None)

    # --- what is injected -------------------------------------------------------------

    def find(self, name: str) -> DriverGpu:
        """The GPU of this index or UUID.

        Raises:
            ProfileError: there is none.
        """
        for gpu in self._profile.gpus:
            if name in (gpu.id, str(gpu.index)):
                return gpu
        choice = f"an index from 0 to {len(self._profile.gpus) - 1}, or a UUID of this profile"
        raise ProfileError([f"there is no GPU {name[:80]!r}: give {choice}"])

    def xid(
        self,
        gpu: str,
        code: int,
        gpu_instance: int | None = None,
        compute_instance: int | None = None,
    ) -> None:
        """The driver reports an Xid error."""
        event = XidEvent(self.find(gpu).id, code, gpu_instance, compute_instance)
        with self._changed:
            self._untold.append(event)
            self._changed.notify_all()

    def lose(self, gpu: str) -> None:
        """The GPU stops answering."""
        found = self.find(gpu).id
        with self._changed:
            self._lost.add(found)
            self._wake()

    def restore(self, gpu: str) -> None:
        """The GPU answers again, without a reset."""
        found = self.find(gpu).id
        with self._changed:
            self._lost.discard(found)
            self._wake()

    def reset(self, gpu: str) -> None:
        """The GPU was reset, and answers."""
        found = self.find(gpu).id
        with self._changed:
            self._lost.discard(found)
            self._untold.append(found)
            self._wake()

    def fail(self, error: HardwareError | None) -> None:
        """Every call fails with this error, until None ends it. ``close`` does not."""
        with self._changed:
            self._failure = error
            self._wake()

    def _wake(self) -> None:
        self._unread = True
        self._changed.notify_all()


class SimulatedHost:
    """The host's files as a profile has them."""

    def __init__(self, profile: Profile, *, nodes: bool = False) -> None:
        """
        Args:
            nodes: name device nodes, too. Only where no container is started:
                a container runtime refuses nodes that the host does not have.
        """
        self._profile = profile
        self._nodes = nodes

    def facts(self, scan: Scan) -> HostFacts:
        nodes = dict(zip((gpu.id for gpu in self._profile.gpus), self._profile.numa, strict=True))
        known = [gpu for gpu in scan.gpus if gpu.id in nodes]
        numa = {gpu.id: self._place(nodes[gpu.id]) for gpu in known}
        if not self._nodes:
            return HostFacts(numa)
        return HostFacts(
            numa,
            nodes={gpu.id: (f"/dev/nvidia{gpu.minor}",) for gpu in known},
            control_nodes=CONTROL_NODES,
        )

    def _place(self, node: int | None) -> NumaPlace:
        if node is None:
            return NumaPlace(None, NumaSource.NOT_TOLD)
        if not self._profile.cpus[node]:
            return NumaPlace(None, NumaSource.NO_CPUS)
        return NumaPlace(node, NumaSource.PROFILE)

"""Simulated GPUs: ``Hardware`` and ``Host`` from a profile, changed while they run.

One thread of the daemon uses ``SimulatedHardware``; any other may inject.
Whatever is injected ends a ``wait`` at once: an Xid by being returned, a GPU
that is lost, back or reset by an early return without events, which by the
rule of ``Hardware.wait`` means "read, and see". Unlike real hardware a
simulated GPU that is back needs no new session to be seen.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from deviceplugin.errors import HardwareError, ProfileError
from deviceplugin.model import (
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


class SimulatedHardware:
    """A driver with the GPUs of a profile."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._changed = threading.Condition()
        self._events: list[XidEvent] = []
        self._lost: set[GpuId] = set()
        self._reset: set[GpuId] = set()
        self._failure: HardwareError | None = None
        self._look = False

    # --- Hardware -------------------------------------------------------------------

    def scan(self) -> Scan:
        with self._changed:
            self._check()
            gpus = tuple(
                replace(gpu, fault=LOST) if gpu.id in self._lost else gpu
                for gpu in self._profile.gpus
            )
            return Scan(self._profile.driver, gpus, links=self._profile.links)

    def read(self) -> tuple[Reading, ...]:
        with self._changed:
            self._check()
            reset, self._reset = self._reset, set()
            return tuple(
                Reading(gpu.id, LOST if gpu.id in self._lost else None, gpu.id in reset)
                for gpu in self._profile.gpus
            )

    def wait(self, timeout_s: float) -> tuple[XidEvent, ...]:
        with self._changed:
            self._changed.wait_for(
                lambda: self._events or self._look or self._failure is not None, timeout_s
            )
            self._check()
            # Xids are handed out before the look: a reset that follows one must
            # not be read before it.
            events, self._events = tuple(self._events), []
            if not events:
                self._look = False
            return events

    def errors(self) -> tuple[CallError, ...]:
        return ()

    def close(self) -> None:
        """Nothing to let go of."""

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- what is injected -------------------------------------------------------------

    def find(self, name: str) -> DriverGpu:
        """The GPU of this index or UUID.

        Raises:
            ProfileError: there is none.
        """
        for gpu in self._profile.gpus:
            if name in (gpu.id, str(gpu.index)):
                return gpu
        last = len(self._profile.gpus) - 1
        raise ProfileError(
            [f"there is no GPU {name!r}: give an index from 0 to {last}, or a UUID of this profile"]
        )

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
            self._reset.discard(self.find(gpu).id)  # that was before
            self._events.append(event)
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
            self._reset.add(found)
            self._wake()

    def fail(self, error: HardwareError | None) -> None:
        """Every call fails with this error, until None ends it."""
        with self._changed:
            self._failure = error
            self._wake()

    def _wake(self) -> None:
        self._look = True
        self._changed.notify_all()


class SimulatedHost:
    """The host's files of a profile. A device node that is not there would keep
    a container from starting, so none are named unless asked for."""

    def __init__(self, profile: Profile, *, nodes: bool = False) -> None:
        self._profile = profile
        self._nodes = nodes

    def facts(self, scan: Scan) -> HostFacts:
        places = zip(self._profile.gpus, self._profile.numa, strict=True)
        numa = {gpu.id: self._place(node) for gpu, node in places}
        known = [gpu for gpu in scan.gpus if gpu.id in numa]
        if not self._nodes:
            return HostFacts(numa)
        return HostFacts(
            numa,
            nodes={gpu.id: (f"/dev/nvidia{gpu.minor}",) for gpu in known},
            control_nodes=("/dev/nvidiactl", "/dev/nvidia-uvm"),
        )

    def _place(self, node: int | None) -> NumaPlace:
        if node is None:
            return NumaPlace(None, NumaSource.NOT_TOLD)
        if not self._profile.cpus[node]:
            return NumaPlace(None, NumaSource.NO_CPUS)
        return NumaPlace(node, NumaSource.PROFILE)

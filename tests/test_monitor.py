"""deviceplugin.monitor, against a driver that does what the test says"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from deviceplugin import monitor
from deviceplugin.clock import SystemClock
from deviceplugin.errors import DriverMissing, HardwareError
from deviceplugin.model import (
    CallError,
    DriverInfo,
    Fault,
    GpuId,
    Health,
    HostFacts,
    NumaPlace,
    NumaSource,
    Reading,
    Scan,
    Snapshot,
    UnreadableGpu,
    XidEvent,
)
from deviceplugin.monitor import Monitor
from deviceplugin.stats import Stats
from deviceplugin.store import Store
from tests.builders import driver_gpu, gpu_id

LOST = Fault("lost", "gone")


class ScriptedHardware:
    """A driver with two GPUs whose every answer can be set.

    An event put into ``events`` is heard at once; None makes ``wait`` return
    early without one, an error is raised by it.
    """

    def __init__(self) -> None:
        self.result: Scan | HardwareError = Scan(DriverInfo("1"), (driver_gpu(0), driver_gpu(1)))
        self.faults: dict[GpuId, Fault] = {}
        self.was_reset: set[GpuId] = set()
        self.events: queue.SimpleQueue[XidEvent | HardwareError | None] = queue.SimpleQueue()
        self.failed: list[CallError] = []
        self.log: list[str] = []

    def scan(self) -> Scan:
        self.log.append("scan")
        if isinstance(self.result, HardwareError):
            raise self.result
        return self.result

    def read(self) -> tuple[Reading, ...]:
        self.log.append("read")
        assert isinstance(self.result, Scan)
        reset, self.was_reset = self.was_reset, set()
        return tuple(
            Reading(gpu.id, self.faults.get(gpu.id), gpu.id in reset) for gpu in self.result.gpus
        )

    def wait(self, timeout_s: float) -> tuple[XidEvent, ...]:
        try:
            event = self.events.get(timeout=timeout_s)
        except queue.Empty:
            return ()
        if isinstance(event, HardwareError):
            raise event
        return () if event is None else (event,)

    def errors(self) -> tuple[CallError, ...]:
        failed, self.failed = tuple(self.failed), []
        return failed

    def wake(self) -> None:
        self.events.put(None)

    def abort(self) -> None:
        self.wake()

    def close(self) -> None:
        self.log.append("close")


class OneNode:
    def facts(self, scan: Scan) -> HostFacts:
        return HostFacts({gpu.id: NumaPlace(0, NumaSource.DEVICE) for gpu in scan.gpus})


class Watched:
    """A running monitor and what comes out of it."""

    def __init__(self, hardware: ScriptedHardware, poll_interval_s: float = 3600.0) -> None:
        self.hardware = hardware
        self.store, self.stats = Store(), Stats()
        self.publishable = threading.Event()
        self.crashes: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.monitor = Monitor(
            hardware,
            OneNode(),
            self.store,
            self.stats,
            SystemClock(),
            poll_interval_s=poll_interval_s,
            on_publishable=self.publishable.set,
            on_crash=self.crashes.put,
        )
        self.monitor.start()

    def wait_for(self, good: Callable[[Snapshot], bool]) -> Snapshot:
        """The first snapshot that is good."""
        timed_out = threading.Event()

        def time_out() -> None:
            timed_out.set()
            self.store.wake()

        timer = threading.Timer(10, time_out)
        timer.start()
        try:
            found = self.store.snapshot
            while not good(found):
                newer = self.store.wait_newer(found.generation, timed_out.is_set)
                assert newer is not None, f"never came: last was {found}"
                found = newer
            return found
        finally:
            timer.cancel()

    def wait_reason(self, number: int, reason: str) -> None:
        self.wait_for(
            lambda s: gpu_id(number) in s.verdicts and s.verdicts[gpu_id(number)].reason == reason
        )


@pytest.fixture
def hardware() -> ScriptedHardware:
    return ScriptedHardware()


@pytest.fixture
def start(hardware: ScriptedHardware) -> Iterator[Callable[..., Watched]]:
    started: list[Watched] = []

    def begin(poll_interval_s: float = 3600.0) -> Watched:
        started.append(Watched(hardware, poll_interval_s))
        return started[-1]

    yield begin
    for watched in started:
        watched.monitor.stop()
        assert watched.monitor.join(5)


Start = Callable[..., Watched]


def test_what_the_scan_finds_is_published(start: Start) -> None:
    watched = start()
    assert watched.publishable.wait(5)
    devices = watched.store.snapshot.devices
    assert [device.gpu for device in devices] == [gpu_id(0), gpu_id(1)]
    assert [device.numa_nodes for device in devices] == [(0,), (0,)]


def test_a_fatal_xid_makes_its_gpu_unhealthy_and_no_other(
    hardware: ScriptedHardware, start: Start
) -> None:
    watched = start()
    hardware.events.put(XidEvent(gpu_id(1), 79))
    watched.wait_reason(1, "xid-79")
    healths = [device.health for device in watched.store.snapshot.devices]
    assert healths == [Health.HEALTHY, Health.UNHEALTHY]
    assert watched.stats.counts("xid_errors") == {(gpu_id(1), "79"): 1}
    assert watched.stats.counts("health_transitions") == {(gpu_id(1), "Unhealthy"): 1}


def test_other_xids_are_counted_and_change_nothing(
    hardware: ScriptedHardware, start: Start
) -> None:
    watched = start()
    watched.publishable.wait(5)
    before = watched.store.snapshot
    hardware.events.put(XidEvent(gpu_id(1), 13))
    hardware.events.put(XidEvent(None, 79))
    hardware.events.put(XidEvent(GpuId("GPU-stranger"), 79))
    hardware.events.put(XidEvent(gpu_id(0), 79, gpu_instance=1, compute_instance=0))
    hardware.events.put(XidEvent(gpu_id(1), 48))
    watched.wait_reason(1, "xid-48")
    assert watched.stats.counts("xid_errors") == {
        (gpu_id(1), "13"): 1,
        ("", "79"): 2,
        (gpu_id(0), "79"): 1,
        (gpu_id(1), "48"): 1,
    }
    assert watched.store.snapshot.generation == before.generation + 1


def test_a_silent_gpu_is_found_by_polling_and_recovers_when_it_answers(
    hardware: ScriptedHardware, start: Start
) -> None:
    watched = start(0.01)
    hardware.faults[gpu_id(0)] = LOST
    watched.wait_reason(0, "lost")
    hardware.faults.clear()
    watched.wait_reason(0, "")


def test_a_wait_that_returns_early_leads_to_a_look(
    hardware: ScriptedHardware, start: Start
) -> None:
    watched = start()
    watched.publishable.wait(5)
    hardware.faults[gpu_id(0)] = LOST
    hardware.events.put(None)
    watched.wait_reason(0, "lost")


def test_a_reset_ends_an_xid(hardware: ScriptedHardware, start: Start) -> None:
    watched = start()
    hardware.events.put(XidEvent(gpu_id(0), 79))
    watched.wait_reason(0, "xid-79")
    hardware.was_reset.add(gpu_id(0))
    hardware.events.put(None)
    watched.wait_reason(0, "")


def test_while_a_gpu_is_silent_the_driver_is_opened_anew_now_and_then(
    hardware: ScriptedHardware, start: Start
) -> None:
    watched = start(0.01)
    watched.publishable.wait(5)
    hardware.result = Scan(DriverInfo("1"), (driver_gpu(1),), (UnreadableGpu(0, LOST),))
    hardware.faults[gpu_id(0)] = LOST
    watched.wait_reason(0, "absent")
    assert "close" in hardware.log
    hardware.faults.clear()
    hardware.result = Scan(DriverInfo("1"), (driver_gpu(0), driver_gpu(1)))
    watched.wait_reason(0, "")


def test_a_gpu_that_could_not_be_read_at_first_is_found_later(
    hardware: ScriptedHardware, start: Start
) -> None:
    hardware.result = Scan(DriverInfo("1"), (driver_gpu(1),), (UnreadableGpu(0, LOST),))
    watched = start(0.01)
    watched.wait_for(lambda s: len(s.devices) == 1)
    hardware.result = Scan(DriverInfo("1"), (driver_gpu(0), driver_gpu(1)))
    watched.wait_for(lambda s: len(s.devices) == 2)


def test_a_driver_that_fails_costs_no_device_and_is_opened_again(
    hardware: ScriptedHardware, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "BACK_OFF_FIRST_S", 0.01)
    watched = start()
    watched.publishable.wait(5)
    hardware.result = DriverMissing("unloaded")
    hardware.events.put(HardwareError("unknown", call="nvmlEventSetWait_v2", driver_code=999))
    troubled = watched.wait_for(lambda s: s.trouble == Fault("driver_missing", "unloaded"))
    assert [device.health for device in troubled.devices] == [Health.HEALTHY] * 2
    hardware.result = Scan(DriverInfo("2"), (driver_gpu(0), driver_gpu(1)))
    well = watched.wait_for(lambda s: s.trouble is None)
    assert well.inventory is not None
    assert well.inventory.driver.driver_version == "2"


def test_no_gpu_at_all_is_said_and_looked_for_again(
    hardware: ScriptedHardware, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "BACK_OFF_FIRST_S", 0.01)
    hardware.result = Scan(DriverInfo("1"), ())
    watched = start()
    found = watched.wait_for(lambda s: s.trouble is not None)
    assert found.trouble == Fault("driver_failed", "the driver lists no GPU")
    assert not watched.publishable.is_set()
    hardware.result = Scan(DriverInfo("1"), (driver_gpu(0),))
    watched.wait_for(lambda s: len(s.devices) == 1)
    assert watched.publishable.wait(5)


def test_failed_calls_are_counted(hardware: ScriptedHardware, start: Start) -> None:
    hardware.failed = [CallError("nvmlDeviceGetName", "unknown")]
    watched = start()
    watched.publishable.wait(5)
    hardware.events.put(XidEvent(gpu_id(0), 79))
    hardware.events.put(XidEvent(gpu_id(1), 79))
    watched.wait_reason(1, "xid-79")
    assert watched.stats.counts("driver_errors") == {("nvmlDeviceGetName", "unknown"): 1}


def test_stop_closes_the_driver(hardware: ScriptedHardware) -> None:
    watched = Watched(hardware)
    watched.publishable.wait(5)
    assert watched.monitor.trouble() is None
    watched.monitor.stop()
    assert watched.monitor.join(5)
    assert hardware.log[-1] == "close"
    assert watched.monitor.trouble() == "the monitor thread is dead"


def test_a_fault_of_ours_in_the_thread_is_heard_of(hardware: ScriptedHardware) -> None:
    hardware.result = replace(Scan(DriverInfo("1"), ()), gpus=None)  # type: ignore[arg-type] # on purpose
    watched = Watched(hardware)
    assert isinstance(watched.crashes.get(timeout=5), TypeError)
    assert watched.monitor.join(5)


def test_a_hung_driver_is_no_reason_to_be_killed() -> None:
    class LateClock(SystemClock):
        ahead_s = 0.0

        def monotonic(self) -> float:
            return super().monotonic() + self.ahead_s

    entered, leave = threading.Event(), threading.Event()

    class Hung(ScriptedHardware):
        def wait(self, timeout_s: float) -> tuple[XidEvent, ...]:
            entered.set()
            leave.wait(10)
            return ()

    clock = LateClock()
    watching = Monitor(
        Hung(),
        OneNode(),
        Store(),
        Stats(),
        clock,
        poll_interval_s=3600,
        on_publishable=lambda: None,
        on_crash=lambda _: None,
    )
    watching.start()
    assert entered.wait(5)
    clock.ahead_s = 1000
    assert watching.trouble() is None
    watching.stop()
    assert not watching.join(0.05), "a hung thread is left behind"
    leave.set()
    assert watching.join(5)

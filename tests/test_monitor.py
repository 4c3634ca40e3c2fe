"""deviceplugin.monitor, against a driver that does what the test says"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deviceplugin import health, monitor, wire
from deviceplugin.checkpoint import Checkpoint
from deviceplugin.clock import SystemClock
from deviceplugin.doctor import Doctor
from deviceplugin.errors import DriverMissing, HardwareError, Interrupted, ListTooLong
from deviceplugin.holders import Holders
from deviceplugin.keeper import Keeper
from deviceplugin.memory import Memory
from deviceplugin.model import (
    Address,
    Alarm,
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
from deviceplugin.monitor import Monitor, Policy
from deviceplugin.roll import Roll
from deviceplugin.stats import Stats
from deviceplugin.store import Store
from tests.builders import driver_gpu, gpu_id

LOST = Fault("lost", "gone")
AT_ONCE = health.Policy(hold_down_s=0.0)


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
        self.lets_go = True

    def scan(self, only: tuple[Address, ...] | None = None) -> Scan:
        self.log.append("scan" if only is None else f"scan {[each.index for each in only]}")
        if isinstance(self.result, HardwareError):
            raise self.result
        if only is None:
            return self.result
        wanted = {each.pci_bus_id for each in only}
        gpus = tuple(gpu for gpu in self.result.gpus if gpu.pci_bus_id in wanted)
        return replace(self.result, gpus=gpus)

    def read(self) -> tuple[Reading, ...]:
        self.log.append("read")
        assert isinstance(self.result, Scan)
        reset, self.was_reset = self.was_reset, set()
        return tuple(
            Reading(gpu.id, self.faults.get(gpu.id), gpu.id in reset) for gpu in self.result.gpus
        )

    def wait(self, timeout_s: float) -> tuple[XidEvent | Alarm, ...]:
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

    def interrupt(self) -> None:
        self.events.put(Interrupted("given up"))

    def close(self) -> bool:
        self.log.append("close")
        return self.lets_go


class OneNode:
    def facts(self, scan: Scan) -> HostFacts:
        return HostFacts({gpu.id: NumaPlace(0, NumaSource.DEVICE) for gpu in scan.gpus})


class Watched:
    """A running monitor and what comes out of it."""

    def __init__(
        self,
        hardware: ScriptedHardware,
        poll_interval_s: float = 3600.0,
        policy: Policy | None = None,
        roll: Roll | None = None,
    ) -> None:
        self.hardware = hardware
        self.store, self.stats = Store(), Stats()
        self.publishable = threading.Event()
        self.crashes: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        clock = SystemClock()
        policy = policy or Policy(poll_interval_s, health=AT_ONCE)
        doctor = Doctor(self.stats, clock, policy.health)
        keeper = Keeper(
            OneNode(), self.store, self.stats, clock, doctor, roll, None, self.publishable.set
        )
        self.monitor = Monitor(
            hardware,
            keeper,
            self.stats,
            clock,
            policy,
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

    def begin(*args: Any, **options: Any) -> Watched:
        started.append(Watched(hardware, *args, **options))
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
    assert watched.stats.counts("xid_errors") == {(gpu_id(1), "79", "unhealthy"): 1}
    assert watched.stats.counts("health_transitions") == {(gpu_id(1), "Unhealthy"): 1}


def test_other_xids_are_counted_and_change_nothing(
    hardware: ScriptedHardware, start: Start
) -> None:
    watched = start()
    watched.publishable.wait(5)
    before = watched.wait_for(lambda found: bool(found.conditions))
    hardware.events.put(XidEvent(gpu_id(1), 13))
    hardware.events.put(XidEvent(None, 79))
    hardware.events.put(XidEvent(GpuId("GPU-stranger"), 79))
    hardware.events.put(XidEvent(gpu_id(0), 79, gpu_instance=1, compute_instance=0))
    hardware.events.put(XidEvent(gpu_id(1), 48))
    watched.wait_reason(1, "xid-48")
    assert watched.stats.counts("xid_errors") == {
        (gpu_id(1), "13", "report"): 1,
        ("", "79", "none"): 2,
        (gpu_id(0), "79", "none"): 1,
        (gpu_id(1), "48", "unhealthy"): 1,
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
    assert found.trouble == Fault("no_gpu", "the driver lists no GPU")
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
        def wait(self, timeout_s: float) -> tuple[XidEvent | Alarm, ...]:
            entered.set()
            leave.wait(10)
            return ()

    clock = LateClock()
    doctor = Doctor(Stats(), clock, AT_ONCE)
    keeper = Keeper(OneNode(), Store(), Stats(), clock, doctor, None, None, lambda: None)
    watching = Monitor(
        Hung(), keeper, Stats(), clock, Policy(poll_interval_s=3600), on_crash=lambda _: None
    )
    watching.start()
    assert entered.wait(5)
    clock.ahead_s = 1000
    assert watching.trouble() is None
    watching.stop()
    assert not watching.join(0.05), "a hung thread is left behind"
    leave.set()
    assert watching.join(5)


# --- maintenance ----------------------------------------------------------------------------


def test_a_gpu_in_maintenance_is_withdrawn_let_go_and_left_alone(
    hardware: ScriptedHardware, start: Start
) -> None:
    watched = start(0.01)
    watched.publishable.wait(5)
    hardware.log.clear()
    done = watched.monitor.maintain(["1"], "swap the riser")
    assert (done["refused"], done["gpus"], done["let_go"]) == ((), (gpu_id(1),), True)
    assert hardware.log.index("close") < 3, "the driver is closed before the answer"
    verdict = watched.store.snapshot.verdicts[gpu_id(1)]
    assert (verdict.health, verdict.reason) == (Health.UNHEALTHY, "maintenance")
    assert verdict.detail == "swap the riser"
    hardware.faults[gpu_id(0)] = LOST
    watched.wait_reason(0, "lost")
    assert "scan [0]" in hardware.log
    assert "scan" not in hardware.log, "from then on only the other GPU is asked for"


def test_maintenance_ends_with_a_fresh_look(hardware: ScriptedHardware, start: Start) -> None:
    watched = start(0.01)
    hardware.events.put(XidEvent(gpu_id(1), 79))
    watched.wait_reason(1, "xid-79")
    watched.monitor.maintain([gpu_id(1)], "reset")
    watched.wait_reason(1, "maintenance")
    hardware.log.clear()
    assert watched.monitor.maintain(["all"], None)["gpus"] == (gpu_id(1),)
    watched.wait_reason(1, "")
    assert "scan" in hardware.log


def test_a_gpu_that_is_still_bad_after_maintenance_is_not_offered(
    hardware: ScriptedHardware, start: Start
) -> None:
    watched = start(0.01)
    watched.publishable.wait(5)
    watched.monitor.maintain(["all"], "")
    hardware.faults[gpu_id(1)] = LOST
    watched.monitor.maintain(["all"], None)
    watched.wait_reason(1, "lost")
    watched.wait_reason(0, "")


def test_with_every_gpu_in_maintenance_the_driver_is_not_even_opened(
    hardware: ScriptedHardware, start: Start
) -> None:
    watched = start(0.01)
    watched.publishable.wait(5)
    watched.monitor.maintain(["all"], "driver upgrade")
    hardware.log.clear()
    assert watched.monitor.maintain(["nope"], "")["refused"], "it is obeyed meanwhile"
    assert set(hardware.log) == {"close"}
    assert watched.store.snapshot.trouble is None
    assert watched.monitor.trouble() is None


def test_a_driver_that_fails_can_be_put_into_maintenance(
    hardware: ScriptedHardware, start: Start
) -> None:
    watched = start()
    watched.publishable.wait(5)
    hardware.result = DriverMissing("unloaded")
    hardware.events.put(HardwareError("unknown"))
    watched.wait_for(lambda s: s.trouble is not None)
    assert not watched.monitor.maintain(["all"], "upgrade")["refused"]
    watched.wait_reason(0, "maintenance")
    hardware.result = Scan(DriverInfo("2"), (driver_gpu(0), driver_gpu(1)))
    watched.monitor.maintain(["all"], None)
    watched.wait_for(lambda s: [d.health for d in s.devices] == [Health.HEALTHY] * 2)


@pytest.mark.parametrize(
    ("names", "reason", "why"),
    [
        (["GPU-x"], "", "GPU-x is no GPU's id, PCI bus id or index"),
        (["0", "all"], "", "'all' stands alone"),
        (["0"], None, "0 is not in maintenance"),
        (["all"], None, "no GPU is in maintenance"),
        (["-1"], "", "-1 is no GPU's id"),
    ],
)
def test_a_wrong_wish_does_nothing_and_says_why(
    start: Start, names: list[str], reason: str | None, why: str
) -> None:
    watched = start()
    watched.publishable.wait(5)
    before = watched.store.snapshot
    (refused,) = watched.monitor.maintain(names, reason)["refused"]
    assert refused.startswith(why)
    assert watched.store.snapshot == before


def test_where_no_gpu_is_known_none_can_be_withdrawn(
    hardware: ScriptedHardware, start: Start
) -> None:
    hardware.result = DriverMissing("no library")
    watched = start()
    watched.wait_for(lambda s: s.trouble is not None)
    (refused,) = watched.monitor.maintain(["all"], "")["refused"]
    assert refused == "no GPU is known here, so there is none to withdraw"


def test_a_driver_that_cannot_be_let_go_is_said(hardware: ScriptedHardware, start: Start) -> None:
    watched = start()
    watched.publishable.wait(5)
    hardware.lets_go = False
    assert watched.monitor.maintain(["0"], "")["let_go"] is False


def test_a_second_start_keeps_the_time_and_takes_a_new_reason(start: Start) -> None:
    watched = start()
    watched.publishable.wait(5)
    watched.monitor.maintain(["0"], "reset")
    first = watched.store.snapshot.verdicts[gpu_id(0)]
    watched.monitor.maintain(["all"], "")
    assert watched.store.snapshot.verdicts[gpu_id(0)] == first
    watched.monitor.maintain(["0"], "swap")
    assert watched.store.snapshot.verdicts[gpu_id(0)] == replace(first, detail="swap")


def test_maintenance_survives_a_restart(
    hardware: ScriptedHardware, start: Start, tmp_path: Path
) -> None:
    watched = start(roll=a_roll(tmp_path))
    watched.publishable.wait(5)
    assert watched.monitor.maintain(["all"], "reset")["saved"]
    watched.monitor.stop()
    assert watched.monitor.join(5)
    hardware.log.clear()
    again = start(roll=a_roll(tmp_path))
    assert again.publishable.wait(5)
    assert {v.detail for v in again.store.snapshot.verdicts.values()} == {"reset"}
    assert "scan" not in hardware.log
    again.monitor.maintain(["all"], None)
    again.wait_reason(0, "")


def a_roll(directory: Path) -> Roll:
    resource, clock = "vendor.example/gpu", SystemClock()
    holders = Holders(Checkpoint(directory, resource), directory / "pods.sock", resource)
    return Roll(Memory(directory, "stem", Stats(), clock), holders, clock)


# --- monitoring that is lost -------------------------------------------------------------------


def break_down(hardware: ScriptedHardware) -> None:
    hardware.result = DriverMissing("unloaded")
    hardware.events.put(HardwareError("unknown"))


def test_monitoring_that_is_lost_is_said_and_withdraws_nothing(
    hardware: ScriptedHardware, start: Start
) -> None:
    watched = start(policy=Policy(3600, lost_after_s=0.05))
    watched.publishable.wait(5)
    assert watched.stats.gauges("monitoring_lost") == {(): 0}
    break_down(hardware)
    until(lambda: watched.stats.gauges("monitoring_lost") == {(): 1})
    assert [d.health for d in watched.store.snapshot.devices] == [Health.HEALTHY] * 2
    hardware.result = Scan(DriverInfo("1"), (driver_gpu(0), driver_gpu(1)))
    until(lambda: watched.stats.gauges("monitoring_lost") == {(): 0})


def test_monitoring_that_is_lost_withdraws_the_gpus_if_that_is_wanted(
    hardware: ScriptedHardware, start: Start
) -> None:
    watched = start(policy=Policy(3600, lost_after_s=0.05, lost_is_unhealthy=True))
    hardware.events.put(XidEvent(gpu_id(1), 79))
    watched.wait_reason(1, "xid-79")
    break_down(hardware)
    watched.wait_reason(0, "monitoring-lost")
    assert watched.store.snapshot.verdicts[gpu_id(1)].reason == "xid-79", "the first reason stays"
    hardware.result = Scan(DriverInfo("1"), (driver_gpu(0), driver_gpu(1)))
    watched.wait_reason(0, "")
    assert watched.store.snapshot.verdicts[gpu_id(1)].reason == "xid-79", "this ends no Xid"


def test_a_policy_can_be_replaced(hardware: ScriptedHardware, start: Start) -> None:
    watched = start(3600)
    watched.publishable.wait(5)
    hardware.faults[gpu_id(0)] = LOST
    watched.monitor.policy = Policy(0.01, health=AT_ONCE)
    watched.wait_reason(0, "lost")
    hardware.faults.clear()
    watched.wait_reason(0, "")


def until(good: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not good():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


# --- what is remembered, and what does not fit ----------------------------------------------------


def test_what_is_remembered_is_listed_as_absent_while_the_driver_is_away(
    hardware: ScriptedHardware, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "BACK_OFF_FIRST_S", 0.2)
    first = start(roll=a_roll(tmp_path))
    first.publishable.wait(5)
    first.monitor.stop()
    assert first.monitor.join(5)
    hardware.result = DriverMissing("no library")
    again = start(roll=a_roll(tmp_path))
    assert again.publishable.wait(5), "a node that had GPUs has something to publish"
    found = again.store.snapshot
    assert {v.reason for v in found.verdicts.values()} == {"absent"}
    assert {v.detail for v in found.verdicts.values()} == {"not seen yet: no library"}
    assert found.trouble == Fault("driver_missing", "no library")
    hardware.result = Scan(DriverInfo("1"), (driver_gpu(0), driver_gpu(1)))
    again.wait_reason(0, "")


def test_a_first_list_that_the_kubelet_would_refuse_ends_all(
    hardware: ScriptedHardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MESSAGE_MAX_BYTES", 100)
    watched = Watched(hardware)
    error = watched.crashes.get(timeout=5)
    assert isinstance(error, ListTooLong)
    assert "the kubelet takes at most 100" in str(error)
    assert watched.monitor.join(5)


def test_a_later_list_that_the_kubelet_would_refuse_leaves_the_one_before(
    hardware: ScriptedHardware, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "RESCAN_S", 0.02)
    watched = start(0.01)
    watched.publishable.wait(5)
    found = watched.store.snapshot
    assert found.inventory is not None
    longest = wire.longest_list_bytes(found.devices)
    monkeypatch.setattr(wire, "MESSAGE_MAX_BYTES", longest)
    three = tuple(driver_gpu(number) for number in range(3))
    hardware.result = Scan(DriverInfo("1"), three)
    until(lambda: watched.stats.counts("oversized_lists").get((), 0) > 1)
    assert len(watched.store.snapshot.devices) == 2
    hardware.events.put(XidEvent(gpu_id(0), 79))
    hardware.events.put(XidEvent(gpu_id(1), 79))
    watched.wait_reason(1, "xid-79")
    listed = wire.device_list(watched.store.snapshot.devices)
    assert listed.ByteSize() == longest, "it fits whatever becomes of the GPUs' health"

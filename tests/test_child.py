"""deviceplugin.hardware.child and .worker, with the fake driver library"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from deviceplugin.errors import (
    DriverCrashed,
    DriverHung,
    DriverMismatch,
    DriverMissing,
    HardwareError,
)
from deviceplugin.hardware import messages
from deviceplugin.hardware.child import ChildHardware
from deviceplugin.model import (
    Alarm,
    CallError,
    DriverInfo,
    Fault,
    GpuId,
    Scan,
    UnreadableGpu,
    XidEvent,
)
from tests import fakenvml
from tests.builders import driver_gpu
from tests.fakenvml import FakeNode


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    node = fakenvml.pcie_only(tmp_path / "nvml", 3)
    for name, value in node.env().items():
        monkeypatch.setenv(name, value)
    return node


Open = Callable[..., ChildHardware]


@pytest.fixture
def open_(fake_library: Path, gpus: FakeNode) -> Iterator[Open]:
    made: list[ChildHardware] = []

    def make(scan_timeout_s: float = 20, read_timeout_s: float = 20) -> ChildHardware:
        made.append(
            ChildHardware(
                fake_library.parent, scan_timeout_s=scan_timeout_s, read_timeout_s=read_timeout_s
            )
        )
        return made[-1]

    yield make
    for child in made:
        child.close()


@pytest.fixture
def child(open_: Open) -> ChildHardware:
    return open_()


def uuid(gpus: FakeNode, number: int) -> GpuId:
    return GpuId(gpus.gpus[number].uuid)


def hear(child: ChildHardware) -> tuple[XidEvent | Alarm, ...]:
    """The next events."""
    for _ in range(100):
        events = child.wait(1)
        if events:
            return events
    raise AssertionError("nothing was heard")


def test_what_the_driver_tells_comes_through_the_child(
    child: ChildHardware, gpus: FakeNode
) -> None:
    scan = child.scan()
    assert [gpu.id for gpu in scan.gpus] == [uuid(gpus, number) for number in range(3)]
    assert scan.driver.driver_version == "550.54.15"
    assert [reading.fault for reading in child.read()] == [None, None, None]
    gpus.xid(1, 79)
    assert hear(child) == (XidEvent(uuid(gpus, 1), 79),)


def test_the_daemon_itself_never_loads_the_library(child: ChildHardware) -> None:
    child.scan()
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert "libnvidia-ml" not in mapped
    assert child.pid is not None
    assert "libnvidia-ml" in Path(f"/proc/{child.pid}/maps").read_text(encoding="utf-8")
    assert "grpc" not in Path(f"/proc/{child.pid}/maps").read_text(encoding="utf-8")


def test_failed_calls_are_told(child: ChildHardware, gpus: FakeNode) -> None:
    gpus.fail("nvmlDeviceGetName", code=999, gpu=1)
    assert child.scan().gpus[1].model is None
    assert child.errors() == (CallError("nvmlDeviceGetName", "unknown"),)
    assert child.errors() == ()


def test_events_that_come_while_something_is_asked_are_kept(
    child: ChildHardware, gpus: FakeNode
) -> None:
    child.scan()
    gpus.xid(0, 48)
    time.sleep(0.05)  # the child has very likely sent it by now
    child.read()
    assert hear(child) == (XidEvent(uuid(gpus, 0), 48),)


def test_a_wait_without_events_takes_its_time(child: ChildHardware) -> None:
    child.scan()
    assert child.wait(0.01) == ()


def test_a_wait_is_ended_by_wake(child: ChildHardware) -> None:
    child.scan()
    waiting = threading.Thread(target=child.wait, args=(60,))
    waiting.start()
    child.wake()
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_wake_while_something_is_asked_ends_the_next_wait(
    child: ChildHardware, gpus: FakeNode
) -> None:
    child.scan()
    child.wake()
    assert len(child.read()) == 3, "what is asked is answered"
    assert child.wait(60) == ()


def test_an_interrupt_ends_even_a_scan_that_hangs(child: ChildHardware, gpus: FakeNode) -> None:
    gpus.hang("nvmlDeviceGetUUID")
    failures: list[HardwareError] = []

    def scan() -> None:
        try:
            child.scan()
        except HardwareError as error:
            failures.append(error)
        child.close()

    scanning = threading.Thread(target=scan)
    scanning.start()
    gpus.await_call("nvmlDeviceGetUUID 0")
    child.interrupt()
    scanning.join(10)
    assert [str(error) for error in failures] == ["given up"]
    assert child.pid is None


def test_a_crash_is_said_and_a_new_child_goes_on(child: ChildHardware, gpus: FakeNode) -> None:
    child.scan()
    first = child.pid
    gpus.crash("nvmlDeviceGetMemoryInfo", count=1)
    with pytest.raises(DriverCrashed, match="was killed by SIGSEGV"):
        child.read()
    child.close()
    gpus.clear_faults()
    assert len(child.scan().gpus) == 3
    assert child.pid != first


def test_a_killed_child_is_noticed_while_waiting(child: ChildHardware) -> None:
    child.scan()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(DriverCrashed, match="was killed by SIGKILL"):
        child.wait(20)
    child.close()
    assert len(child.scan().gpus) == 3


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetUUID"])
def test_a_scan_that_hangs_is_given_up(open_: Open, gpus: FakeNode, function: str) -> None:
    gpus.hang(function)
    child = open_(scan_timeout_s=0.5)
    with pytest.raises(DriverHung, match="has not answered"):
        child.scan()
    hung = child.pid
    assert hung is not None
    child.close()
    assert not psutil.pid_exists(hung)
    gpus.clear_faults()
    patient = open_()
    assert len(patient.scan().gpus) == 3


def test_a_reading_that_hangs_is_given_up(open_: Open, gpus: FakeNode) -> None:
    child = open_(read_timeout_s=0.5)
    child.scan()
    gpus.hang("nvmlDeviceGetMemoryInfo")
    with pytest.raises(DriverHung):
        child.read()
    child.close()
    gpus.clear_faults()
    assert len(child.scan().gpus) == 3


def test_the_drivers_errors_keep_their_kind(
    child: ChildHardware, gpus: FakeNode, tmp_path: Path
) -> None:
    gpus.mismatch()
    with pytest.raises(DriverMismatch) as caught:
        child.scan()
    assert (caught.value.call, caught.value.driver_code) == ("nvmlInit", 18)
    child.close()
    (tmp_path / "empty").mkdir()
    without = ChildHardware(tmp_path / "empty")
    with pytest.raises(DriverMissing, match="no libnvidia-ml"):
        without.scan()
    without.close()


def test_an_error_while_waiting_is_raised_by_the_wait(child: ChildHardware, gpus: FakeNode) -> None:
    child.scan()
    gpus.fail("nvmlEventSetWait_v2", code=999)
    with pytest.raises(HardwareError, match=r"nvmlEventSetWait_v2 failed: unknown"):
        child.wait(20)
    child.close()


def test_close_lets_go_of_the_driver(child: ChildHardware, gpus: FakeNode) -> None:
    child.scan()
    pid = child.pid
    assert pid is not None
    child.close()
    assert gpus.calls()[-1] == "nvmlShutdown"
    assert not psutil.pid_exists(pid)
    child.close()


def test_nothing_can_be_asked_of_a_closed_driver(child: ChildHardware) -> None:
    with pytest.raises(HardwareError, match="the driver is closed"):
        child.read()
    with pytest.raises(HardwareError, match="the driver is closed"):
        child.wait(1)


def test_a_child_does_not_outlive_its_parent(fake_library: Path, gpus: FakeNode) -> None:
    gpus.hang("nvmlDeviceGetUUID")
    code = (
        "import sys, pathlib, deviceplugin.hardware.child as c;"
        "h = c.ChildHardware(pathlib.Path(sys.argv[1])); h.start();"
        "print(h.pid, flush=True); h.scan()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(fake_library.parent)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    gpus.await_call("nvmlDeviceGetUUID 0")
    parent.kill()
    parent.wait()
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


# --- messages -------------------------------------------------------------------------


def test_messages_arrive_whole_in_whatever_pieces_they_come() -> None:
    scan = Scan(
        DriverInfo("1"),
        (driver_gpu(0),),
        (UnreadableGpu(1, Fault("lost", "gone")),),
    )
    sent: list[messages.Message] = [
        messages.Scanned(scan, (CallError("nvmlInit", "unknown"),)),
        messages.News((XidEvent(None, 79, 1, 0),)),
        messages.News((), (Alarm(GpuId("GPU-1"), Fault("fatal-poison", "spread")), Alarm(None))),
        messages.Failed("driver_failed", "why", "nvmlInit", None),
    ]

    class Wire:
        data = b""

        def sendall(self, data: bytes) -> None:
            self.data += data

    wire = Wire()
    for message in sent:
        messages.send(wire, message)  # type: ignore[arg-type] # all that send needs
    frames = messages.Frames()
    arrived = [
        messages.message(body)
        for position in range(len(wire.data))
        for body in frames.feed(wire.data[position : position + 1])
    ]
    assert arrived == sent


def test_a_length_without_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="a message of 4294967295 bytes"):
        list(messages.Frames().feed(b"\xff\xff\xff\xff"))


def test_other_events_come_through_the_child_too(child: ChildHardware, gpus: FakeNode) -> None:
    child.scan()
    gpus.event(2, 0x2000)
    (alarm,) = hear(child)
    assert isinstance(alarm, Alarm)
    assert (alarm.gpu, alarm.fault and alarm.fault.code) == (uuid(gpus, 2), "fatal-poison")

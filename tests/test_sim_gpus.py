"""Simulated GPUs: a driver that fails when it is told to, and is heard at once."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin import health
from deviceplugin.errors import DriverMissing, HardwareError, ProfileError
from deviceplugin.hardware import Hardware, Host
from deviceplugin.model import (
    DriverInfo,
    GpuId,
    NumaPlace,
    NumaSource,
    Reading,
    Scan,
    XidEvent,
)
from deviceplugin.sim import profile
from deviceplugin.sim.gpus import LOST, SimulatedHardware, SimulatedHost

FOREVER_S = 3600.0
"""A wait that is not cut short runs into the test's own time limit."""

H100X8 = profile.load("h100x8")
IDS = [gpu.id for gpu in H100X8.gpus]


@pytest.fixture
def hardware() -> SimulatedHardware:
    """Eight GPUs, scanned."""
    opened = SimulatedHardware(H100X8)
    opened.scan()
    return opened


class Listener:
    """A thread in ``wait``, as the daemon's."""

    def __init__(self, hardware: SimulatedHardware) -> None:
        self._hardware = hardware
        self._answers: queue.Queue[tuple[XidEvent, ...] | str] = queue.Queue()
        # A daemon thread: a wait that nothing ends must not keep a failing test run.
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        try:
            self._answers.put(self._hardware.wait(FOREVER_S))
        except HardwareError as error:
            self._answers.put(str(error))

    def hears_nothing(self) -> bool:
        """Whether it still waits, after a moment in which it could have answered."""
        self._thread.join(0.02)
        return self._answers.empty()

    def heard(self) -> tuple[XidEvent, ...] | str:
        """What ended the wait: events, or the text of an error."""
        answer = self._answers.get(timeout=10)
        self._thread.join()
        return answer


def _reading(hardware: SimulatedHardware, index: int) -> Reading:
    return hardware.read()[index]


# --- as a driver --------------------------------------------------------------------


def test_it_is_what_the_daemon_asks_for(hardware: SimulatedHardware) -> None:
    driver: Hardware = hardware
    host: Host = SimulatedHost(H100X8)
    assert host.facts(driver.scan()).numa.keys() == set(IDS)


def test_a_scan_tells_the_profile(hardware: SimulatedHardware) -> None:
    driver = DriverInfo("550.54.15", "12.550.54.15", "12.4")
    assert hardware.scan() == Scan(driver, H100X8.gpus, links=H100X8.links)


def test_healthy_gpus_answer_and_report_nothing(hardware: SimulatedHardware) -> None:
    assert hardware.read() == tuple(Reading(gpu) for gpu in IDS)
    assert hardware.wait(0) == ()
    assert hardware.errors() == ()


def test_a_wait_without_news_lasts_its_time_and_ends(hardware: SimulatedHardware) -> None:
    assert hardware.wait(0.01) == ()


def test_before_a_scan_and_after_a_close_there_is_nothing_to_read(
    hardware: SimulatedHardware,
) -> None:
    assert SimulatedHardware(H100X8).read() == ()
    hardware.close()
    hardware.close()
    assert hardware.read() == ()
    hardware.scan()
    assert len(hardware.read()) == 8


def test_what_happens_while_the_driver_is_closed_is_told_after_the_next_scan(
    hardware: SimulatedHardware,
) -> None:
    hardware.close()
    hardware.xid("0", 79)
    hardware.lose("1")
    assert hardware.wait(0) == ()
    assert hardware.read() == ()
    assert hardware.scan().gpus[1].fault == LOST
    assert hardware.wait(FOREVER_S) == (XidEvent(IDS[0], 79),)
    assert hardware.wait(FOREVER_S) == ()
    assert _reading(hardware, 1).fault == LOST


def test_a_wait_on_a_closed_driver_hears_only_that_it_fails(hardware: SimulatedHardware) -> None:
    hardware.close()
    hardware.lose("1")
    listener = Listener(hardware)
    assert listener.hears_nothing()
    hardware.fail(HardwareError("away"))
    assert listener.heard() == "away"


# --- what is injected -----------------------------------------------------------------


def test_an_xid_is_returned_once(hardware: SimulatedHardware) -> None:
    hardware.xid("3", 79)
    assert hardware.wait(FOREVER_S) == (XidEvent(IDS[3], 79),)
    assert hardware.wait(0) == ()


def test_xids_come_in_order_and_can_name_a_mig_slice(hardware: SimulatedHardware) -> None:
    hardware.xid("3", 13, gpu_instance=1, compute_instance=0)
    hardware.xid(IDS[2], 79)
    assert hardware.wait(FOREVER_S) == (XidEvent(IDS[3], 13, 1, 0), XidEvent(IDS[2], 79))


def test_a_lost_gpu_carries_its_fault_in_scan_and_reading(hardware: SimulatedHardware) -> None:
    hardware.lose("5")
    assert hardware.wait(FOREVER_S) == ()
    assert _reading(hardware, 5) == Reading(IDS[5], LOST)
    assert _reading(hardware, 4) == Reading(IDS[4])
    assert hardware.scan().gpus[5] == replace(H100X8.gpus[5], fault=LOST)
    assert LOST.code == "lost"


def test_a_gpu_that_is_back_answers_and_was_not_reset(hardware: SimulatedHardware) -> None:
    hardware.lose("5")
    hardware.read()
    hardware.restore("5")
    assert hardware.wait(FOREVER_S) == ()
    assert _reading(hardware, 5) == Reading(IDS[5])


def test_a_gpu_that_was_reset_says_so_once(hardware: SimulatedHardware) -> None:
    hardware.lose("5")
    hardware.read()
    hardware.reset("5")
    assert hardware.wait(FOREVER_S) == ()
    assert _reading(hardware, 5) == Reading(IDS[5], was_reset=True)
    assert _reading(hardware, 5) == Reading(IDS[5])


def test_an_early_return_is_repeated_until_the_change_was_read(
    hardware: SimulatedHardware,
) -> None:
    """A caller may be late to see that it was early."""
    hardware.lose("5")
    assert hardware.wait(FOREVER_S) == ()
    assert hardware.wait(FOREVER_S) == ()
    hardware.read()
    listener = Listener(hardware)
    assert listener.hears_nothing()
    hardware.restore("5")
    assert listener.heard() == ()


@pytest.mark.parametrize("name", ["8", "-1", "00", "", "GPU-0", "None"])
@pytest.mark.parametrize("verb", ["lose", "restore", "reset"])
def test_an_unknown_gpu_is_refused_with_a_sentence(
    hardware: SimulatedHardware, verb: str, name: str
) -> None:
    with pytest.raises(ProfileError) as caught:
        getattr(hardware, verb)(name)
    assert caught.value.mistakes == (
        f"there is no GPU {name!r}: give an index from 0 to 7, or a UUID of this profile",
    )
    with pytest.raises(ProfileError):
        hardware.xid(name, 79)
    assert hardware.wait(0) == ()


# --- in which order it is heard -------------------------------------------------------


def test_a_reset_is_not_read_before_the_xid_that_it_cures(hardware: SimulatedHardware) -> None:
    hardware.xid("0", 79)
    hardware.reset("0")
    assert _reading(hardware, 0) == Reading(IDS[0])
    assert hardware.wait(FOREVER_S) == (XidEvent(IDS[0], 79),)
    assert hardware.wait(FOREVER_S) == ()
    assert _reading(hardware, 0) == Reading(IDS[0], was_reset=True)


def test_an_xid_is_not_heard_before_an_earlier_reset(hardware: SimulatedHardware) -> None:
    hardware.reset("0")
    hardware.xid("0", 79)
    assert hardware.wait(FOREVER_S) == ()
    assert _reading(hardware, 0) == Reading(IDS[0], was_reset=True)
    assert hardware.wait(FOREVER_S) == (XidEvent(IDS[0], 79),)


@given(
    st.lists(st.sampled_from(["xid", "reset", "wait", "read"]), max_size=30),
)
def test_whenever_the_daemon_listens_it_ends_up_with_the_right_health(steps: list[str]) -> None:
    hardware = SimulatedHardware(profile.load("l4x1"))
    hardware.scan()
    heard = expected = health.new(0.0)
    policy = health.Policy(hold_down_s=0.0)
    gpu = hardware.find("0").id

    def listen(how: str) -> None:
        nonlocal heard
        if how == "wait":
            for event in hardware.wait(0):
                heard = health.on_xid(heard, event.xid, 0.0, policy)
        else:
            heard = health.on_reading(heard, hardware.read()[0], 0.0, policy)

    for step in steps:
        if step == "xid":
            hardware.xid("0", 79)
            expected = health.on_xid(expected, 79, 0.0, policy)
        elif step == "reset":
            hardware.reset("0")
            reset = Reading(gpu, was_reset=True)
            expected = health.on_reading(expected, reset, 0.0, policy)
        else:
            listen(step)
    for step in ("wait", "read") * len(steps):
        listen(step)
    assert heard.cases == expected.cases


# --- the whole driver fails -------------------------------------------------------------


def test_a_failing_driver_fails_every_call_until_it_is_cleared(
    hardware: SimulatedHardware,
) -> None:
    hardware.fail(DriverMissing("the module was unloaded"))
    for call in (hardware.scan, hardware.read, lambda: hardware.wait(FOREVER_S)):
        with pytest.raises(DriverMissing, match="the module was unloaded"):
            call()
    hardware.close()
    assert hardware.errors() == ()
    with pytest.raises(DriverMissing):
        hardware.scan()
    hardware.fail(None)
    assert len(hardware.scan().gpus) == 8
    assert len(hardware.read()) == 8


def test_an_outage_that_lasts_keeps_no_old_traces(hardware: SimulatedHardware) -> None:
    error = HardwareError("stays away")
    hardware.fail(error)
    for _ in range(50):
        with pytest.raises(HardwareError):
            hardware.read()
    assert len(traceback.extract_tb(error.__traceback__)) < 10


# --- from another thread ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("inject", "heard"),
    [
        (lambda hardware: hardware.xid("1", 79), (XidEvent(IDS[1], 79),)),
        (lambda hardware: hardware.lose("1"), ()),
        (lambda hardware: hardware.restore("1"), ()),
        (lambda hardware: hardware.reset("1"), ()),
        (lambda hardware: hardware.fail(None), ()),
        (lambda hardware: hardware.fail(HardwareError("away")), "away"),
    ],
    ids=["xid", "lose", "restore", "reset", "cleared", "fail"],
)
def test_an_injection_ends_a_wait_that_has_begun(
    hardware: SimulatedHardware,
    inject: Callable[[SimulatedHardware], None],
    heard: tuple[XidEvent, ...] | str,
) -> None:
    listener = Listener(hardware)
    assert listener.hears_nothing()
    inject(hardware)
    assert listener.heard() == heard


def test_no_xid_is_lost_or_doubled_between_threads(hardware: SimulatedHardware) -> None:
    each = 200

    def inject(gpu: int) -> None:
        for code in range(each):
            hardware.xid(str(gpu), code)
            hardware.lose(str(gpu))
            hardware.restore(str(gpu))

    injectors = [threading.Thread(target=inject, args=(gpu,)) for gpu in range(4)]
    for injector in injectors:
        injector.start()
    heard: dict[GpuId, list[int]] = {gpu: [] for gpu in IDS[:4]}
    while sum(map(len, heard.values())) < 4 * each:
        for event in hardware.wait(FOREVER_S):
            assert event.gpu is not None
            heard[event.gpu].append(event.xid)
        hardware.read()
    for injector in injectors:
        injector.join()
    assert all(codes == list(range(each)) for codes in heard.values())
    assert hardware.read() == tuple(Reading(gpu) for gpu in IDS)


# --- the host -----------------------------------------------------------------------------


def test_the_host_tells_the_numa_nodes_of_the_profile_and_no_device_nodes() -> None:
    facts = SimulatedHost(H100X8).facts(SimulatedHardware(H100X8).scan())
    assert [facts.numa[gpu] for gpu in IDS] == [
        NumaPlace(node, NumaSource.PROFILE) for node in (0, 0, 0, 0, 1, 1, 1, 1)
    ]
    assert (facts.nodes, facts.control_nodes, facts.minors) == ({}, (), {})


def test_the_host_names_device_nodes_when_asked_for_them() -> None:
    first = replace(H100X8.gpus[0], minor=12)
    changed = replace(H100X8, gpus=(first, *H100X8.gpus[1:]))
    facts = SimulatedHost(changed, nodes=True).facts(SimulatedHardware(changed).scan())
    assert facts.nodes[IDS[0]] == ("/dev/nvidia12",)
    assert facts.nodes[IDS[7]] == ("/dev/nvidia7",)
    assert facts.control_nodes == ("/dev/nvidiactl", "/dev/nvidia-uvm")


def test_a_node_without_cpus_and_one_that_is_not_told_give_no_hint() -> None:
    changed = replace(H100X8, numa=(None, *H100X8.numa[1:]), cpus={0: "0-55", 1: ""})
    facts = SimulatedHost(changed).facts(SimulatedHardware(changed).scan())
    assert facts.numa[IDS[0]] == NumaPlace(None, NumaSource.NOT_TOLD)
    assert facts.numa[IDS[1]] == NumaPlace(0, NumaSource.PROFILE)
    assert facts.numa[IDS[7]] == NumaPlace(None, NumaSource.NO_CPUS)


def test_the_host_says_nothing_about_gpus_that_it_does_not_have() -> None:
    facts = SimulatedHost(profile.load("l4x1")).facts(SimulatedHardware(H100X8).scan())
    assert facts.numa == {}

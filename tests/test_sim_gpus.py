"""deviceplugin.sim.gpus"""

from __future__ import annotations

import threading

import pytest

from deviceplugin.errors import HardwareError, ProfileError
from deviceplugin.model import NumaPlace, NumaSource, XidEvent
from deviceplugin.sim import profile
from deviceplugin.sim.gpus import LOST, SimulatedHardware, SimulatedHost

PROFILE = profile.load("dgx1v")
FIRST = PROFILE.gpus[0].id


@pytest.fixture
def hardware() -> SimulatedHardware:
    return SimulatedHardware(PROFILE)


def test_the_scan_is_the_profile(hardware: SimulatedHardware) -> None:
    scan = hardware.scan()
    assert scan.gpus == PROFILE.gpus
    assert scan.links == PROFILE.links
    assert scan.driver.driver_version == "550.54.15"


def test_a_lost_gpu_says_so_until_it_is_back(hardware: SimulatedHardware) -> None:
    hardware.lose("0")
    assert [gpu.fault for gpu in hardware.scan().gpus[:2]] == [LOST, None]
    assert [reading.fault for reading in hardware.read()[:2]] == [LOST, None]
    hardware.restore(FIRST)
    assert hardware.read()[0].fault is None
    assert not hardware.read()[0].was_reset


def test_a_reset_is_read_once(hardware: SimulatedHardware) -> None:
    hardware.lose("0")
    hardware.reset("0")
    assert [reading.was_reset for reading in hardware.read()[:2]] == [True, False]
    assert not hardware.read()[0].was_reset
    assert hardware.read()[0].fault is None


def test_an_xid_after_a_reset_is_not_undone_by_it(hardware: SimulatedHardware) -> None:
    hardware.reset("0")
    hardware.xid("0", 79)
    assert hardware.wait(5) == (XidEvent(FIRST, 79),)
    assert not hardware.read()[0].was_reset


def test_xids_are_heard_in_order_and_once(hardware: SimulatedHardware) -> None:
    hardware.xid("0", 79)
    hardware.xid(PROFILE.gpus[1].id, 48, gpu_instance=1, compute_instance=0)
    assert hardware.wait(5) == (XidEvent(FIRST, 79), XidEvent(PROFILE.gpus[1].id, 48, 1, 0))
    assert hardware.wait(0.001) == ()


@pytest.mark.parametrize("verb", ["lose", "restore", "reset"])
def test_a_change_without_an_event_ends_the_wait_early(
    hardware: SimulatedHardware, verb: str
) -> None:
    waiting = threading.Thread(target=hardware.wait, args=(60,))
    waiting.start()
    getattr(hardware, verb)("0")
    waiting.join(5)
    assert not waiting.is_alive()


def test_a_driver_that_fails_does_so_in_every_call_until_it_is_mended(
    hardware: SimulatedHardware,
) -> None:
    hardware.fail(HardwareError("unloaded"))
    for call in (hardware.scan, hardware.read, lambda: hardware.wait(60)):
        with pytest.raises(HardwareError, match="unloaded"):
            call()
    hardware.close()
    hardware.fail(None)
    assert len(hardware.scan().gpus) == 8


@pytest.mark.parametrize("name", ["8", "-1", "GPU-x", ""])
def test_a_gpu_that_is_not_there_is_named(hardware: SimulatedHardware, name: str) -> None:
    with pytest.raises(ProfileError, match=f"there is no GPU '{name}': give an index from 0 to 7"):
        hardware.xid(name, 79)


def test_numa_nodes_come_from_the_profile() -> None:
    text = """
model: x
memoryMiB: 1
numaNodes: {0: 0-3, 1: ""}
gpus:
  - {pci: "0000:01:00.0", numa: 0}
  - {pci: "0000:02:00.0", numa: 1}
  - {pci: "0000:03:00.0", numa: null}
pcie: [X - -, "- X -", "- - X"]
"""
    mine = profile.parse("p", text)
    facts = SimulatedHost(mine).facts(SimulatedHardware(mine).scan())
    assert list(facts.numa.values()) == [
        NumaPlace(0, NumaSource.PROFILE),
        NumaPlace(None, NumaSource.NO_CPUS),
        NumaPlace(None, NumaSource.NOT_TOLD),
    ]


def test_device_nodes_are_named_only_when_asked_for(hardware: SimulatedHardware) -> None:
    scan = hardware.scan()
    assert SimulatedHost(PROFILE).facts(scan).nodes == {}
    facts = SimulatedHost(PROFILE, nodes=True).facts(scan)
    assert facts.nodes[FIRST] == ("/dev/nvidia0",)
    assert facts.control_nodes == ("/dev/nvidiactl", "/dev/nvidia-uvm")

"""deviceplugin.roll and deviceplugin.checkpoint"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deviceplugin import inventory
from deviceplugin.checkpoint import Checkpoint
from deviceplugin.holders import Holders
from deviceplugin.memory import Memory
from deviceplugin.model import DriverInfo, HostFacts, Inventory, Maintenance, Scan
from deviceplugin.roll import Roll
from deviceplugin.stats import Stats
from tests.builders import SetClock, driver_gpu, gpu_id

R = "vendor.example/gpu"
STEM = "vendor.example_gpu"


class Place:
    """A directory with a state file and a checkpoint."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.checkpoint = directory / "kubelet_internal_checkpoint"

    def roll(self) -> Roll:
        clock = SetClock()
        holders = Holders(Checkpoint(self.directory, R), self.directory / "pods.sock", R)
        return Roll(Memory(self.directory, STEM, Stats(), clock), holders, clock)

    def kubelet_says(self, held: dict[str, list[str]], registered: tuple[str, ...] = ()) -> None:
        """Who holds what: pod uid to device ids."""
        entries: list[dict[str, Any]] = [
            {"PodUID": pod, "ContainerName": "c", "ResourceName": R, "DeviceIDs": {"0": ids}}
            for pod, ids in held.items()
        ]
        other = {"PodUID": "x", "ResourceName": "other/x", "DeviceIDs": {"-1": ["other-device"]}}
        data = {"PodDeviceEntries": [*entries, other], "RegisteredDevices": {R: list(registered)}}
        self.checkpoint.write_text(json.dumps({"Data": data, "Checksum": 1}))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def merged(known: Inventory | None, *numbers: int) -> Inventory:
    """After a scan that found these GPUs."""
    scan = Scan(DriverInfo(), tuple(driver_gpu(number) for number in numbers))
    return inventory.merge(known, scan, HostFacts(), 0.0)


def presence(found: Inventory | None) -> dict[str, bool]:
    return {gpu.id: gpu.present for gpu in found.gpus} if found is not None else {}


def test_nothing_is_known_on_a_new_node(place: Place) -> None:
    assert place.roll().recall() is None


def test_a_gpu_that_is_missing_after_a_restart_is_on_the_roll(place: Place) -> None:
    place.roll().save(merged(None, 0, 1))
    roll = place.roll()
    found = roll.settle(merged(roll.recall(), 1))
    assert presence(found) == {gpu_id(0): False, gpu_id(1): True}
    assert found.gpus[0].pci_bus_id == "0000:10:00.0", "and known by what it was"


def test_a_device_that_a_pod_holds_is_listed_until_it_is_released(place: Place) -> None:
    place.kubelet_says({"pod-1": ["GPU-held"]})
    roll = place.roll()
    found = roll.settle(merged(roll.recall(), 0))
    assert presence(found) == {gpu_id(0): True, "GPU-held": False}
    roll.save(found)
    place.kubelet_says({})
    found = roll.settle(merged(found, 0))
    assert presence(found) == {gpu_id(0): True}
    assert presence(place.roll().recall()) == {gpu_id(0): False}, "it was not remembered"


def test_while_the_checkpoint_cannot_be_read_nothing_is_dropped(place: Place) -> None:
    place.kubelet_says({"pod-1": ["GPU-held"]})
    roll = place.roll()
    found = roll.settle(merged(roll.recall(), 0))
    place.checkpoint.write_text("{ half")
    assert "GPU-held" in presence(roll.settle(merged(found, 0)))


def test_where_our_memory_is_lost_the_kubelets_serves(place: Place) -> None:
    place.roll().save(merged(None, 0, 1))
    (state,) = place.directory.glob("inventory.*")
    state.write_text("damaged")
    place.kubelet_says({}, registered=(gpu_id(0), gpu_id(1)))
    roll = place.roll()
    found = roll.settle(merged(roll.recall(), 1))
    assert presence(found) == {gpu_id(0): False, gpu_id(1): True}


def test_what_the_kubelet_last_knew_does_not_bring_back_what_was_forgotten(place: Place) -> None:
    place.roll().save(merged(None, 1))
    place.kubelet_says({}, registered=(gpu_id(0), gpu_id(1)))
    assert presence(place.roll().recall()) == {gpu_id(1): False}


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "7", '{"Data": 7}', '{"Data": {"PodDeviceEntries": 7}}', "\x00", "[" * 9999],
)
def test_a_checkpoint_that_makes_no_sense_is_not_nobody(place: Place, content: str) -> None:
    place.checkpoint.write_text(content)
    assert Checkpoint(place.directory, R).holders() is None


def test_a_checkpoint_that_is_not_there_is_nobody(place: Place) -> None:
    assert Checkpoint(place.directory, R).holders() == {}
    assert Checkpoint(place.directory, R).registered() == set()


def test_only_an_absent_device_that_no_pod_holds_can_be_forgotten(place: Place) -> None:
    place.roll().save(merged(None, 0, 1, 2))
    place.kubelet_says({"pod-1": [gpu_id(0)]})
    roll = place.roll()
    found = roll.settle(merged(roll.recall(), 2))
    assert roll.why_not_forget(found, gpu_id(1)) is None
    assert roll.why_not_forget(found, gpu_id(0)) == (
        f"{gpu_id(0)} is held by the pod with uid pod-1: delete that pod first"
    )
    assert roll.why_not_forget(found, gpu_id(2)) == (
        f"{gpu_id(2)} is there: only a device that is absent can be forgotten"
    )
    assert "is not listed here" in (roll.why_not_forget(found, "GPU-x") or "")
    place.checkpoint.write_text("{ half")
    assert "does not say what pods hold" in (roll.why_not_forget(found, gpu_id(1)) or "")


def test_one_in_maintenance_cannot_be_forgotten_before_it_was_looked_at(place: Place) -> None:
    place.roll().save(merged(None, 0))
    roll = place.roll()
    recalled = roll.recall()
    assert recalled is not None
    withdrawn = inventory.maintain(recalled, [gpu_id(0)], Maintenance("", 0.0))
    assert "end that first" in (roll.why_not_forget(withdrawn, gpu_id(0)) or "")


def test_of_what_the_kubelet_last_knew_only_whole_gpus_stay_without_a_pod(place: Place) -> None:
    (place.directory / f"inventory.{STEM}.json").write_text("damaged")
    ids = (gpu_id(0), "MIG-1", f"{gpu_id(1)}::0", "MIG-held")
    place.kubelet_says({"pod-1": ["MIG-held"]}, registered=ids)
    assert presence(place.roll().recall()) == {gpu_id(0): False, "MIG-held": False}

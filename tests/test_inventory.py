"""deviceplugin.inventory"""

from __future__ import annotations

from dataclasses import replace

from deviceplugin import inventory
from deviceplugin.model import (
    DriverGpu,
    DriverInfo,
    Fault,
    Health,
    HostFacts,
    Link,
    NumaPlace,
    NumaSource,
    PcieLevel,
    Scan,
)
from tests.builders import driver_gpu, gpu_id, healthy

LOST = Fault("lost", "gone")


def scan(*gpus: DriverGpu, links: tuple[Link, ...] = ()) -> Scan:
    return Scan(DriverInfo("550.54.15"), gpus, links=links)


def test_gpus_come_in_pci_order_whatever_the_driver_says() -> None:
    far = replace(driver_gpu(0), pci_bus_id="00010000:01:00.0")
    near = replace(driver_gpu(1), pci_bus_id="0000:ff:00.0")
    nowhere = replace(driver_gpu(2), pci_bus_id=None)
    merged = inventory.merge(None, scan(nowhere, far, near), HostFacts(), 0.0)
    assert [gpu.index for gpu in merged.gpus] == [1, 0, 2]


def test_a_gpu_that_is_gone_stays_and_is_marked() -> None:
    before = inventory.merge(None, scan(driver_gpu(0), driver_gpu(1)), HostFacts(), 0.0)
    after = inventory.merge(before, scan(driver_gpu(1)), HostFacts(), 0.0)
    assert [(gpu.index, gpu.present) for gpu in after.gpus] == [(0, False), (1, True)]
    assert inventory.diff(before, after).gone == (after.gpus[0],)
    back = inventory.merge(after, scan(driver_gpu(0), driver_gpu(1)), HostFacts(), 0.0)
    assert inventory.diff(after, back).returned == (back.gpus[0],)


def test_everything_is_new_at_first() -> None:
    after = inventory.merge(None, scan(driver_gpu(0)), HostFacts(), 0.0)
    assert inventory.diff(None, after) == inventory.Difference(added=after.gpus)


def test_a_lost_gpu_keeps_the_facts_of_better_days() -> None:
    numa = NumaPlace(1, NumaSource.DEVICE)
    facts = HostFacts({gpu_id(0): numa}, nodes={gpu_id(0): ("/dev/nvidia0",)})
    before = inventory.merge(None, scan(driver_gpu(0)), facts, 0.0)
    after = inventory.merge(before, scan(DriverGpu(gpu_id(0), 0, fault=LOST)), HostFacts(), 0.0)
    (gpu,) = after.gpus
    assert gpu.fault == LOST
    assert (gpu.model, gpu.pci_bus_id, gpu.numa) == ("NVIDIA L4", "0000:10:00.0", numa)
    assert gpu.nodes == ("/dev/nvidia0",)


def test_a_fact_that_is_not_told_this_time_is_kept() -> None:
    numa = NumaPlace(1, NumaSource.DEVICE)
    facts = HostFacts({gpu_id(0): numa}, nodes={gpu_id(0): ("/dev/nvidia0",)})
    before = inventory.merge(None, scan(driver_gpu(0)), facts, 0.0)
    vague = replace(driver_gpu(0), minor=None, pci_bus_id=None, memory_bytes=None)
    (gpu,) = inventory.merge(before, scan(vague), HostFacts(), 0.0).gpus
    assert (gpu.minor, gpu.pci_bus_id, gpu.memory_bytes) == (0, "0000:10:00.0", 24 << 30)
    assert (gpu.numa, gpu.nodes) == (numa, ("/dev/nvidia0",))


def test_the_minor_number_may_come_from_the_host() -> None:
    facts = HostFacts(minors={gpu_id(0): 3})
    merged = inventory.merge(None, scan(replace(driver_gpu(0), minor=None)), facts, 0.0)
    assert merged.gpus[0].minor == 3


def test_a_uuid_that_the_driver_lists_twice_is_one_gpu() -> None:
    merged = inventory.merge(
        None, scan(driver_gpu(0), replace(driver_gpu(0), index=1)), HostFacts(), 0.0
    )
    assert len(merged.gpus) == 1


def test_links_of_a_gpu_that_is_gone_are_remembered() -> None:
    link = Link(gpu_id(0), gpu_id(1), PcieLevel.PIX, 0)
    before = inventory.merge(
        None, scan(driver_gpu(0), driver_gpu(1), links=(link,)), HostFacts(), 0.0
    )
    after = inventory.merge(before, scan(driver_gpu(1)), HostFacts(), 0.0)
    assert after.links == (link,)


def test_a_device_has_the_hint_of_its_gpu_or_none_at_all() -> None:
    facts = HostFacts({gpu_id(0): NumaPlace(0, NumaSource.DEVICE)})
    merged = inventory.merge(None, scan(driver_gpu(0), driver_gpu(1)), facts, 0.0)
    verdicts = {gpu.id: healthy(1.0) for gpu in merged.gpus}
    devices = inventory.devices(merged, verdicts)
    assert [device.numa_nodes for device in devices] == [(0,), ()]
    assert [device.gpu for device in devices] == [gpu_id(0), gpu_id(1)]
    assert [str(device.id) for device in devices] == [gpu_id(0), gpu_id(1)]
    assert {device.health for device in devices} == {Health.HEALTHY}
    assert inventory.missing_hints(merged) == [merged.gpus[1]]


def test_no_hint_is_missing_where_no_gpu_has_one() -> None:
    merged = inventory.merge(None, scan(driver_gpu(0), driver_gpu(1)), HostFacts(), 0.0)
    assert inventory.missing_hints(merged) == []

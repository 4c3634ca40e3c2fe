"""The node's GPUs: driver and host facts merged, compared, and turned into devices. Pure.

A GPU that was once in the inventory stays in it: the kubelet may hold it for
a pod, and a kubelet whose allocated device vanishes from the list crashes.
One that the driver no longer lists is kept with the time at which it went. One
in maintenance is left as it was known: nobody asks the driver for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from deviceplugin.model import (
    Address,
    Device,
    DeviceId,
    DriverGpu,
    DriverInfo,
    Gpu,
    GpuId,
    HostFacts,
    Inventory,
    Maintenance,
    NumaPlace,
    NumaSource,
    Scan,
    Verdict,
)

ALL = "all"

_NOT_LOOKED = NumaPlace(None, NumaSource.NO_BUS_ID)


def merge(before: Inventory | None, scan: Scan, facts: HostFacts, now_s: float) -> Inventory:
    """The inventory after a scan.

    A fact that this scan could not tell but an earlier one did is kept: the
    model or bus id of a GPU that has since been lost is still right.

    Args:
        now_s: seconds since the machine started.
    """
    known = {gpu.id: gpu for gpu in before.gpus} if before is not None else {}
    gpus: dict[GpuId, Gpu] = {}
    for seen in scan.gpus:
        # A driver that lists one UUID twice would publish one device twice.
        gpus.setdefault(seen.id, _merge_gpu(known.get(seen.id), seen, facts))
    for gpu in known.values():
        gone = gpu.present and gpu.maintenance is None
        gpus.setdefault(gpu.id, replace(gpu, gone_since_s=now_s) if gone else gpu)
    links = {frozenset((link.a, link.b)): link for link in (before.links if before else ())}
    links.update({frozenset((link.a, link.b)): link for link in scan.links})
    return Inventory(
        driver=scan.driver,
        gpus=tuple(sorted(gpus.values(), key=_pci_order)),
        links=tuple(links.values()),
        unreadable=scan.unreadable,
        control_nodes=facts.control_nodes,
    )


def recall(gpus: Iterable[Gpu], held: Iterable[str], now_s: float) -> Inventory | None:
    """What an earlier process knew, before the first scan: nothing of it is present.

    Args:
        held: ids that the kubelet says a pod holds, or did; a device of which
            nothing else is known has to be listed all the same.
    """
    known = {
        gpu.id: replace(
            gpu, fault=None, gone_since_s=now_s if gpu.gone_since_s is None else gpu.gone_since_s
        )
        for gpu in gpus
    }
    for name in held:
        known.setdefault(GpuId(name), _stranger(GpuId(name), now_s))
    if not known:
        return None
    return Inventory(DriverInfo(), tuple(sorted(known.values(), key=_pci_order)))


def forget(inventory: Inventory, gpu: GpuId) -> Inventory:
    """The inventory without one GPU."""
    return replace(
        inventory,
        gpus=tuple(known for known in inventory.gpus if known.id != gpu),
        links=tuple(link for link in inventory.links if gpu not in (link.a, link.b)),
    )


def is_whole(name: str) -> bool:
    """Whether a device id is that of a whole GPU, not of a MIG slice or a shared replica."""
    return not name.startswith("MIG-") and "::" not in name


def find(inventory: Inventory, name: str) -> Gpu | None:
    """The GPU of this id, PCI bus id or index."""
    for gpu in inventory.gpus:
        if name in (gpu.id, gpu.pci_bus_id):
            return gpu
    listed = [gpu for gpu in inventory.gpus if gpu.present or gpu.maintenance is not None]
    return next((gpu for gpu in listed if name == str(gpu.index)), None)


def choose(
    known: Inventory, names: Sequence[str], *, end: bool
) -> tuple[tuple[GpuId, ...], tuple[str, ...]]:
    """The GPUs that are meant, or why not, in sentences.

    Args:
        names: ids, PCI bus ids or indices; or "all" alone.
        end: only those in maintenance are meant.
    """
    if list(names) == [ALL]:
        found = [gpu for gpu in known.gpus if not end or gpu.maintenance is not None]
        return tuple(gpu.id for gpu in found), () if found else ("no GPU is in maintenance",)
    chosen: dict[GpuId, None] = {}
    refused = []
    for name in names:
        gpu = find(known, name)
        if name == ALL:
            refused.append("'all' stands alone")
        elif gpu is None:
            refused.append(
                f"{name} is no GPU's id, PCI bus id or index; 'deviceplugin status' shows them"
            )
        elif end and gpu.maintenance is None:
            refused.append(f"{name} is not in maintenance")
        else:
            chosen[gpu.id] = None
    return tuple(chosen), tuple(refused)


def maintain(inventory: Inventory, gpus: Iterable[GpuId], how: Maintenance | None) -> Inventory:
    """The inventory with these GPUs put into maintenance, or taken out of it with None.

    One that is in it already keeps the time, and its reason if the new one is empty.
    """
    chosen = frozenset(gpus)

    def change(gpu: Gpu) -> Gpu:
        if gpu.id not in chosen:
            return gpu
        if how is None or gpu.maintenance is None:
            return replace(gpu, maintenance=how)
        was = gpu.maintenance
        return replace(gpu, maintenance=replace(was, reason=how.reason or was.reason))

    return replace(inventory, gpus=tuple(change(gpu) for gpu in inventory.gpus))


def addresses(inventory: Inventory | None) -> tuple[Address, ...] | None:
    """The GPUs that may be touched while others are in maintenance; None: all may."""
    gpus = inventory.gpus if inventory is not None else ()
    if all(gpu.maintenance is None for gpu in gpus):
        return None
    return tuple(
        Address(gpu.index, gpu.pci_bus_id)
        for gpu in gpus
        if gpu.maintenance is None and gpu.pci_bus_id is not None
    )


def _stranger(name: GpuId, now_s: float) -> Gpu:
    """A GPU of which only the id is known."""
    return Gpu(
        id=name,
        index=-1,
        minor=None,
        model=None,
        pci_bus_id=None,
        memory_bytes=None,
        mig_enabled=None,
        events=False,
        fault=None,
        numa=_NOT_LOOKED,
        nodes=(),
        gone_since_s=now_s,
    )


def _merge_gpu(before: Gpu | None, seen: DriverGpu, facts: HostFacts) -> Gpu:
    minor = seen.minor if seen.minor is not None else facts.minors.get(seen.id)
    numa = facts.numa.get(seen.id, _NOT_LOOKED)
    gpu = Gpu(
        id=seen.id,
        index=seen.index,
        minor=minor,
        model=seen.model,
        pci_bus_id=seen.pci_bus_id,
        memory_bytes=seen.memory_bytes,
        mig_enabled=seen.mig_enabled,
        events=seen.events,
        fault=seen.fault,
        numa=numa,
        nodes=facts.nodes.get(seen.id, ()),
    )
    if before is None:
        return gpu
    return replace(
        gpu,
        minor=gpu.minor if gpu.minor is not None else before.minor,
        model=gpu.model if gpu.model is not None else before.model,
        pci_bus_id=gpu.pci_bus_id if gpu.pci_bus_id is not None else before.pci_bus_id,
        memory_bytes=gpu.memory_bytes if gpu.memory_bytes is not None else before.memory_bytes,
        mig_enabled=gpu.mig_enabled if gpu.mig_enabled is not None else before.mig_enabled,
        numa=gpu.numa if gpu.numa.node is not None else before.numa,
        nodes=gpu.nodes or before.nodes,
        maintenance=before.maintenance,
    )


def _pci_order(gpu: Gpu) -> tuple[bool, tuple[int, ...], str]:
    """PCI order; GPUs without a bus id last. Domains can have more than four digits."""
    if gpu.pci_bus_id is None:
        return True, (), gpu.id
    parts = gpu.pci_bus_id.replace(".", ":").split(":")
    try:
        return False, tuple(int(part, 16) for part in parts), gpu.id
    except ValueError:
        return True, (), gpu.id


@dataclass(frozen=True, slots=True)
class Difference:
    """What a scan changed, for the log.

    Attributes:
        added: GPUs seen for the first time.
        gone: present before, not any more.
        returned: not present before, and now again.
    """

    added: tuple[Gpu, ...] = ()
    gone: tuple[Gpu, ...] = ()
    returned: tuple[Gpu, ...] = ()


def diff(before: Inventory | None, after: Inventory) -> Difference:
    """Compare two inventories, the later one made by ``merge`` from the earlier."""
    known = {gpu.id: gpu for gpu in before.gpus} if before is not None else {}
    added, gone, returned = [], [], []
    for gpu in after.gpus:
        was = known.get(gpu.id)
        if was is None:
            added.append(gpu)
        elif was.present and not gpu.present:
            gone.append(gpu)
        elif gpu.present and not was.present:
            returned.append(gpu)
    return Difference(tuple(added), tuple(gone), tuple(returned))


def devices(inventory: Inventory, verdicts: Mapping[GpuId, Verdict]) -> tuple[Device, ...]:
    """The list to publish: one device for each GPU, in PCI order."""
    return tuple(
        Device(
            id=DeviceId(gpu.id),
            gpu=gpu.id,
            health=verdicts[gpu.id].health,
            numa_nodes=() if gpu.numa.node is None else (gpu.numa.node,),
        )
        for gpu in inventory.gpus
    )


def missing_hints(inventory: Inventory) -> Iterable[Gpu]:
    """GPUs without a NUMA hint on a node where others have one: the kubelet
    can't use them for aligned requests."""
    hinted = any(gpu.numa.node is not None for gpu in inventory.gpus)
    return [gpu for gpu in inventory.gpus if hinted and gpu.numa.node is None]

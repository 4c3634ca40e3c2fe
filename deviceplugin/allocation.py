"""Which devices a container should get, and what it gets with them. Pure.

Answers come from a snapshot alone and depend on nothing else: not on the
order of the input, not on the time, never on the driver. An error in
GetPreferredAllocation fails the pod, so whatever can be satisfied is answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deviceplugin.errors import DeviceUnhealthy, RequestError
from deviceplugin.model import AllocationPlan, Device, DeviceId, Health, Snapshot

VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
"""The variable by which NVIDIA's container runtime is told what to hand in."""


def prefer(
    snapshot: Snapshot,
    available: Iterable[str],
    must_include: Iterable[str],
    size: int,
) -> tuple[DeviceId, ...]:
    """Which ``size`` of the available devices to give to one container.

    Packed by NUMA node: the must-includes, then the smallest node that can
    hold the whole rest, the nodes of the must-includes before others; if no
    node can, the largest first. Unhealthy devices come last, devices without
    a NUMA node after those with one; ties go by node number and PCI order.

    Returns:
        Exactly ``size`` distinct ids, in PCI order.

    Raises:
        RequestError: the request contradicts itself or names too few devices
            that are published; the text says which.
    """
    order = {device.id: position for position, device in enumerate(snapshot.devices)}
    offered, required = set(available), set(must_include)
    if size < 0:
        raise RequestError(f"allocation size {size} is negative")
    if stray := sorted(required - offered):
        raise RequestError(f"must-include devices are not among the available: {_names(stray)}")
    if unknown := sorted(required - order.keys()):
        raise RequestError(f"must-include devices are not published here: {_names(unknown)}")
    if len(required) > size:
        raise RequestError(
            f"{len(required)} must-include devices do not fit into an allocation of {size}:"
            f" {_names(sorted(required))}"
        )
    usable = [device for device in snapshot.devices if device.id in offered]
    if len(usable) < size:
        unknown = sorted(offered - order.keys())
        known = f"; not published here: {_names(unknown)}" if unknown else ""
        raise RequestError(
            f"{size} devices are wanted and {len(usable)} of the available are known{known}"
        )
    chosen = [device for device in usable if device.id in required]
    rest = [device for device in usable if device.id not in required]
    well = [device for device in rest if device.health is Health.HEALTHY]
    sick = [device for device in rest if device.health is not Health.HEALTHY]
    for pool in (well, sick):
        chosen += _pack(pool, size - len(chosen), _nodes_of(chosen))
    return tuple(sorted((device.id for device in chosen), key=order.__getitem__))


_Node = tuple[int, ...]


def _nodes_of(devices: Iterable[Device]) -> set[_Node]:
    return {device.numa_nodes for device in devices if device.numa_nodes}


def _pack(pool: Sequence[Device], count: int, at_home: set[_Node]) -> list[Device]:
    """Up to ``count`` devices of the pool on as few nodes as a greedy choice finds."""
    groups: dict[_Node, list[Device]] = {}
    for device in pool:
        groups.setdefault(device.numa_nodes, []).append(device)
    taken: list[Device] = []
    while groups and len(taken) < count:
        need = count - len(taken)

        def cost(node: _Node, need: int = need) -> tuple[bool, bool, bool, int, _Node]:
            free = len(groups[node])
            fits = free >= need
            return not node, not fits, node not in at_home, free if fits else -free, node

        best = min(groups, key=cost)
        taken += groups.pop(best)[:need]
    return taken


def plan(snapshot: Snapshot, wanted: Iterable[str]) -> AllocationPlan:
    """What a container that was given these devices gets. Repeated ids count once.

    Raises:
        RequestError: no ids, or ids that are not published.
        DeviceUnhealthy: one of them is not healthy; the text says why.
    """
    ids = set(wanted)
    if not ids:
        raise RequestError("no devices are named: ask for at least one")
    if unknown := sorted(ids - {device.id for device in snapshot.devices}):
        raise RequestError(f"not published here: {_names(unknown)}")
    devices = tuple(device for device in snapshot.devices if device.id in ids)
    if sick := [device for device in devices if device.health is not Health.HEALTHY]:
        reasons = (f"{d.id} ({snapshot.verdicts[d.gpu].reason})" for d in sick)
        raise DeviceUnhealthy(f"unhealthy: {', '.join(reasons)}")
    inventory = snapshot.inventory
    gpus = {gpu.id: gpu for gpu in inventory.gpus} if inventory is not None else {}
    nodes = [node for device in devices for node in gpus[device.gpu].nodes]
    if inventory is not None and nodes:
        nodes += inventory.control_nodes
    return AllocationPlan(
        devices=devices,
        envs={VISIBLE_DEVICES: ",".join(dict.fromkeys(device.gpu for device in devices))},
        nodes=tuple(dict.fromkeys(nodes)),
    )


def _names(ids: Sequence[str], most: int = 8) -> str:
    """Ids for an error text, cut: a request may hold any number of any length."""
    shown = ", ".join(map(_name, ids[:most]))
    return shown if len(ids) <= most else f"{shown} and {len(ids) - most} more"


def _name(name: str) -> str:
    short = name if len(name) <= 80 else name[:79] + "…"
    return short if short and short.isprintable() else repr(short)

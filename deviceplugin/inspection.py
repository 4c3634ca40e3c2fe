"""What would be published, for a person or a program: ``deviceplugin inspect``.

Reads the hardware once, by the same way as the daemon, without a daemon.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deviceplugin import health, inventory
from deviceplugin.clock import Clock
from deviceplugin.hardware import Hardware, Host
from deviceplugin.model import GpuId, Link, Snapshot


def look(hardware: Hardware, host: Host, clock: Clock) -> Snapshot:
    """Scan and poll once, and close the driver.

    Raises:
        HardwareError: the driver cannot be used.
    """
    try:
        scan = hardware.scan()
        now_s = clock.boottime()
        merged = inventory.merge(None, scan, host.facts(scan), now_s)
        policy = health.Policy(hold_down_s=0.0)
        records = {gpu.id: health.on_scan(None, gpu, now_s, policy) for gpu in merged.gpus}
        for reading in hardware.read():
            if (record := records.get(reading.gpu)) is not None:
                records[reading.gpu] = health.on_reading(record, reading, now_s, policy)
    finally:
        hardware.close()
    records = dict(health.brake(records, policy, now_s))
    verdicts = {gpu: health.judge(record, policy) for gpu, record in records.items()}
    return Snapshot(
        generation=1,
        inventory=merged,
        verdicts=verdicts,
        devices=inventory.devices(merged, verdicts),
    )


def as_json(snapshot: Snapshot, resource: str) -> dict[str, Any]:
    """Everything that is known; null is "cannot be told"."""
    found = snapshot.inventory
    if found is None:
        raise ValueError("the snapshot is empty")
    return {
        "resource": resource,
        "driver": {
            "version": found.driver.driver_version,
            "library": found.driver.library_version,
            "cuda": found.driver.cuda_version,
        },
        "gpus": [
            {
                "id": gpu.id,
                "index": gpu.index,
                "minor": gpu.minor,
                "model": gpu.model,
                "pci_bus_id": gpu.pci_bus_id,
                "memory_bytes": gpu.memory_bytes,
                "mig_enabled": gpu.mig_enabled,
                "xid_events": gpu.events,
                "numa": {"node": gpu.numa.node, "source": gpu.numa.source.value},
                "device_nodes": list(gpu.nodes),
                "links": {
                    other: {"pcie": link.pcie.name, "nvlinks": link.nvlinks}
                    for other, link in _links_of(gpu.id, found.links)
                },
                "health": snapshot.verdicts[gpu.id].health.value,
                "reason": snapshot.verdicts[gpu.id].reason,
                "detail": snapshot.verdicts[gpu.id].detail,
            }
            for gpu in found.gpus
        ],
        "unreadable": [
            {"index": bad.index, "reason": bad.fault.code, "detail": bad.fault.detail}
            for bad in found.unreadable
        ],
        "control_nodes": list(found.control_nodes),
    }


def _links_of(gpu: GpuId, links: Sequence[Link]) -> list[tuple[GpuId, Link]]:
    return [
        (link.b if link.a == gpu else link.a, link) for link in links if gpu in (link.a, link.b)
    ]


HEADINGS = ("GPU", "ID", "PCI", "NUMA", "HEALTH")


def rows(snapshot: Snapshot) -> list[tuple[str, ...]]:
    """One row for each GPU, under ``HEADINGS``; unreadable ones at the end.

    Narrow enough for a terminal of 80 columns; ``models`` tells the rest.
    """
    found = snapshot.inventory
    if found is None:
        return []
    table: list[tuple[str, ...]] = []
    for gpu in found.gpus:
        verdict = snapshot.verdicts[gpu.id]
        node, source = gpu.numa.node, gpu.numa.source.value
        table.append(
            (
                str(gpu.index),
                gpu.id,
                gpu.pci_bus_id or "-",
                f"- ({source})" if node is None else f"{node} {source}",
                f"{verdict.health.value} {verdict.reason}".rstrip(),
            )
        )
    table += (
        (str(bad.index), "-", "-", "-", f"not published: {bad.fault.code}")
        for bad in found.unreadable
    )
    return table


def models(snapshot: Snapshot) -> list[str]:
    """How many of which GPU: "8 x NVIDIA H100 80GB HBM3, 80 GiB"."""
    found = snapshot.inventory
    kinds = [(gpu.model, gpu.memory_bytes) for gpu in found.gpus] if found is not None else []
    lines = []
    for model, memory_bytes in dict.fromkeys(kinds):
        count = kinds.count((model, memory_bytes))
        memory = "memory unknown" if memory_bytes is None else f"{memory_bytes / 2**30:.0f} GiB"
        lines.append(f"{count} x {model or 'unknown model'}, {memory}")
    return lines


def link_headings(snapshot: Snapshot) -> tuple[str, ...]:
    """The heading of the link matrix: GPU indexes."""
    found = snapshot.inventory
    return ("", *(f"GPU{gpu.index}" for gpu in found.gpus)) if found is not None else ()


def link_rows(snapshot: Snapshot) -> list[tuple[str, ...]]:
    """The link matrix, in the words of ``nvidia-smi topo -m``: NV18 are 18
    NVLinks, else the PCIe level; "?" cannot be told."""
    found = snapshot.inventory
    if found is None:
        return []
    table: list[tuple[str, ...]] = []
    for gpu in found.gpus:
        links = dict(_links_of(gpu.id, found.links))
        cells = ("X" if other.id == gpu.id else _cell(links.get(other.id)) for other in found.gpus)
        table.append((f"GPU{gpu.index}", *cells))
    return table


def _cell(link: Link | None) -> str:
    if link is None or (link.pcie.value == 0 and not link.nvlinks):
        return "?"
    return f"NV{link.nvlinks}" if link.nvlinks else link.pcie.name

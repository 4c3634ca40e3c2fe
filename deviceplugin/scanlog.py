"""What is said in the log about a scan."""

from __future__ import annotations

from deviceplugin import inventory, logs
from deviceplugin.model import Gpu, Inventory

_log = logs.get("monitor")


def log_scan(
    before: Inventory | None, after: Inventory, changes: inventory.Difference, *, first: bool
) -> None:
    """Say what a scan changed.

    Args:
        first: it is the first one of this process.
    """
    for gpu in changes.added:
        _log_found(gpu)
    for gpu in changes.returned:
        _log.info("GPU is back", gpu=gpu.id, pci=gpu.pci_bus_id)
    for gpu in changes.gone:
        _log.warning("GPU is gone, stays listed as unhealthy", gpu=gpu.id, pci=gpu.pci_bus_id)
    if before is None or before.unreadable != after.unreadable:
        log_unreadable(after)
    if first:
        for gpu in after.gpus:
            if not gpu.present and gpu.maintenance is None:
                _log.error(
                    "GPU is missing, listed as unhealthy until it is back or forgotten",
                    gpu=gpu.id,
                    pci=gpu.pci_bus_id,
                )
    if changes.added:
        for gpu in inventory.missing_hints(after):
            _log.warning(
                "GPU has no NUMA hint while others have one: it cannot serve aligned requests",
                gpu=gpu.id,
                why=gpu.numa.source.value,
            )


def _log_found(gpu: Gpu) -> None:
    _log.info(
        "GPU found",
        gpu=gpu.id,
        index=gpu.index,
        model=gpu.model,
        pci=gpu.pci_bus_id,
        numa=gpu.numa.node,
        numa_from=gpu.numa.source.value,
        xid_events=gpu.events,
    )


def log_unreadable(found: Inventory) -> None:
    """Say which GPUs cannot be read."""
    for bad in found.unreadable:
        _log.error("GPU unreadable", index=bad.index, code=bad.fault.code, why=bad.fault.detail)

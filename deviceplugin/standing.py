"""How the plugin stands, in words: what /readyz and ``deviceplugin status`` say. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from deviceplugin.config import Settings
from deviceplugin.errors import DriverMissing, NoGpu
from deviceplugin.lifecycle import Phase, State
from deviceplugin.model import Snapshot

IDLE = "idle"

_NOTHING_THERE = frozenset({DriverMissing.code, NoGpu.code})
"""Troubles of a node that has nothing to publish. A driver that hangs, crashes or
is in the middle of an upgrade is another matter: there are GPUs behind it."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Whether pods get what there is to get, and why not.

    Attributes:
        phase: one phrase.
        lines: why it is not ready, or what an idle plugin waits for.
    """

    ready: bool
    phase: str
    lines: tuple[str, ...]


def stand(
    settings: Settings,
    state: State,
    snapshot: Snapshot,
    *,
    no_kubelet: str,
    looking_for_s: float,
) -> Standing:
    """Where the plugin stands.

    Args:
        no_kubelet: why the kubelet cannot be found, where that is the phase.
        looking_for_s: how long the first look at the GPUs has taken so far.
    """
    phase = state.phase
    if phase is Phase.REGISTERED:
        return Standing(True, phase.value, ())
    if (
        phase is Phase.NOTHING_TO_PUBLISH
        and snapshot.trouble is not None
        and snapshot.trouble.code in _NOTHING_THERE
        and not settings.require_gpu
    ):
        return Standing(True, IDLE, (f"nothing to publish: {snapshot.trouble.detail}",))
    reasons = [f"{settings.resource_name}: {phase.value}"]
    if state.owner is not None:
        reasons.append(f"it is served by {state.owner}")
    if state.why:
        reasons.append(f"last try: {state.why}")
    if phase is Phase.NO_KUBELET:
        reasons.append(no_kubelet)
    if snapshot.trouble is not None:
        reasons.append(f"driver: {snapshot.trouble.detail}")
    elif snapshot.inventory is None:
        reasons.append(f"driver: the first look at the GPUs takes {looking_for_s:.0f} s so far")
    return Standing(False, phase.value, tuple(reasons))


def status(
    settings: Settings, standing: Standing, state: State, snapshot: Snapshot
) -> dict[str, Any]:
    """What ``deviceplugin status`` tells, as JSON can say it.

    A device's ``since_s`` is in seconds since the machine started.
    """
    found = snapshot.inventory
    gpus = {gpu.id: gpu for gpu in found.gpus} if found is not None else {}
    return {
        "node": settings.node_name,
        "resource": settings.resource_name,
        "simulate": settings.simulate,
        "phase": standing.phase,
        "ready": standing.ready,
        "notes": list(standing.lines),
        "kubelet_restarts": state.restarts,
        "driver": found.driver.driver_version if found is not None else None,
        "driver_trouble": snapshot.trouble.detail if snapshot.trouble is not None else None,
        "devices": [
            {
                "id": device.id,
                "index": gpus[device.gpu].index,
                "pci_bus_id": gpus[device.gpu].pci_bus_id,
                "health": device.health.value,
                "numa_nodes": list(device.numa_nodes),
                "reason": snapshot.verdicts[device.gpu].reason,
                "detail": snapshot.verdicts[device.gpu].detail,
                "since_s": snapshot.verdicts[device.gpu].since_s,
            }
            for device in snapshot.devices
        ],
    }


HEADINGS = ("GPU", "ID", "NUMA", "HEALTH")


def rows(status: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row under ``HEADINGS`` for each device of a status."""
    return [
        (
            str(device["index"]) if device["index"] >= 0 else "-",
            device["id"],
            ",".join(map(str, device["numa_nodes"])) or "-",
            f"{device['health']} {device['reason']}".rstrip(),
        )
        for device in status["devices"]
    ]


def details(status: Mapping[str, Any]) -> list[str]:
    """A line for each device that is not healthy: why, and since when (UTC)."""
    return [
        f"{device['id']}: {device['reason']} since"
        f" {datetime.fromtimestamp(device['since'], UTC):%Y-%m-%d %H:%M:%S} UTC"
        + (f": {device['detail']}" if device["detail"] else "")
        for device in status["devices"]
        if device["reason"]
    ]

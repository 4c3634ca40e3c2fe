"""How the plugin stands, in words: what /readyz and ``deviceplugin status`` say. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from deviceplugin.config import Settings
from deviceplugin.errors import DriverMissing, NoGpu
from deviceplugin.lifecycle import Phase, State
from deviceplugin.model import GpuId, Reading, Snapshot, Verdict

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
                **_health(snapshot.verdicts[device.gpu]),
                **_condition(snapshot.conditions.get(device.gpu)),
            }
            for device in snapshot.devices
        ],
    }


def _health(verdict: Verdict) -> dict[str, Any]:
    return {
        "reason": verdict.reason,
        "detail": verdict.detail,
        "stage": verdict.stage.value,
        "ends_with": verdict.ends_with,
        "held": verdict.held.value if verdict.held is not None else None,
        "since_s": verdict.since_s,
        "until_s": verdict.until_s,
    }


def _condition(reading: Reading | None) -> dict[str, Any]:
    """What was read; null is "not told"."""
    if reading is None:
        reading = Reading(GpuId(""))
    return {
        "recovery_action": reading.action.value if reading.action is not None else None,
        "row_remap_pending": reading.remap.pending if reading.remap is not None else None,
        "row_remap_failed": reading.remap.failed if reading.remap is not None else None,
        "fabric": reading.fabric.value if reading.fabric is not None else None,
        "uncorrected_errors": reading.uncorrected_errors,
        "throttled_by": None if reading.throttled_by is None else list(reading.throttled_by),
    }


HEADINGS = ("GPU", "ID", "NUMA", "HEALTH")


def rows(status: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row under ``HEADINGS`` for each device of a status."""
    return [
        (
            str(device["index"]) if device["index"] >= 0 else "-",
            device["id"],
            ",".join(map(str, device["numa_nodes"])) or "-",
            health_words(device),
        )
        for device in status["devices"]
    ]


def health_words(device: Mapping[str, Any]) -> str:
    """As in "Healthy", "Unhealthy xid-79", "Healthy in spite of xid-94"."""
    if not device["reason"]:
        return str(device["health"])
    between = " in spite of " if device["held"] else " "
    return f"{device['health']}{between}{device['reason']}"


def details(status: Mapping[str, Any]) -> list[str]:
    """A line for each device of which there is more to say: what is wrong with it, since
    when (UTC), what ends that; and that it wants a reset some time."""
    lines = []
    for device in status["devices"]:
        if device["reason"]:
            since = datetime.fromtimestamp(device["since"], UTC)
            stage = "recovering from " if device["stage"] == "recovering" else ""
            held = f" ({device['held']})" if device["held"] else ""
            until = ""
            if device["until"] is not None:
                at = datetime.fromtimestamp(device["until"], UTC)
                until = f", by itself at {at:%Y-%m-%d %H:%M:%S} UTC"
            text = f": {device['detail']}" if device["detail"] else ""
            lines.append(
                f"{device['id']}: {stage}{device['reason']}{held} since"
                f" {since:%Y-%m-%d %H:%M:%S} UTC{text}; ends with: {device['ends_with']}{until}"
            )
        if device["row_remap_pending"]:
            lines.append(f"{device['id']}: memory rows wait to be remapped: reset when convenient")
    return lines

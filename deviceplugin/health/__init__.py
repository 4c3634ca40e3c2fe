"""From events and readings to one verdict for each GPU. Pure.

A GPU is Healthy until something says otherwise, and turns Healthy again only
on evidence that fits what was wrong:

- an Xid whose catalog action is a reset, a reboot or a support case makes it
  Unhealthy; only a sign of a reset (the driver says so, or the GPU stopped
  answering and answers again) ends that;
- a GPU that does not answer is ``lost``, one that asks for a reset is
  ``reset-required``; answering again ends both;
- a GPU that is gone from the driver's list is ``absent``; being listed and
  answering again ends that;
- a GPU in MIG mode cannot be used whole: ``mig-mode``, until it leaves it;
- one in maintenance is the operator's: nothing that is heard of it counts, and
  afterwards it is looked at as if it were new;
- ``monitoring-lost`` is said of a GPU that nobody could ask for too long, if
  that is wanted; its first answer ends it, and any real fault replaces it.

The first reason stays while the GPU is unhealthy: what comes after a fault is
mostly its consequence.
"""

from __future__ import annotations

from dataclasses import replace

from deviceplugin.model import Fault, Gpu, Health, Reading, Verdict, XidEvent

FATAL_XIDS = frozenset(
    {46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 142, 143, 151, 155, 156, 158}
)
"""Codes that leave a GPU unusable until it is reset: those to which NVIDIA's Xid
catalog (Ampere and newer) gives a reset, a restart of machine or VM, or a support
case as the immediate action, and 48 (uncorrectable memory error) and 74 (NVLink)."""


MAINTENANCE = "maintenance"
MONITORING_LOST = "monitoring-lost"


def healthy(now_s: float) -> Verdict:
    """The verdict of a GPU about which nothing bad is known."""
    return Verdict(Health.HEALTHY, "", "", now_s)


def _unhealthy(before: Verdict, reason: str, detail: str, now_s: float, *, lost: bool) -> Verdict:
    if before.health is Health.UNHEALTHY and before.reason != MONITORING_LOST:
        return replace(before, was_lost=True) if lost else before
    return Verdict(Health.UNHEALTHY, reason, detail, now_s, was_lost=lost)


ABSENT = Fault("absent", "the driver does not list it any more")

_SILENT = frozenset({"lost", "reset-required", "absent"})
"""Faults of a GPU that does not answer; answering ends them, and is after an
Xid a sign that the GPU was reset."""


def on_xid(before: Verdict, event: XidEvent, now_s: float) -> Verdict:
    """After an Xid error of this GPU."""
    if event.xid not in FATAL_XIDS or before.reason == MAINTENANCE:
        return before
    return _unhealthy(before, f"xid-{event.xid}", f"Xid {event.xid}", now_s, lost=False)


def on_reading(before: Verdict, reading: Reading, now_s: float) -> Verdict:
    """After a poll of this GPU."""
    if before.reason == MAINTENANCE:
        return before
    if reading.fault is not None:
        return on_fault(before, reading.fault, now_s)
    if before.health is Health.HEALTHY or before.reason == "mig-mode":
        return before
    if reading.was_reset or before.was_lost or before.reason == MONITORING_LOST:
        return healthy(now_s)
    return before


def on_fault(before: Verdict, fault: Fault, now_s: float) -> Verdict:
    """After the driver named something that is wrong with this GPU."""
    return _unhealthy(before, fault.code, fault.detail, now_s, lost=fault.code in _SILENT)


def on_silence(before: Verdict, detail: str, now_s: float) -> Verdict:
    """After the driver could not be asked for too long."""
    if before.health is Health.UNHEALTHY:
        return before
    return Verdict(Health.UNHEALTHY, MONITORING_LOST, detail, now_s)


def on_scan(before: Verdict | None, gpu: Gpu, now_s: float) -> Verdict:
    """After a scan; ``before`` is None for a GPU that was never seen.

    A scan can only find something wrong: that a GPU is well is for a reading
    to say, which asks the GPU itself.
    """
    if gpu.maintenance is not None:
        said = gpu.maintenance
        return Verdict(Health.UNHEALTHY, MAINTENANCE, said.reason, said.since_s)
    verdict = before
    if verdict is None or verdict.reason == MAINTENANCE:
        verdict = healthy(now_s)
    if verdict.reason == "mig-mode" and gpu.mig_enabled is not True:
        verdict = healthy(now_s)
    if gpu.gone_since_s is not None:
        return on_fault(verdict, ABSENT, gpu.gone_since_s)
    if gpu.fault is not None:
        return on_fault(verdict, gpu.fault, now_s)
    if gpu.mig_enabled is True:
        return on_fault(verdict, Fault("mig-mode", "in MIG mode it has no use as a whole"), now_s)
    return verdict

"""What is known about the node's GPUs: the only writer of the store.

The monitor asks the driver and tells the keeper what it heard; the keeper
merges it (``inventory``), judges it (``health``), publishes a new snapshot when
anything changed, has it remembered (``roll``) and says in the log what changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deviceplugin import health, inventory, logs, wire
from deviceplugin.clock import Clock
from deviceplugin.errors import HardwareError, ListTooLong, NoGpu
from deviceplugin.hardware import Host
from deviceplugin.model import (
    Address,
    Fault,
    Gpu,
    GpuId,
    Health,
    Inventory,
    Maintenance,
    Reading,
    Scan,
    Snapshot,
    Verdict,
    XidEvent,
)
from deviceplugin.roll import Roll
from deviceplugin.stats import Stats
from deviceplugin.store import Store

REPEAT_LOG_S = 60.0
"""The same Xid on the same GPU is logged once in this time, and counted always."""
ALL = "all"

_log = logs.get("monitor")


@dataclass(frozen=True, slots=True)
class Maintained:
    """What became of an operator's wish.

    Attributes:
        refused: why nothing was done, a sentence each; () when it was done.
        gpus: those that were meant.
        held: of these, those that a pod holds, and which.
        saved: it outlives this process.
    """

    refused: tuple[str, ...] = ()
    gpus: tuple[GpuId, ...] = ()
    held: Mapping[str, str] = field(default_factory=dict)
    saved: bool = True


class Keeper:
    """Used by the monitor's thread alone."""

    def __init__(
        self,
        host: Host,
        store: Store,
        stats: Stats,
        clock: Clock,
        roll: Roll | None,
        on_publishable: Callable[[], None],
    ) -> None:
        """
        Args:
            roll: devices that are known from before; None: none are.
            on_publishable: called once, when there is a first device to serve.
        """
        self._host = host
        self._store = store
        self._stats = stats
        self._clock = clock
        self._roll = roll
        self._on_publishable = on_publishable
        self._recalled: Inventory | None = None
        self._logged: dict[tuple[GpuId | None, int], float] = {}
        self._too_long = 0

    # --- what is known ------------------------------------------------------------------

    def recall(self) -> None:
        """Remember what earlier processes knew; before anything else.

        Raises:
            ListTooLong: it is more than the kubelet takes.
        """
        self._recalled = self._roll.recall() if self._roll is not None else None
        if self._recalled is not None:
            self._fits(self._recalled)
        for gpu in self._recalled.gpus if self._recalled is not None else ():
            if gpu.maintenance is not None:
                _log.warning("maintenance goes on", gpu=gpu.id, reason=gpu.maintenance.reason)

    @property
    def known(self) -> Inventory | None:
        """What is published, or else what is remembered."""
        published = self._store.snapshot.inventory
        return published if published is not None else self._recalled

    def addresses(self) -> tuple[Address, ...] | None:
        """The GPUs that may be touched; None: all that there are."""
        return inventory.addresses(self.known)

    # --- what is heard ------------------------------------------------------------------

    def scanned(self, scan: Scan) -> None:
        """The driver was opened and asked for all that it has.

        Raises:
            HardwareError: it has nothing that can be used.
            ListTooLong: the first list is already more than the kubelet takes.
        """
        known, before, now_s = self.known, self._store.snapshot, self._clock.boottime()
        merged = inventory.merge(known, scan, self._host.facts(scan), now_s)
        if self._roll is not None:
            merged = self._roll.settle(merged)
        changes = inventory.diff(known, merged)
        if not merged.gpus:
            _log_unreadable(merged)
            if not merged.unreadable:
                raise NoGpu("the driver lists no GPU")
            raise HardwareError(
                f"none of the {len(merged.unreadable)} GPUs that the driver lists can be read"
            )
        if before.trouble is not None:
            _log.info("driver can be used again", gpus=len(merged.gpus))
        self._log_scan(known, merged, changes)
        verdicts = {
            gpu.id: health.on_scan(before.verdicts.get(gpu.id), gpu, now_s) for gpu in merged.gpus
        }
        if self._fits(merged):
            self._publish(merged, verdicts)
        else:
            self._store.publish(replace(before, trouble=None))

    def read(self, readings: Iterable[Reading]) -> bool:
        """The GPUs were asked how they are.

        Returns:
            Whether all that ought to answer did.
        """
        now_s, snapshot = self._clock.boottime(), self._store.snapshot
        found, verdicts = snapshot.inventory, dict(snapshot.verdicts)
        if found is None:
            return True
        answering = set()
        for reading in readings:
            if reading.gpu in verdicts:
                verdicts[reading.gpu] = health.on_reading(verdicts[reading.gpu], reading, now_s)
            if reading.fault is None:
                answering.add(reading.gpu)
        self._publish(found, verdicts)
        asked = {gpu.id for gpu in found.gpus if gpu.maintenance is None}
        return answering >= asked and not found.unreadable

    def events(self, events: Iterable[XidEvent]) -> None:
        """The driver reported Xid errors."""
        now_s, snapshot = self._clock.boottime(), self._store.snapshot
        verdicts = dict(snapshot.verdicts)
        for event in events:
            gpu = event.gpu if event.gpu in verdicts else None
            self._stats.add("xid_errors", gpu or "", str(event.xid))
            if gpu is not None and event.gpu_instance is None:
                verdicts[gpu] = health.on_xid(verdicts[gpu], event, now_s)
            self._log_xid(event, known=gpu is not None)
        if snapshot.inventory is not None:
            self._publish(snapshot.inventory, verdicts)

    def trouble(self, trouble: Fault, retry_in_s: float) -> None:
        """The driver as a whole cannot be used. What is published stays published;
        what is only remembered is from now on listed, as absent."""
        before = self._store.snapshot
        if before.trouble != trouble:
            _log.warning(
                "driver cannot be used",
                code=trouble.code,
                why=trouble.detail,
                retry_in_s=retry_in_s,
            )
        if before.inventory is None and self._recalled is not None:
            why = Fault(health.ABSENT.code, f"not seen yet: {trouble.detail}")
            now_s = self._clock.boottime()
            verdicts = {
                gpu.id: health.on_scan(None, gpu, now_s)
                if gpu.maintenance is not None
                else health.on_fault(health.healthy(now_s), why, gpu.gone_since_s or now_s)
                for gpu in self._recalled.gpus
            }
            self._publish(self._recalled, verdicts, trouble)
        else:
            self._store.publish(replace(before, trouble=trouble))

    def left_alone(self) -> None:
        """Every GPU is in maintenance: the driver is not even opened."""
        before, known = self._store.snapshot, self._recalled
        if before.inventory is None and known is not None:
            verdicts = {gpu.id: health.on_scan(None, gpu, 0.0) for gpu in known.gpus}
            self._publish(known, verdicts)

    def silence(self, detail: str) -> None:
        """Nobody could ask the driver for too long, and that is to count."""
        now_s, snapshot = self._clock.boottime(), self._store.snapshot
        if snapshot.inventory is not None:
            verdicts = {
                gpu: health.on_silence(verdict, detail, now_s)
                for gpu, verdict in snapshot.verdicts.items()
            }
            self._publish(snapshot.inventory, verdicts, snapshot.trouble)

    # --- what operators want --------------------------------------------------------------

    def forget(self, name: str) -> str | None:
        """Drop an absent device. Why not, in words; None when it is done."""
        before = self._store.snapshot
        why_not = "nothing is remembered here"
        if self._roll is not None:
            why_not = self._roll.why_not_forget(before.inventory, name) or ""
        if not why_not and before.inventory is not None:
            gpu = GpuId(name)
            verdicts = {known: v for known, v in before.verdicts.items() if known != gpu}
            self._publish(inventory.forget(before.inventory, gpu), verdicts, before.trouble)
            _log.info("device forgotten", gpu=gpu)
        return why_not or None

    def maintain(self, names: Sequence[str], reason: str | None) -> Maintained:
        """Withdraw GPUs, or give them back.

        Args:
            names: ids, PCI bus ids or indices; or "all" alone.
            reason: the operator's words; None ends the maintenance.
        """
        known, before = self.known, self._store.snapshot
        if known is None:
            return Maintained(("no GPU is known here, so there is none to withdraw",))
        chosen, refused = _choose(known, names, end=reason is None)
        if refused:
            return Maintained(refused)
        now_s = self._clock.boottime()
        how = Maintenance(reason, now_s) if reason is not None else None
        changed = inventory.maintain(known, chosen, how)
        verdicts = dict(before.verdicts)
        for gpu in changed.gpus:
            if how is not None and (gpu.id in chosen or gpu.id not in verdicts):
                verdicts[gpu.id] = health.on_scan(verdicts.get(gpu.id), gpu, now_s)
            elif gpu.id in chosen:
                verdicts[gpu.id] = replace(verdicts[gpu.id], detail="ended, not looked at yet")
        saved = self._publish(changed, verdicts, before.trouble)
        for name in chosen:
            if how is not None:
                _log.warning("maintenance started, GPU is left alone", gpu=name, reason=reason)
            else:
                _log.info("maintenance ended", gpu=name)
        held = (self._roll.holders.held(named=True) if self._roll is not None else None) or {}
        return Maintained((), chosen, {name: held[name] for name in chosen if name in held}, saved)

    # --- publishing -----------------------------------------------------------------------

    def _fits(self, merged: Inventory) -> bool:
        """Whether the kubelet would take the list, whatever becomes of its healths."""
        anything = dict.fromkeys((gpu.id for gpu in merged.gpus), health.healthy(0.0))
        size = wire.longest_list_bytes(inventory.devices(merged, anything))
        if size <= wire.MESSAGE_MAX_BYTES:
            self._too_long = 0
            return True
        text = (
            f"the device list can need {size} bytes and the kubelet takes at most"
            f" {wire.MESSAGE_MAX_BYTES}: publish fewer devices"
        )
        if self._store.snapshot.inventory is None:
            raise ListTooLong(text)
        self._stats.add("oversized_lists")
        if size != self._too_long:
            _log.error("device list too long, the one before stays", why=text)
        self._too_long = size
        return False

    def _publish(
        self, merged: Inventory, verdicts: Mapping[GpuId, Verdict], trouble: Fault | None = None
    ) -> bool:
        """Whether it is remembered, too."""
        before = self._store.snapshot
        self._store.publish(
            Snapshot(
                inventory=merged,
                verdicts=verdicts,
                devices=inventory.devices(merged, verdicts),
                trouble=trouble,
            )
        )
        if before.inventory is None:
            self._on_publishable()
        saved = self._roll.save(merged) if self._roll is not None else False
        for gpu, verdict in verdicts.items():
            self._log_verdict(gpu, before.verdicts.get(gpu), verdict)
        return saved

    # --- the log --------------------------------------------------------------------------

    def _log_verdict(self, gpu: GpuId, was: Verdict | None, verdict: Verdict) -> None:
        if (was.health if was is not None else Health.HEALTHY) is verdict.health:
            return
        self._stats.add("health_transitions", gpu, verdict.health.value)
        if verdict.health is Health.UNHEALTHY:
            _log.warning(
                "GPU unhealthy, not offered any more",
                gpu=gpu,
                reason=verdict.reason,
                why=verdict.detail,
            )
        else:
            reason = was.reason if was is not None else ""
            _log.info("GPU healthy again, offered again", gpu=gpu, was=reason)

    def _log_scan(
        self, before: Inventory | None, after: Inventory, changes: inventory.Difference
    ) -> None:
        for gpu in changes.added:
            _log_found(gpu)
        for gpu in changes.returned:
            _log.info("GPU is back", gpu=gpu.id, pci=gpu.pci_bus_id)
        for gpu in changes.gone:
            _log.warning("GPU is gone, stays listed as unhealthy", gpu=gpu.id, pci=gpu.pci_bus_id)
        if before is None or before.unreadable != after.unreadable:
            _log_unreadable(after)
        if before is self._recalled:
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

    def _log_xid(self, event: XidEvent, *, known: bool) -> None:
        key, now_s = (event.gpu, event.xid), self._clock.monotonic()
        if now_s - self._logged.get(key, -REPEAT_LOG_S) < REPEAT_LOG_S:
            return
        self._logged[key] = now_s
        fields: dict[str, object] = {"gpu": event.gpu, "xid": event.xid}
        if event.gpu_instance is not None:
            fields |= {"gi": event.gpu_instance, "ci": event.compute_instance}
        _log.warning("Xid error" if known else "Xid error of a GPU that is not ours", **fields)


def _choose(
    known: Inventory, names: Sequence[str], *, end: bool
) -> tuple[tuple[GpuId, ...], tuple[str, ...]]:
    """The GPUs that are meant, or why not."""
    if list(names) == [ALL]:
        found = [gpu for gpu in known.gpus if not end or gpu.maintenance is not None]
        return tuple(gpu.id for gpu in found), () if found else ("no GPU is in maintenance",)
    chosen: dict[GpuId, None] = {}
    refused = []
    for name in names:
        gpu = inventory.find(known, name)
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


def _log_unreadable(found: Inventory) -> None:
    for bad in found.unreadable:
        _log.error("GPU unreadable", index=bad.index, code=bad.fault.code, why=bad.fault.detail)

"""What is known about the node's GPUs: the only writer of the store.

The monitor asks the driver and tells the keeper what it heard; the keeper
merges it (``inventory``), has it judged (``doctor``), publishes a new snapshot when
anything changed, has it remembered (``roll``) and says in the log what changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from deviceplugin import health, inventory, logs, scanlog, wire
from deviceplugin.clock import Clock
from deviceplugin.doctor import Doctor
from deviceplugin.errors import HardwareError, ListTooLong, NoGpu
from deviceplugin.hardware import Host
from deviceplugin.health import Policy
from deviceplugin.inbox import Inbox
from deviceplugin.model import (
    Address,
    Alarm,
    Fault,
    GpuId,
    Health,
    Inventory,
    LoggedXid,
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
        doctor: Doctor,
        roll: Roll | None,
        inbox: Inbox | None,
        on_publishable: Callable[[], None],
    ) -> None:
        """
        Args:
            doctor: judges what is heard.
            roll: devices that are known from before; None: none are.
            inbox: what others say; None: nobody is heard.
            on_publishable: called once, when there is a first device to serve.
        """
        self._host = host
        self._store = store
        self._stats = stats
        self._clock = clock
        self._doctor = doctor
        self._roll = roll
        self._inbox = inbox
        self._on_publishable = on_publishable
        self._recalled: Inventory | None = None
        self._conditions: Mapping[GpuId, Reading] = {}
        self._too_long = 0

    # --- what is known ------------------------------------------------------------------

    def recall(self) -> None:
        """Remember what earlier processes knew; before anything else.

        Raises:
            ListTooLong: it is more than the kubelet takes.
        """
        self._recalled = self._roll.recall() if self._roll is not None else None
        self._doctor.recall()
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
        facts = self._host.facts(scan)
        merged = inventory.merge(known, scan, facts, now_s)
        if self._roll is not None:
            merged = self._roll.settle(merged)
        changes = inventory.diff(known, merged)
        if not merged.gpus:
            scanlog.log_unreadable(merged)
            if not merged.unreadable:
                raise NoGpu("the driver lists no GPU")
            raise HardwareError(
                f"none of the {len(merged.unreadable)} GPUs that the driver lists can be read"
            )
        if before.trouble is not None:
            _log.info("driver can be used again", gpus=len(merged.gpus))
        scanlog.log_scan(known, merged, changes, first=known is self._recalled)
        if self._fits(merged):
            self._doctor.scanned(merged.gpus, facts.bindings)
            self._publish(merged)
        else:
            self._store.publish(replace(before, trouble=None))

    def read(self, readings: Iterable[Reading]) -> bool:
        """The GPUs were asked how they are.

        Returns:
            Whether all that ought to answer did.
        """
        found = self._store.snapshot.inventory
        if found is None:
            return True
        readings = tuple(readings)
        self._doctor.read(readings)
        self._take_advice(found)
        self._conditions = {reading.gpu: replace(reading, was_reset=False) for reading in readings}
        self._publish(found)
        answering = {reading.gpu for reading in readings if reading.fault is None}
        asked = {gpu.id for gpu in found.gpus if gpu.maintenance is None}
        return answering >= asked and not found.unreadable

    def _take_advice(self, known: Inventory) -> None:
        """Look into the inbox."""
        if self._inbox is None:
            return
        advice: dict[GpuId, dict[str, Fault]] = {}
        for each in self._inbox.look():
            gpu = inventory.find(known, each.gpu)
            if gpu is None or each.gpu == str(gpu.index):
                self._inbox.refuse(each, f"{each.gpu} is no GPU's id or PCI bus id here")
                continue
            fault = Fault(f"inbox-{each.source}", each.reason)
            advice.setdefault(gpu.id, {})[each.source] = fault
        self._doctor.advise(advice)

    def events(self, events: Iterable[XidEvent | Alarm]) -> bool:
        """The driver reported something.

        Returns:
            Whether the GPUs have to be asked at once how they are.
        """
        ask = [
            self._doctor.xid(event) if isinstance(event, XidEvent) else self._doctor.alarm(event)
            for event in events
        ]
        self.tick()
        return any(ask)

    def logged(self, entries: Iterable[LoggedXid]) -> None:
        """Xid errors were found in the kernel's log."""
        found = self._store.snapshot.inventory
        by_place = {gpu.pci_bus_id: gpu.id for gpu in found.gpus} if found is not None else {}
        for entry in entries:
            if (gpu := by_place.get(entry.pci_bus_id)) is not None:
                self._doctor.logged(gpu, entry)
        self.tick()

    def tick(self) -> None:
        """Time may have changed a verdict."""
        snapshot = self._store.snapshot
        if snapshot.inventory is not None:
            self._publish(snapshot.inventory, snapshot.trouble)

    def due_in_s(self) -> float:
        """When ``tick`` has something to do, in seconds from now."""
        due_s = self._doctor.due_in_s()
        return math.inf if due_s is None else due_s

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
            for gpu in self._recalled.gpus:
                self._doctor.missing(gpu, why)
            self._publish(self._recalled, trouble)
        else:
            self._store.publish(replace(before, trouble=trouble))

    def left_alone(self) -> None:
        """Every GPU is in maintenance: the driver is not even opened."""
        before, known = self._store.snapshot, self._recalled
        if before.inventory is None and known is not None:
            self._doctor.scanned(known.gpus)
            self._publish(known)

    def silence(self, detail: str) -> None:
        """Nobody could ask the driver for too long, and that is to count."""
        self._doctor.silence(detail)
        self.tick()

    def adopt(self, policy: Policy) -> None:
        """Judge by other rules from now on."""
        self._doctor.policy = policy
        self.tick()

    # --- what operators want --------------------------------------------------------------

    def forget(self, name: str) -> str | None:
        """Drop an absent device. Why not, in words; None when it is done."""
        before = self._store.snapshot
        why_not = "nothing is remembered here"
        if self._roll is not None:
            why_not = self._roll.why_not_forget(before.inventory, name) or ""
        if not why_not and before.inventory is not None:
            gpu = GpuId(name)
            self._publish(inventory.forget(before.inventory, gpu), before.trouble)
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
        chosen, refused = inventory.choose(known, names, end=reason is None)
        if refused:
            return Maintained(refused)
        now_s = self._clock.boottime()
        how = Maintenance(reason, now_s) if reason is not None else None
        changed = inventory.maintain(known, chosen, how)
        if how is not None:
            new = {*chosen, *(gpu.id for gpu in changed.gpus if gpu.id not in before.verdicts)}
            self._doctor.scanned(gpu for gpu in changed.gpus if gpu.id in new)
        saved = self._publish(changed, before.trouble)
        for name in chosen:
            if how is not None:
                _log.warning("maintenance started, GPU is left alone", gpu=name, reason=reason)
            else:
                _log.info("maintenance ended", gpu=name)
        held = (self._roll.holders.held(named=True) if self._roll is not None else None) or {}
        return Maintained((), chosen, {name: held[name] for name in chosen if name in held}, saved)

    def say(
        self, names: Sequence[str], healthy: bool | None, reason: str, for_s: float | None
    ) -> Maintained:
        """An operator says how GPUs are.

        Args:
            names: as for ``maintain``.
            healthy: None takes an earlier word back.
            for_s: how long that is to count.
        """
        known, before = self._store.snapshot.inventory, self._store.snapshot
        if known is None:
            return Maintained(("no GPU is known here, so nothing can be said of one",))
        chosen, refused = inventory.choose(known, names, end=False)
        refused += tuple(
            f"{gpu.id} is in maintenance: end that first"
            for gpu in known.gpus
            if gpu.id in chosen and gpu.maintenance is not None
        )
        if refused:
            return Maintained(refused)
        self._doctor.say(chosen, healthy, reason, for_s)
        self._publish(known, before.trouble)
        return Maintained((), chosen, saved=self._doctor.saved)

    # --- publishing -----------------------------------------------------------------------

    def _fits(self, merged: Inventory) -> bool:
        """Whether the kubelet would take the list, whatever becomes of its healths."""
        nothing = Verdict(Health.HEALTHY, "", "", 0.0)
        anything = dict.fromkeys((gpu.id for gpu in merged.gpus), nothing)
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

    def _publish(self, merged: Inventory, trouble: Fault | None = None) -> bool:
        """Whether it is remembered, too."""
        before = self._store.snapshot
        verdicts = self._doctor.verdicts(merged.gpus)
        self._store.publish(
            Snapshot(
                inventory=merged,
                verdicts=verdicts,
                devices=inventory.devices(merged, verdicts),
                trouble=trouble,
                conditions=self._conditions,
            )
        )
        if before.inventory is None:
            self._on_publishable()
        saved = self._roll.save(merged) if self._roll is not None else False
        self._doctor.report(verdicts)
        return saved

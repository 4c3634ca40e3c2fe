"""Watches the GPUs: one thread that asks the driver and writes the store.

The only user of ``Hardware`` and the only writer of the store. It scans,
waits for events, polls, turns what it hears into verdicts (``health``) and
publishes a new snapshot when anything changed. When the driver as a whole
fails it closes it, says why in the snapshot, and tries again with back-off;
what was published stays published meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from deviceplugin import health, inventory, logs
from deviceplugin.clock import Clock
from deviceplugin.errors import HardwareError
from deviceplugin.hardware import Hardware, Host
from deviceplugin.model import Fault, GpuId, Health, Inventory, Snapshot, Verdict, XidEvent
from deviceplugin.roll import Roll
from deviceplugin.stats import Stats
from deviceplugin.store import Store

WAIT_S = 2.0
"""The longest single wait for events; a stop ends it early."""
RESCAN_S = 60.0
REOPEN_POLLS = 6
REOPEN_POLLS_MAX = 48
"""While a GPU is silent or unreadable the driver is opened anew after so many
polls: within one session NVML never takes back that a GPU is lost. Each time
in vain doubles the number, since opening is costly where no persistence daemon
runs."""
BACK_OFF_FIRST_S = 1.0
BACK_OFF_MAX_S = 30.0
REPEAT_LOG_S = 60.0
"""The same Xid on the same GPU is logged once in this time, and counted always."""

_log = logs.get("monitor")


class Monitor:
    """Runs in a thread of its own until ``stop``."""

    def __init__(
        self,
        hardware: Hardware,
        host: Host,
        store: Store,
        stats: Stats,
        clock: Clock,
        *,
        poll_interval_s: float,
        on_publishable: Callable[[], None],
        on_crash: Callable[[BaseException], None],
        roll: Roll | None = None,
    ) -> None:
        """
        Args:
            roll: devices that are known from before; None: none are.
            on_publishable: called once, when there is a first device to serve.
            on_crash: called when the thread ends by a fault of ours.
        """
        self._hardware = hardware
        self._host = host
        self._store = store
        self._stats = stats
        self._clock = clock
        self._poll_interval_s = poll_interval_s
        self._on_publishable = on_publishable
        self._on_crash = on_crash
        self._roll = roll
        self._recalled: Inventory | None = None
        self._stop = threading.Event()
        self._orders: queue.SimpleQueue[tuple[Callable[[], str | None], Future[str | None]]]
        self._orders = queue.SimpleQueue()
        self._called = threading.Event()
        # A daemon thread: a driver call that hangs must not keep the process.
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._in_driver = False
        self._beat_s = clock.monotonic()
        self._logged: dict[tuple[GpuId | None, int], float] = {}

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; ``join`` waits for it."""
        self._stop.set()
        self._called.set()
        self._hardware.abort()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended, the driver closed."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def forget(self, name: str, timeout_s: float = 4.0) -> str | None:
        """Drop an absent device from the list; from any thread.

        Returns:
            Why not, in words; None when it is forgotten.
        """
        done: Future[str | None] = Future()
        self._orders.put((lambda: self._forget(name), done))
        self._call()
        try:
            return done.result(timeout_s)
        except TimeoutError:
            done.cancel()
            return "the driver keeps the plugin waiting: try again in a minute"

    def _call(self) -> None:
        """End whatever the thread is waiting for."""
        self._called.set()
        self._hardware.wake()

    def trouble(self) -> str | None:
        """What is wrong with this thread, for the liveness probe. A driver call
        that takes its time is the driver's affair and no reason to be killed."""
        if not self._thread.is_alive():
            return "the monitor thread is dead"
        age_s = self._clock.monotonic() - self._beat_s
        if age_s > BACK_OFF_MAX_S and not self._in_driver:
            return f"the monitor thread has been stuck for {age_s:.0f} s"
        return None

    # --- the thread -----------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        try:
            self._recalled = self._roll.recall() if self._roll is not None else None
            while not self._stop.is_set():
                self._beat(in_driver=True)
                started_s = self._clock.monotonic()
                try:
                    self._session()
                except HardwareError as error:
                    if self._stop.is_set():
                        break
                    trouble = Fault(error.code, str(error))
                    if self._clock.monotonic() - started_s > BACK_OFF_MAX_S:
                        failures = 0
                    self._back_off(trouble, failures)
                    failures += 1
            self._beat(in_driver=True)
            self._hardware.close()
        except BaseException as error:  # noqa: BLE001  # a thread that dies must be heard of
            self._on_crash(error)

    def _beat(self, *, in_driver: bool) -> None:
        self._beat_s = self._clock.monotonic()
        self._in_driver = in_driver

    def _back_off(self, trouble: Fault, failures: int) -> None:
        """Let go of the driver and wait before the next try."""
        self._hardware.close()
        self._count_errors()
        wait_s = min(BACK_OFF_MAX_S, BACK_OFF_FIRST_S * 2.0 ** min(failures, 16))
        before = self._store.snapshot
        if before.trouble != trouble:
            _log.warning(
                "driver cannot be used", code=trouble.code, why=trouble.detail, retry_in_s=wait_s
            )
            self._store.publish(replace(before, trouble=trouble))
        self._beat(in_driver=False)
        deadline_s = self._clock.monotonic() + wait_s
        while not self._stop.is_set() and self._clock.monotonic() < deadline_s:
            self._called.wait(max(0.0, deadline_s - self._clock.monotonic()))
            self._obey()

    def _session(self) -> None:
        """From a scan to the stop, or to the driver's failure."""
        self._scan()
        now_s = self._clock.monotonic()
        poll_due_s, rescan_due_s = now_s, now_s + RESCAN_S
        silent_polls, reopen_polls = 0, REOPEN_POLLS
        while not self._stop.is_set():
            self._beat(in_driver=True)
            asked_s = self._clock.monotonic()
            wait_s = max(0.001, min(WAIT_S, poll_due_s - asked_s))
            events = self._hardware.wait(wait_s)
            now_s = self._clock.monotonic()
            if events:
                self._events(events)
            elif now_s - asked_s < wait_s - 0.005:
                poll_due_s = now_s  # an early return without events: look
            self._obey()
            if now_s >= poll_due_s:
                if self._poll():
                    silent_polls, reopen_polls = 0, REOPEN_POLLS
                else:
                    silent_polls += 1
                poll_due_s = now_s + self._poll_interval_s
            if now_s >= rescan_due_s or silent_polls >= reopen_polls:
                if silent_polls >= reopen_polls:
                    self._hardware.close()
                    silent_polls, reopen_polls = 0, min(2 * reopen_polls, REOPEN_POLLS_MAX)
                self._scan()
                rescan_due_s = now_s + RESCAN_S
            self._count_errors()
            self._stats.set("monitor_last_success_timestamp_seconds", to=self._clock.time())

    def _count_errors(self) -> None:
        for error in self._hardware.errors():
            self._stats.add("driver_errors", error.call, error.code)

    # --- what is asked -----------------------------------------------------------------

    def _obey(self) -> None:
        """Do what other threads asked for."""
        self._called.clear()
        while not self._orders.empty():
            act, done = self._orders.get()
            if done.set_running_or_notify_cancel():
                done.set_result(act())

    def _forget(self, name: str) -> str | None:
        before = self._store.snapshot
        why_not = self._roll.why_not_forget(before.inventory, name) if self._roll else "no roll"
        if why_not is None and before.inventory is not None:
            gpu = GpuId(name)
            verdicts = {known: v for known, v in before.verdicts.items() if known != gpu}
            self._publish(inventory.forget(before.inventory, gpu), verdicts)
            _log.info("device forgotten", gpu=gpu)
        return why_not

    # --- what is heard ----------------------------------------------------------------

    def _scan(self) -> None:
        scan = self._hardware.scan()
        before = self._store.snapshot
        known = before.inventory if before.inventory is not None else self._recalled
        merged = inventory.merge(known, scan, self._host.facts(scan))
        if self._roll is not None:
            merged = self._roll.settle(merged)
        changes = inventory.diff(known, merged)
        if not merged.gpus:
            _log_unreadable(merged)
            raise HardwareError(
                "the driver lists no GPU"
                if not merged.unreadable
                else f"none of the {len(merged.unreadable)} GPUs that the driver lists can be read"
            )
        now_s = self._clock.time()
        verdicts = {
            gpu.id: health.on_scan(before.verdicts.get(gpu.id), gpu, now_s) for gpu in merged.gpus
        }
        if before.trouble is not None:
            _log.info("driver can be used again", gpus=len(merged.gpus))
        self._log_scan(known, merged, changes)
        self._publish(merged, verdicts)
        if before.inventory is None:
            self._on_publishable()

    def _log_scan(
        self, before: Inventory | None, after: Inventory, changes: inventory.Difference
    ) -> None:
        for gpu in changes.added:
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
        for gpu in changes.returned:
            _log.info("GPU is back", gpu=gpu.id, pci=gpu.pci_bus_id)
        for gpu in changes.gone:
            _log.warning("GPU is gone, stays listed as unhealthy", gpu=gpu.id, pci=gpu.pci_bus_id)
        if before is None or before.unreadable != after.unreadable:
            _log_unreadable(after)
        if before is self._recalled:
            for gpu in after.gpus:
                if not gpu.present:
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

    def _poll(self) -> bool:
        """Ask every GPU how it is. Whether all that ought to be there answer."""
        readings = self._hardware.read()
        now_s = self._clock.time()
        snapshot = self._store.snapshot
        verdicts = dict(snapshot.verdicts)
        for reading in readings:
            if reading.gpu in verdicts:
                verdicts[reading.gpu] = health.on_reading(verdicts[reading.gpu], reading, now_s)
        if snapshot.inventory is None:
            return True
        self._publish(snapshot.inventory, verdicts)
        answering = {reading.gpu for reading in readings if reading.fault is None}
        return answering.issuperset(verdicts) and not snapshot.inventory.unreadable

    def _events(self, events: tuple[XidEvent, ...]) -> None:
        now_s = self._clock.time()
        snapshot = self._store.snapshot
        verdicts = dict(snapshot.verdicts)
        for event in events:
            gpu = event.gpu if event.gpu in verdicts else None
            self._stats.add("xid_errors", gpu or "", str(event.xid))
            if gpu is not None and event.gpu_instance is None:
                verdicts[gpu] = health.on_xid(verdicts[gpu], event, now_s)
            self._log_xid(event, known=gpu is not None)
        if snapshot.inventory is not None:
            self._publish(snapshot.inventory, verdicts)

    def _log_xid(self, event: XidEvent, *, known: bool) -> None:
        key, now_s = (event.gpu, event.xid), self._clock.monotonic()
        if now_s - self._logged.get(key, -REPEAT_LOG_S) < REPEAT_LOG_S:
            return
        self._logged[key] = now_s
        fields: dict[str, object] = {"gpu": event.gpu, "xid": event.xid}
        if event.gpu_instance is not None:
            fields |= {"gi": event.gpu_instance, "ci": event.compute_instance}
        _log.warning("Xid error" if known else "Xid error of a GPU that is not ours", **fields)

    def _publish(self, merged: Inventory, verdicts: dict[GpuId, Verdict]) -> None:
        before = self._store.snapshot
        self._store.publish(
            Snapshot(
                inventory=merged,
                verdicts=verdicts,
                devices=inventory.devices(merged, verdicts),
                trouble=None,
            )
        )
        if self._roll is not None:
            self._roll.save(merged)
        for gpu, verdict in verdicts.items():
            was = before.verdicts.get(gpu)
            if (was.health if was is not None else Health.HEALTHY) is verdict.health:
                continue
            self._stats.add("health_transitions", gpu, verdict.health.value)
            if verdict.health is Health.UNHEALTHY:
                _log.warning(
                    "GPU unhealthy, not offered any more",
                    gpu=gpu,
                    reason=verdict.reason,
                    why=verdict.detail,
                )
            else:
                _log.info(
                    "GPU healthy again, offered again", gpu=gpu, was=was.reason if was else ""
                )


def _log_unreadable(found: Inventory) -> None:
    for bad in found.unreadable:
        _log.error("GPU unreadable", index=bad.index, code=bad.fault.code, why=bad.fault.detail)

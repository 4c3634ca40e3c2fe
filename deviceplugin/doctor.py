"""Keeps every GPU's health record, and says in log and metrics what changes.

Between the keeper, which hears of things, and the pure rules of ``health``,
which say what they mean. Records are remembered (``casebook``) whenever they
change, so that a restart of the plugin forgets no fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from deviceplugin import health, logs
from deviceplugin.casebook import Casebook, Entry
from deviceplugin.clock import Clock
from deviceplugin.health import Cure, Effect, Policy, Record
from deviceplugin.model import (
    Alarm,
    Fault,
    Gpu,
    GpuId,
    Health,
    Held,
    LoggedXid,
    Reading,
    Stage,
    Verdict,
    XidEvent,
)
from deviceplugin.stats import Stats

REPEAT_LOG_S: Final = 60.0
"""The same Xid on the same GPU is logged once in this time, and counted always."""

_log = logs.get("health")


class Doctor:
    """Used by the monitor's thread alone."""

    def __init__(
        self,
        stats: Stats,
        clock: Clock,
        policy: Policy,
        casebook: Casebook | None = None,
        holders: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """
        Args:
            casebook: what outlives the process; None: nothing does.
            holders: which device is held by whom, in words; may take a second.
        """
        self.policy = policy
        self.saved = False
        """What is known outlives this process."""
        self._stats = stats
        self._clock = clock
        self._casebook = casebook
        self._holders = holders
        self._records: dict[GpuId, Record] = {}
        self._said: dict[GpuId, Verdict] = {}
        self._bindings: dict[GpuId, int] = {}
        self._logged: dict[tuple[GpuId | None, int], float] = {}

    def recall(self) -> None:
        """Remember what earlier processes knew."""
        if self._casebook is None:
            return
        now_s = self._clock.boottime()
        for gpu, record in self._casebook.recall().items():
            self._records[gpu] = health.tick(record, now_s)
            self._said[gpu] = verdict = health.judge(self._records[gpu], self.policy)
            if verdict.reason and verdict.reason != health.MAINTENANCE:
                _log.warning(
                    "a fault of before still counts",
                    gpu=gpu,
                    reason=verdict.reason,
                    why=verdict.detail,
                )

    # --- evidence ---------------------------------------------------------------------

    def scanned(
        self, gpus: Iterable[Gpu], bindings: Mapping[GpuId, int] = MappingProxyType({})
    ) -> None:
        """The driver listed its GPUs.

        Args:
            bindings: as in ``HostFacts``.
        """
        now_s = self._clock.boottime()
        for gpu_id, number in bindings.items():
            if self._bindings.get(gpu_id, number) != number and gpu_id in self._records:
                _log.info("a driver was bound to the GPU anew", gpu=gpu_id)
                self._records[gpu_id] = health.on_rebound(self._records[gpu_id])
        self._bindings |= bindings
        for gpu in gpus:
            before = self._records.get(gpu.id)
            self._records[gpu.id] = health.on_scan(before, gpu, now_s, self.policy)

    def read(self, readings: Iterable[Reading]) -> None:
        """The GPUs were asked."""
        now_s = self._clock.boottime()
        for reading in readings:
            if (record := self._records.get(reading.gpu)) is not None:
                record = health.on_reading(record, reading, now_s, self.policy)
                self._records[reading.gpu] = record

    def xid(self, event: XidEvent) -> bool:
        """The driver reported an Xid error.

        Returns:
            Whether the GPUs have to be asked at once how they are.
        """
        now_s = self._clock.boottime()
        effect = self.policy.effect(event.xid)
        record = self._records.get(event.gpu) if event.gpu is not None else None
        ours = record is not None and event.gpu_instance is None
        self._stats.add(
            "xid_errors",
            event.gpu if record is not None and event.gpu else "",
            str(event.xid),
            effect.name.lower() if ours else "none",
        )
        self._log_xid(event, effect, record, now_s)
        if record is None or event.gpu is None or event.gpu_instance is not None:
            return False
        self._records[event.gpu] = health.on_xid(record, event.xid, now_s, self.policy)
        return effect is Effect.ASK

    def logged(self, gpu: GpuId, entry: LoggedXid) -> None:
        """An Xid of this GPU stands in the kernel's log; the driver may have told it, too."""
        if (record := self._records.get(gpu)) is None:
            return
        after = health.on_logged(record, entry.xid, entry.at_s, self.policy)
        if len(after.cases) > len(record.cases):
            _log.warning("Xid error in the kernel log", gpu=gpu, xid=entry.xid)
        self._records[gpu] = after

    def alarm(self, alarm: Alarm) -> bool:
        """The driver reported something else; as for ``xid``."""
        record = self._records.get(alarm.gpu) if alarm.gpu is not None else None
        if record is None or alarm.gpu is None:
            return False
        if alarm.fault is not None:
            now_s = self._clock.boottime()
            _log.warning("driver event", gpu=alarm.gpu, code=alarm.fault.code)
            self._records[alarm.gpu] = health.on_event(record, alarm.fault, now_s, self.policy)
        return True

    def missing(self, gpu: Gpu, why: Fault) -> None:
        """A GPU that an earlier process knew cannot be looked for."""
        now_s, before = self._clock.boottime(), self._records.get(gpu.id)
        if gpu.maintenance is not None:
            self._records[gpu.id] = health.on_scan(before, gpu, now_s, self.policy)
        else:
            since_s = now_s if gpu.gone_since_s is None else gpu.gone_since_s
            self._records[gpu.id] = health.on_missing(before, why, since_s, self.policy)

    def silence(self, detail: str) -> None:
        """Nobody could ask the driver for too long, and that is to count."""
        now_s = self._clock.boottime()
        for gpu, record in self._records.items():
            self._records[gpu] = health.on_silence(record, detail, now_s)

    def advise(self, advice: Mapping[GpuId, Mapping[str, Fault]]) -> None:
        """What others say of the GPUs, by source; no word of a GPU ends what was said."""
        now_s = self._clock.boottime()
        for gpu, record in self._records.items():
            self._records[gpu] = health.on_advice(record, advice.get(gpu, {}), now_s, self.policy)

    def say(
        self, gpus: Iterable[GpuId], healthy: bool | None, reason: str, for_s: float | None
    ) -> None:
        """An operator says how GPUs are; with None he takes an earlier word back."""
        now_s = self._clock.boottime()
        until_s = None if for_s is None else now_s + for_s
        for gpu in gpus:
            record = self._records.get(gpu) or health.new(now_s)
            if healthy is None:
                self._records[gpu] = health.on_clear(record, now_s)
            else:
                self._records[gpu] = health.on_word(record, healthy, reason, now_s, until_s)
            if self._casebook is not None:
                now = {True: "said to be healthy", False: "said to be unhealthy"}
                was = _label(self._said[gpu]) if gpu in self._said else "healthy"
                text = "word taken back" if healthy is None else now[healthy]
                entry = Entry(round(self._clock.time(), 1), gpu, was, text, reason)
                self._casebook.add(entry)
            _log.warning(
                "operator's word",
                gpu=gpu,
                healthy="taken back" if healthy is None else healthy,
                reason=reason,
                for_s=for_s,
            )

    # --- verdicts ---------------------------------------------------------------------

    def due_in_s(self) -> float | None:
        """When time alone changes a record, in seconds from now; None: never."""
        times = [due for record in self._records.values() if (due := health.due_s(record))]
        return max(0.0, min(times) - self._clock.boottime()) if times else None

    def verdicts(self, gpus: Iterable[Gpu]) -> Mapping[GpuId, Verdict]:
        """The verdict of each of these GPUs; those that are not among them are dropped."""
        now_s = self._clock.boottime()
        listed = [gpu.id for gpu in gpus]
        known = {gpu: self._records.get(gpu) or health.new(now_s) for gpu in listed}
        ticked = {gpu: health.tick(record, now_s) for gpu, record in known.items()}
        self._records = dict(health.brake(ticked, self.policy, now_s))
        return {gpu: health.judge(record, self.policy) for gpu, record in self._records.items()}

    def report(self, verdicts: Mapping[GpuId, Verdict]) -> None:
        """Remember, count and log what differs from what was said before. After the
        kubelet has been told: that is what matters."""
        well = Verdict(Health.HEALTHY, "", "", 0.0)
        changed = [
            (gpu, was, verdict)
            for gpu, verdict in verdicts.items()
            if _gist(was := self._said.get(gpu, well)) != _gist(verdict)
        ]
        self._said = dict(verdicts)
        held = sum(verdict.held is Held.LIMIT for verdict in verdicts.values())
        self._stats.set("verdicts_held", to=held)
        if self._casebook is not None:
            for gpu, was, verdict in changed:
                self._casebook.add(self._entry(gpu, was, verdict))
            self.saved = self._casebook.save(self._records)
        for gpu, was, verdict in changed:
            if was.health is not verdict.health:
                self._stats.add("health_transitions", gpu, verdict.health.value)
            self._log_change(gpu, was, verdict)
        reset = [gpu for gpu, was, verdict in changed if _was_reset(was, verdict)]
        held_by = self._holders() if reset else {}
        for gpu in reset:
            if (holder := held_by.get(gpu)) is not None:
                _log.warning("GPU was reset while a pod held it", gpu=gpu, holder=holder)

    def _entry(self, gpu: GpuId, was: Verdict, verdict: Verdict) -> Entry:
        return Entry(
            round(self._clock.time(), 1),
            gpu,
            _label(was),
            _label(verdict),
            verdict.detail,
            verdict.held.value if verdict.held is not None else "",
        )

    def _log_change(self, gpu: GpuId, was: Verdict, verdict: Verdict) -> None:
        fields: dict[str, Any] = {
            "gpu": gpu,
            "was": was.reason or "healthy",
            "reason": verdict.reason,
            "why": verdict.detail,
            "ends_with": verdict.ends_with,
        }
        if verdict.held is Held.LIMIT:
            _log.error(
                "GPU would be withdrawn, held: too many within ten minutes; look at it",
                **fields,
                limit=self.policy.limit(len(self._records)),
            )
        elif verdict.held is not None:
            _log.warning("GPU stays offered in spite of a fault", **fields, held=verdict.held.value)
        elif verdict.health is Health.HEALTHY:
            _log.info("GPU healthy again, offered again", gpu=gpu, was=was.reason)
        elif was.health is Health.HEALTHY or was.reason != verdict.reason:
            _log.warning("GPU unhealthy, not offered any more", **fields)
        else:
            _log.info("GPU recovering", **fields)

    def _log_xid(
        self, event: XidEvent, effect: Effect, record: Record | None, now_s: float
    ) -> None:
        key, log_s = (event.gpu, event.xid), self._clock.monotonic()
        if log_s - self._logged.get(key, -REPEAT_LOG_S) < REPEAT_LOG_S:
            return
        self._logged[key] = log_s
        fields: dict[str, object] = {"gpu": event.gpu, "xid": event.xid}
        if event.gpu_instance is not None:
            fields |= {"gi": event.gpu_instance, "ci": event.compute_instance}
        if record is None:
            _log.warning("Xid error of a GPU that is not ours", **fields)
            return
        fields |= {"means": health.lookup(event.xid).text, "effect": effect.value}
        if (other := health.follows(record, event.xid, now_s)) is not None:
            fields["follows"] = other
        log = _log.info if effect is Effect.IGNORE else _log.warning
        log("Xid error", **fields)


def _label(verdict: Verdict) -> str:
    """How the ledger names a verdict."""
    return "recovering" if verdict.stage is Stage.RECOVERING else verdict.reason or "healthy"


def _gist(verdict: Verdict) -> tuple[object, ...]:
    """What of a verdict is worth a word when it changes."""
    recovering = verdict.stage is Stage.RECOVERING
    return verdict.health, verdict.reason, verdict.held, recovering


def _was_reset(was: Verdict, verdict: Verdict) -> bool:
    """Whether a reset has ended what was wrong."""
    return was.ends_with == Cure.RESET.value and verdict.stage is Stage.RECOVERING

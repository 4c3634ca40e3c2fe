"""What each piece of evidence does to a GPU's record. Pure.

``record`` has the state machine, ``catalog`` the Xid codes, ``policy`` what can be
set, ``judgement`` turns records into verdicts. Here is what each source means:

- an Xid does what the catalog or the policy says; one that needs a reset ends with
  a sign of a reset: the driver says so, or the GPU fell silent and answers again;
- a GPU that does not answer is ``lost``, one that asks for a reset is
  ``reset-required``; answering ends both;
- the driver's recovery action, a row that could not be remapped and a fabric that is
  not ready each make it unhealthy; rows that wait for a reset, and uncorrected
  errors, do not by themselves;
- a GPU that is gone from the driver's list is ``absent``, one in MIG mode has no use
  as a whole: ``mig-mode``;
- ``monitoring-lost`` is said of a GPU that nobody could ask for too long, if that is
  wanted;
- ``maintenance`` is the operator's: nothing else counts while it lasts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from deviceplugin.health.catalog import ENDS, FOLLOWERS, FOLLOWS_WITHIN_S, Cure, Effect, lookup
from deviceplugin.health.judgement import brake, judge
from deviceplugin.health.policy import Policy
from deviceplugin.health.record import (
    Case,
    Record,
    Source,
    after_boot,
    close_cases,
    due_s,
    open_case,
    recovered,
    tick,
)
from deviceplugin.model import Fabric, Fault, Gpu, Reading, RecoveryAction

__all__ = [
    "ABSENT",
    "MAINTENANCE",
    "MONITORING_LOST",
    "Case",
    "Cure",
    "Effect",
    "Policy",
    "Record",
    "Source",
    "after_boot",
    "brake",
    "due_s",
    "follows",
    "judge",
    "lookup",
    "new",
    "on_advice",
    "on_clear",
    "on_event",
    "on_logged",
    "on_missing",
    "on_reading",
    "on_rebound",
    "on_scan",
    "on_silence",
    "on_word",
    "on_xid",
    "tick",
]

MAINTENANCE = "maintenance"
MONITORING_LOST = "monitoring-lost"
ABSENT = Fault("absent", "the driver does not list it any more")
_MIG_MODE = "mig-mode"
_SET = "operator"

_SILENT = frozenset({"lost", "reset-required"})
"""Faults of a GPU that does not answer; answering is after an Xid a sign of a reset."""


def new(now_s: float) -> Record:
    """The record of a GPU about which nothing bad is known."""
    return Record(now_s)


def _in_maintenance(record: Record) -> bool:
    return any(case.reason == MAINTENANCE for case in record.cases)


# --- Xids and other events ---------------------------------------------------------------


def follows(record: Record, code: int, now_s: float) -> int | None:
    """The Xid that this one is only a consequence of."""
    if code not in FOLLOWERS or record.last_xid is None:
        return None
    other, at_s = record.last_xid
    return other if now_s - at_s <= FOLLOWS_WITHIN_S else None


def on_xid(
    record: Record, code: int, now_s: float, policy: Policy, source: Source = Source.XID
) -> Record:
    """After an Xid error of this GPU."""
    if _in_maintenance(record):
        return record
    if code in ENDS:
        over = f"xid-{ENDS[code]}"
        record = close_cases(record, lambda case: case.reason == over, now_s)
    if code not in FOLLOWERS:
        record = replace(record, last_xid=(code, now_s))
    if policy.effect(code) is not Effect.UNHEALTHY:
        return record
    known = lookup(code)
    case = Case(source, f"xid-{code}", f"Xid {code}: {known.text}", now_s, known.cure)
    return open_case(record, case, policy.hold_down_s)


def on_logged(record: Record, code: int, at_s: float, policy: Policy) -> Record:
    """After an Xid in the kernel's log; what is from before the GPU was last known to be
    good is history."""
    known_good_s = record.well_since_s
    if record.hold_until_s is not None:
        known_good_s = record.hold_until_s - record.hold_down_s
    if at_s <= known_good_s:
        return record
    return on_xid(record, code, at_s, policy, Source.KERNEL_LOG)


def on_event(record: Record, fault: Fault, now_s: float, policy: Policy) -> Record:
    """After an event, other than an Xid, that says that the GPU is to be reset."""
    if _in_maintenance(record):
        return record
    case = Case(Source.EVENT, fault.code, fault.detail, now_s, Cure.RESET)
    return open_case(record, case, policy.hold_down_s)


# --- being asked -------------------------------------------------------------------------


def on_reading(record: Record, reading: Reading, now_s: float, policy: Policy) -> Record:
    """After a poll of this GPU."""
    if _in_maintenance(record):
        return record
    if reading.fault is not None:
        return _on_fault(record, reading.fault, now_s, policy)
    for case in _conditions(reading, now_s):
        record = open_case(record, case, policy.hold_down_s)
    return close_cases(record, lambda case: _is_over(case, reading), now_s)


def _on_fault(record: Record, fault: Fault, now_s: float, policy: Policy) -> Record:
    if fault.code in _SILENT:
        record = _fell_silent(record)
    case = Case(Source.ANSWER, fault.code, fault.detail, now_s)
    return open_case(record, case, policy.hold_down_s)


def _fell_silent(record: Record) -> Record:
    if all(case.silent for case in record.cases):
        return record
    return replace(record, cases=tuple(replace(case, silent=True) for case in record.cases))


def _conditions(reading: Reading, now_s: float) -> Iterable[Case]:
    """What is wrong now with a GPU that answers."""
    action = reading.action
    if action is not None and action is not RecoveryAction.NONE:
        text = f"the driver asks for: {action.value.replace('-', ' ')}"
        yield Case(Source.ACTION, _action_reason(action), text, now_s)
    if reading.remap is not None and reading.remap.failed:
        text = "a memory row could not be remapped: the GPU has to be replaced"
        yield Case(Source.REMAP, "row-remap-failure", text, now_s, Cure.BOOT)
    if reading.fabric is not None and reading.fabric is not Fabric.COMPLETED:
        text = f"the NVSwitch fabric is not ready: {reading.fabric.value}"
        yield Case(Source.FABRIC, "fabric", text, now_s, hold=False)


def _action_reason(action: RecoveryAction) -> str:
    return f"recovery-{action.value}"


def _is_over(case: Case, reading: Reading) -> bool:
    """Whether an answer of the GPU ends this case."""
    match case.source:
        case Source.ANSWER | Source.MONITORING:
            return True
        case Source.PRESENCE:
            return case.reason == ABSENT.code
        case Source.ACTION:
            return reading.action is not None and case.reason != _action_reason(reading.action)
        case Source.FABRIC:
            return reading.fabric is Fabric.COMPLETED
        case Source.XID | Source.EVENT | Source.KERNEL_LOG:
            return case.cure is Cure.RESET and (reading.was_reset or case.silent)
        case _:
            return False


def on_rebound(record: Record) -> Record:
    """After a driver was bound to the GPU anew: its next answer is that of a reset GPU."""
    return _fell_silent(record)


# --- the list, silence, words ----------------------------------------------------------------


def on_scan(record: Record | None, gpu: Gpu, now_s: float, policy: Policy) -> Record:
    """After a scan; ``record`` is None for a GPU that was never seen.

    A scan can only find something wrong: that a GPU is well is for a reading
    to say, which asks the GPU itself.
    """
    seen_before = record is not None
    if record is None or (gpu.maintenance is None and _in_maintenance(record)):
        record = new(now_s)
    if gpu.maintenance is not None:
        said = gpu.maintenance
        case = Case(Source.OPERATOR, MAINTENANCE, said.reason, said.since_s, Cure.WORD, hold=False)
        return replace(new(said.since_s), cases=(case,))
    if gpu.mig_enabled is not True:
        record = close_cases(record, lambda case: case.reason == _MIG_MODE, now_s)
    if gpu.gone_since_s is not None:
        return _absent(record, ABSENT, gpu.gone_since_s, policy, hold=seen_before)
    if gpu.fault is not None:
        return _on_fault(record, gpu.fault, now_s, policy)
    if gpu.mig_enabled is True:
        text = "in MIG mode it has no use as a whole"
        case = Case(Source.PRESENCE, _MIG_MODE, text, now_s, hold=False)
        return open_case(record, case, policy.hold_down_s)
    return record


def on_missing(record: Record | None, why: Fault, since_s: float, policy: Policy) -> Record:
    """Of a GPU that was known to an earlier process, and cannot be looked for now."""
    record = new(since_s) if record is None else record
    return _absent(record, why, since_s, policy, hold=False)


def _absent(record: Record, why: Fault, since_s: float, policy: Policy, *, hold: bool) -> Record:
    case = Case(Source.PRESENCE, why.code, why.detail, since_s, hold=hold)
    return open_case(_fell_silent(record), case, policy.hold_down_s)


def on_silence(record: Record, detail: str, now_s: float) -> Record:
    """After the driver could not be asked for too long."""
    if record.cases:
        return record
    case = Case(Source.MONITORING, MONITORING_LOST, detail, now_s, hold=False)
    return open_case(record, case, 0.0)


def on_word(
    record: Record, healthy: bool, reason: str, now_s: float, until_s: float | None
) -> Record:
    """After an operator has said how the GPU is.

    "Healthy" drops what is known against it; with ``until_s`` nothing that is heard
    before then withdraws it. "Unhealthy" stands until then, or until he says otherwise.
    """
    if _in_maintenance(record):
        return record
    if healthy:
        return replace(recovered(record, now_s), hold_down_s=0.0, excused_until_s=until_s)
    case = Case(Source.OPERATOR, _SET, reason, now_s, Cure.WORD, until_s, hold=False)
    return replace(open_case(record, case, 0.0), excused_until_s=None)


def on_advice(record: Record, advice: Mapping[str, Fault], now_s: float, policy: Policy) -> Record:
    """After a look at what others say.

    Args:
        advice: by source, what each says is wrong now.
    """
    if _in_maintenance(record):
        return record
    reasons = {fault.code for fault in advice.values()}
    record = close_cases(
        record, lambda case: case.source is Source.INBOX and case.reason not in reasons, now_s
    )
    for fault in advice.values():
        case = Case(Source.INBOX, fault.code, fault.detail, now_s, hold=False)
        record = open_case(record, case, policy.hold_down_s)
    return record


def on_clear(record: Record, now_s: float) -> Record:
    """After an operator has taken his word back."""
    record = replace(record, excused_until_s=None)
    return close_cases(record, lambda case: case.reason == _SET, now_s)

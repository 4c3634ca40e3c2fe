"""One GPU's health: the cases that are open against it, and its way back. Pure.

A case is one thing that is wrong: where that was heard, what it is, since when,
and what ends it. A GPU with an open case is unhealthy; when the last one has
ended it is recovering for the hold-down, in which nothing new may come, and then
healthy. A fault during the hold-down, or soon after, doubles the next one.

Evidence only ever closes the cases that it speaks about: that a GPU answers says
nothing about an Xid that needs a reset. What cannot be known (None) closes nothing
and opens nothing. While an operator has the GPU in maintenance nothing that is
heard of it counts, and afterwards it is looked at as if it were new.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from deviceplugin.health.catalog import Cure
from deviceplugin.model import Stage

HOLD_DOWN_MAX_S: Final = 3600.0
FLAP_WINDOW_S: Final = 3600.0
"""A fault so soon after the last recovery is a relapse."""


class Source(enum.Enum):
    """Where a case comes from; the values are names for settings and metrics."""

    XID = "xid"
    ANSWER = "answer"
    """The GPU does not answer, or says so when it is asked."""
    ACTION = "recovery-action"
    REMAP = "row-remap"
    FABRIC = "fabric"
    EVENT = "event"
    """An event of the driver other than an Xid."""
    KERNEL_LOG = "kernel-log"
    INBOX = "inbox"
    OPERATOR = "operator"
    PRESENCE = "presence"
    """The driver does not list it, or it has no use as a whole."""
    MONITORING = "monitoring"


OBSERVABLE: Final[tuple[Source, ...]] = tuple(
    source for source in Source if source not in (Source.OPERATOR, Source.PRESENCE)
)
"""Sources that can be observed without being acted on. An operator's word is meant, and
what is not there cannot be offered."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that is wrong. Times are seconds since the machine started.

    Attributes:
        reason: a stable code, one case each.
        until_s: it ends by itself then.
        silent: the GPU stopped answering since; an answer is then a sign of a reset.
        hold: whether the GPU has to prove itself when it ends.
    """

    source: Source
    reason: str
    detail: str
    since_s: float
    cure: Cure = Cure.SOURCE
    until_s: float | None = None
    silent: bool = False
    hold: bool = True


@dataclass(frozen=True, slots=True)
class Record:
    """All that is remembered of one GPU's health.

    Attributes:
        cases: open ones, in the order in which they came.
        last: the one that ended last, while recovering.
        hold_until_s: when the hold-down ends, while recovering.
        hold_down_s: how long the last hold-down was, or is to be.
        well_since_s: when it last turned healthy, or was first seen.
        excused_until_s: an operator wants it offered until then, whatever is heard.
        granted: the blast limit lets it be withdrawn, since ``granted_s``.
        last_xid: the last code that meant something of its own, and when.
    """

    well_since_s: float
    cases: tuple[Case, ...] = ()
    last: Case | None = None
    hold_until_s: float | None = None
    hold_down_s: float = 0.0
    excused_until_s: float | None = None
    granted: bool = False
    granted_s: float | None = None
    last_xid: tuple[int, float] | None = None

    @property
    def stage(self) -> Stage:
        if self.cases:
            return Stage.UNHEALTHY
        return Stage.HEALTHY if self.hold_until_s is None else Stage.RECOVERING


def open_case(record: Record, case: Case, hold_down_s: float) -> Record:
    """The record with one more case; one of the same reason stays, with the newer words.

    Args:
        hold_down_s: how long the GPU has to prove itself after a first fault.
    """
    known = next((each for each in record.cases if each.reason == case.reason), None)
    if known is not None:
        newer = replace(known, detail=case.detail, until_s=case.until_s)
        if newer == known:
            return record
        return replace(record, cases=tuple(newer if c is known else c for c in record.cases))
    if case.hold and not any(each.hold for each in record.cases):
        recovering = record.hold_until_s is not None
        relapse = recovering or case.since_s - record.well_since_s < FLAP_WINDOW_S
        if record.hold_down_s and relapse:
            hold_down_s = min(HOLD_DOWN_MAX_S, 2 * record.hold_down_s)
        record = replace(record, hold_down_s=hold_down_s)
    return replace(record, cases=(*record.cases, case), hold_until_s=None)


def close_cases(record: Record, over: Callable[[Case], bool], now_s: float) -> Record:
    """The record without the cases that are over."""
    ended = [case for case in record.cases if over(case)]
    if not ended:
        return record
    left = tuple(case for case in record.cases if case not in ended)
    held = [case for case in ended if case.hold] or ([record.last] if record.last else [])
    record = replace(record, cases=left, last=held[0] if held else None)
    if left:
        return record
    if record.last is None or not record.hold_down_s:
        return recovered(record, now_s)
    return replace(record, hold_until_s=now_s + record.hold_down_s)


def recovered(record: Record, now_s: float) -> Record:
    """The record of a GPU that is well again."""
    return replace(record, cases=(), last=None, hold_until_s=None, well_since_s=now_s)


def tick(record: Record, now_s: float) -> Record:
    """What time alone changes."""
    record = close_cases(
        record, lambda case: case.until_s is not None and case.until_s <= now_s, now_s
    )
    if record.excused_until_s is not None and record.excused_until_s <= now_s:
        record = replace(record, excused_until_s=None)
    if record.hold_until_s is not None and record.hold_until_s <= now_s:
        return recovered(record, now_s)
    return record


def due_s(record: Record) -> float | None:
    """When ``tick`` next has something to do."""
    times = [case.until_s for case in record.cases]
    times += [record.hold_until_s, record.excused_until_s]
    return min((time_s for time_s in times if time_s is not None), default=None)


def after_boot(record: Record, now_s: float, moved_by_s: float) -> Record:
    """What is left of a record after a reboot: an operator's word. Whatever else is still
    wrong will be heard again.

    Args:
        moved_by_s: what turns times of the boot before into such of this one.
    """

    def move(case: Case) -> Case:
        until_s = None if case.until_s is None else case.until_s + moved_by_s
        return replace(case, since_s=case.since_s + moved_by_s, until_s=until_s)

    kept = tuple(move(case) for case in record.cases if case.source is Source.OPERATOR)
    excused_s = record.excused_until_s
    return Record(
        now_s, cases=kept, excused_until_s=None if excused_s is None else excused_s + moved_by_s
    )

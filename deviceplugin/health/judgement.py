"""From records to verdicts: what is enforced, what is observed, and the blast limit. Pure.

The limit is for mistakes of ours, of a source or of a policy: of a node's GPUs
only so many are withdrawn within ten minutes. What is beyond it is held: shown,
logged and counted like any verdict, and the GPU stays offered until the window has
room. Not limited are facts that nobody can be mistaken about (a GPU that is off the
bus, absent or in MIG mode, a fabric that is not ready) and what operators ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from deviceplugin.health.policy import BUS_XID, Policy
from deviceplugin.health.record import Case, Record, Source
from deviceplugin.model import GpuId, Health, Held, Stage, Verdict

WINDOW_S: Final = 600.0

_UNLIMITED: Final = frozenset({Source.OPERATOR, Source.PRESENCE, Source.FABRIC, Source.MONITORING})
"""Monitoring only withdraws where a setting asks for it."""
_BUS: Final = frozenset({"lost", BUS_XID})


def limited(case: Case) -> bool:
    """Whether the blast limit is for this case."""
    return case.source not in _UNLIMITED and case.reason not in _BUS


def brake(records: Mapping[GpuId, Record], policy: Policy, now_s: float) -> Mapping[GpuId, Record]:
    """The records, with leave to withdraw for as many GPUs as the limit lets pass; those
    that have been sick for longest first."""
    braked = dict(records)
    waiting = []
    for gpu, record in records.items():
        wants = [case for case in _enforced(record, policy) if limited(case)]
        if not wants and record.granted:
            braked[gpu] = replace(record, granted=False)
        elif wants and not record.granted:
            waiting.append((min(case.since_s for case in wants), gpu))
    spent = sum(
        record.granted_s is not None and now_s - record.granted_s < WINDOW_S
        for record in records.values()
    )
    room = policy.limit(len(records)) - spent
    for _, gpu in sorted(waiting):
        again = braked[gpu].granted_s
        if again is not None and now_s - again < WINDOW_S:
            # It was withdrawn within the window already, and is counted there.
            braked[gpu] = replace(braked[gpu], granted=True)
        elif room > 0:
            room -= 1
            braked[gpu] = replace(braked[gpu], granted=True, granted_s=now_s)
    return braked


def judge(record: Record, policy: Policy) -> Verdict:
    """What is to be said of a GPU, after ``brake``."""
    if record.stage is Stage.HEALTHY:
        return Verdict(Health.HEALTHY, "", "", record.well_since_s)
    enforced = [case for case in _enforced(record, policy) if record.granted or not limited(case)]
    excused = record.excused_until_s is not None and not any(
        case.source in (Source.OPERATOR, Source.PRESENCE) for case in enforced
    )
    first = _first(enforced or _all(record))
    ends_with, until_s = first.cure.value, first.until_s
    if record.stage is Stage.RECOVERING:
        ends_with = f"{record.hold_down_s:.0f} s without anything new"
        until_s = record.hold_until_s
    verdict = Verdict(
        Health.UNHEALTHY,
        first.reason,
        first.detail,
        first.since_s,
        record.stage,
        ends_with,
        until_s,
    )
    if excused:
        return replace(verdict, health=Health.HEALTHY, held=Held.EXCUSED)
    if enforced:
        return verdict
    limit = bool(_enforced(record, policy))
    return replace(verdict, health=Health.HEALTHY, held=Held.LIMIT if limit else Held.OBSERVED)


def _all(record: Record) -> list[Case]:
    if record.cases or record.last is None:
        return list(record.cases)
    return [record.last]


def _enforced(record: Record, policy: Policy) -> list[Case]:
    return [case for case in _all(record) if case.source not in policy.observe]


def _first(cases: list[Case]) -> Case:
    """The one to name: an operator's word, else what came first; that nobody could ask
    says least."""
    rank = {Source.OPERATOR: 0, Source.MONITORING: 2}
    return min(cases, key=lambda case: rank.get(case.source, 1))

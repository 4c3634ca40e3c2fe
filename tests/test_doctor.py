"""deviceplugin.doctor"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from deviceplugin import inventory
from deviceplugin.casebook import Casebook
from deviceplugin.doctor import Doctor
from deviceplugin.health import Policy, Source
from deviceplugin.model import (
    Alarm,
    DriverInfo,
    Fault,
    GpuId,
    Health,
    Held,
    HostFacts,
    Reading,
    Scan,
    Verdict,
    XidEvent,
)
from deviceplugin.stats import Stats
from tests.builders import SetClock, driver_gpu, gpu_id

COUNT = 8


class Practice:
    """A doctor for eight GPUs, with a clock and a casebook."""

    def __init__(self, folder: Path, policy: Policy | None = None) -> None:
        self.folder, self.clock, self.stats = folder, SetClock(), Stats()
        scan = Scan(DriverInfo(), tuple(driver_gpu(number) for number in range(COUNT)))
        self.gpus = inventory.merge(None, scan, HostFacts(), 0.0).gpus
        self.policy = policy or Policy()
        self.doctor = self.again()
        self.doctor.scanned(self.gpus)

    def again(self) -> Doctor:
        """As in the next process."""
        self.book = Casebook(self.folder, "gpu", self.stats, self.clock)
        self.doctor = Doctor(self.stats, self.clock, self.policy, self.book)
        self.doctor.recall()
        return self.doctor

    def judge(self) -> Mapping[GpuId, Verdict]:
        verdicts = self.doctor.verdicts(self.gpus)
        self.doctor.report(verdicts)
        return verdicts

    def sick(self) -> dict[GpuId, str]:
        return {
            gpu: said.reason
            for gpu, said in self.judge().items()
            if said.health is Health.UNHEALTHY
        }


@pytest.fixture
def practice(tmp_path: Path) -> Practice:
    return Practice(tmp_path)


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.getMessage() == event]


def test_a_verdict_survives_the_process_and_its_hold_down_does_too(practice: Practice) -> None:
    practice.doctor.xid(XidEvent(gpu_id(3), 79))
    assert practice.sick() == {gpu_id(3): "xid-79"}
    practice.again().scanned(practice.gpus)
    assert practice.sick() == {gpu_id(3): "xid-79"}
    practice.doctor.read([Reading(gpu_id(3), was_reset=True)])
    practice.judge()
    practice.clock.boottime_s += 59
    practice.again().scanned(practice.gpus)
    assert practice.sick() == {gpu_id(3): "xid-79"}
    assert practice.doctor.due_in_s() == 1.0
    practice.clock.boottime_s += 1
    assert practice.sick() == {}
    assert practice.doctor.due_in_s() is None


def test_each_change_is_one_line_one_count_and_one_entry(
    practice: Practice, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "deviceplugin")
    practice.judge()
    practice.doctor.xid(XidEvent(gpu_id(3), 48))
    for _ in range(3):
        practice.judge()
    practice.doctor.read([Reading(gpu_id(3), was_reset=True)])
    practice.judge()
    practice.clock.boottime_s += 60
    practice.judge()
    for event in (
        "GPU unhealthy, not offered any more",
        "GPU recovering",
        "GPU healthy again, offered again",
    ):
        assert len(logged(caplog, event)) == 1, event
    assert practice.stats.counts("health_transitions") == {
        (gpu_id(3), "Unhealthy"): 1,
        (gpu_id(3), "Healthy"): 1,
    }
    assert [(entry.was, entry.now) for entry in practice.book.ledger] == [
        ("healthy", "xid-48"),
        ("xid-48", "recovering"),
        ("recovering", "healthy"),
    ]


def test_a_driver_that_is_bound_anew_is_a_sign_of_a_reset(practice: Practice) -> None:
    practice.doctor.scanned(practice.gpus, {gpu_id(3): 7, gpu_id(4): 8})
    for number in (3, 4):
        practice.doctor.xid(XidEvent(gpu_id(number), 79))
    practice.doctor.scanned(practice.gpus, {gpu_id(3): 9, gpu_id(4): 8})
    practice.doctor.read([Reading(gpu_id(3)), Reading(gpu_id(4))])
    practice.judge()
    practice.clock.boottime_s += 60
    assert practice.sick() == {gpu_id(4): "xid-79"}


def test_a_storm_is_logged_once_a_minute_and_counted_always(
    practice: Practice, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(1000):
        practice.doctor.xid(XidEvent(gpu_id(3), 31))
    practice.judge()
    assert len(logged(caplog, "Xid error")) == 1
    assert practice.stats.counts("xid_errors") == {(gpu_id(3), "31", "report"): 1000}
    practice.clock.monotonic_s += 61
    practice.doctor.xid(XidEvent(gpu_id(3), 31))
    assert len(logged(caplog, "Xid error")) == 2


def test_the_blast_limit_is_said_loudly(
    practice: Practice, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(6):
        practice.doctor.xid(XidEvent(gpu_id(number), 48))
    said = practice.judge()
    assert len(practice.sick()) == 4
    assert sum(verdict.held is Held.LIMIT for verdict in said.values()) == 2
    assert practice.stats.gauges("verdicts_held") == {(): 2}
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 2


def test_an_observed_verdict_is_logged_and_entered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    practice = Practice(tmp_path, Policy(observe=frozenset({Source.XID})))
    practice.doctor.xid(XidEvent(gpu_id(3), 48))
    assert practice.sick() == {}
    assert len(logged(caplog, "GPU stays offered in spite of a fault")) == 1
    assert practice.book.ledger[-1].held == "observed only"
    practice.doctor.policy = Policy()
    assert practice.sick() == {gpu_id(3): "xid-48"}


@pytest.mark.parametrize(("code", "ask"), [(145, True), (154, True), (79, False), (31, False)])
def test_some_xids_ask_the_driver(practice: Practice, code: int, ask: bool) -> None:
    assert practice.doctor.xid(XidEvent(gpu_id(3), code)) is ask


@pytest.mark.parametrize(
    "event",
    [
        XidEvent(None, 79),
        XidEvent(GpuId("GPU-stranger"), 79),
        XidEvent(gpu_id(3), 79, gpu_instance=1, compute_instance=0),
    ],
)
def test_an_event_of_no_whole_gpu_of_ours_touches_nothing(
    practice: Practice, event: XidEvent
) -> None:
    assert not practice.doctor.xid(event)
    assert practice.sick() == {}


def test_an_alarm_with_a_fault_withdraws_and_any_asks_the_driver(practice: Practice) -> None:
    assert practice.doctor.alarm(Alarm(gpu_id(2)))
    assert practice.sick() == {}
    assert practice.doctor.alarm(Alarm(gpu_id(2), Fault("fatal-poison", "spread")))
    assert practice.sick() == {gpu_id(2): "fatal-poison"}
    assert not practice.doctor.alarm(Alarm(None, Fault("fatal-poison", "spread")))
    assert not practice.doctor.alarm(Alarm(GpuId("GPU-stranger")))
    assert practice.sick() == {gpu_id(2): "fatal-poison"}

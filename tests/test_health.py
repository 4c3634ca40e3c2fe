"""deviceplugin.health"""

from __future__ import annotations

from dataclasses import replace

import pytest

from deviceplugin import health, inventory
from deviceplugin.model import DriverInfo, Fault, Gpu, Health, HostFacts, Reading, Scan, XidEvent
from tests.builders import driver_gpu, gpu_id

WELL = health.healthy(1.0)
LOST = Fault("lost", "the driver says that the GPU is lost")


def a_gpu() -> Gpu:
    (gpu,) = inventory.merge(None, Scan(DriverInfo(), (driver_gpu(0),)), HostFacts(), 0.0).gpus
    return gpu


def xid(code: int) -> XidEvent:
    return XidEvent(gpu_id(0), code)


@pytest.mark.parametrize("code", [46, 48, 62, 64, 74, 79, 95, 109, 119, 120, 140, 142, 143, 155])
def test_an_xid_that_needs_a_reset_or_more_makes_the_gpu_unhealthy(code: int) -> None:
    verdict = health.on_xid(WELL, xid(code), 7.0)
    assert verdict.health is Health.UNHEALTHY
    assert verdict.reason == f"xid-{code}"
    assert verdict.since_s == 7.0


@pytest.mark.parametrize("code", [13, 14, 31, 43, 45, 63, 68, 92, 94, 108, 137, 154, 999])
def test_other_xids_leave_the_gpu_healthy(code: int) -> None:
    assert health.on_xid(WELL, xid(code), 7.0) is WELL


def test_the_first_reason_stays() -> None:
    verdict = health.on_xid(health.on_xid(WELL, xid(48), 7.0), xid(79), 8.0)
    assert (verdict.reason, verdict.since_s) == ("xid-48", 7.0)


def test_a_gpu_that_answers_is_no_evidence_against_an_xid() -> None:
    sick = health.on_xid(WELL, xid(79), 7.0)
    assert health.on_reading(sick, Reading(gpu_id(0)), 8.0) is sick


def test_a_reset_ends_an_xid() -> None:
    sick = health.on_xid(WELL, xid(79), 7.0)
    well = health.on_reading(sick, Reading(gpu_id(0), was_reset=True), 8.0)
    assert well == health.healthy(8.0)


def test_silence_and_an_answer_after_an_xid_are_a_sign_of_a_reset() -> None:
    sick = health.on_xid(WELL, xid(79), 7.0)
    silent = health.on_reading(sick, Reading(gpu_id(0), LOST), 8.0)
    assert (silent.reason, silent.since_s) == ("xid-79", 7.0)
    assert health.on_reading(silent, Reading(gpu_id(0)), 9.0) == health.healthy(9.0)


def test_a_lost_gpu_is_unhealthy_until_it_answers() -> None:
    silent = health.on_reading(WELL, Reading(gpu_id(0), LOST), 8.0)
    assert (silent.health, silent.reason) == (Health.UNHEALTHY, "lost")
    assert health.on_reading(silent, Reading(gpu_id(0)), 9.0) == health.healthy(9.0)


def test_a_gpu_that_the_driver_lists_no_more_is_absent_until_it_answers_again() -> None:
    absent = health.on_scan(WELL, replace(a_gpu(), gone_since_s=3.0), 8.0)
    assert (absent.health, absent.reason) == (Health.UNHEALTHY, "absent")
    assert absent.since_s == 3.0, "since it went, which may be before this process"
    listed = health.on_scan(absent, a_gpu(), 9.0)
    assert listed.health is Health.UNHEALTHY, "being listed is not yet an answer"
    assert health.on_reading(listed, Reading(gpu_id(0)), 10.0) == health.healthy(10.0)


def test_a_gpu_in_mig_mode_is_not_offered_until_it_leaves_it() -> None:
    gpu = a_gpu()
    split = health.on_scan(None, replace(gpu, mig_enabled=True), 1.0)
    assert (split.health, split.reason) == (Health.UNHEALTHY, "mig-mode")
    assert health.on_reading(split, Reading(gpu_id(0), was_reset=True), 2.0) is split
    assert health.on_scan(split, replace(gpu, mig_enabled=False), 3.0) == health.healthy(3.0)


def test_a_new_gpu_that_the_driver_calls_lost_starts_unhealthy() -> None:
    verdict = health.on_scan(None, replace(a_gpu(), fault=LOST), 1.0)
    assert (verdict.health, verdict.reason) == (Health.UNHEALTHY, "lost")


def test_a_scan_alone_never_makes_a_gpu_well() -> None:
    sick = health.on_xid(WELL, xid(79), 7.0)
    assert health.on_scan(sick, a_gpu(), 8.0) is sick

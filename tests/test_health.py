"""deviceplugin.health"""

from __future__ import annotations

from dataclasses import replace

import pytest

from deviceplugin import health, inventory
from deviceplugin.health import Policy, Record, judge, on_reading, on_scan, on_xid, tick
from deviceplugin.health.catalog import CATALOG, Effect
from deviceplugin.health.record import HOLD_DOWN_MAX_S, OBSERVABLE, Source
from deviceplugin.model import (
    DriverInfo,
    Fabric,
    Fault,
    Gpu,
    Health,
    Held,
    HostFacts,
    Maintenance,
    Reading,
    RecoveryAction,
    RowRemap,
    Scan,
    Stage,
    Verdict,
)
from tests.builders import driver_gpu, gpu_id

GPU = gpu_id(0)
WELL = health.new(1.0)
LOST = Fault("lost", "the driver says that the GPU is lost")
OK = Reading(GPU)
SILENT = Reading(GPU, LOST)
RESET = Reading(GPU, was_reset=True)
POLICY = Policy(hold_down_s=60.0)
OBSERVE = Policy(observe=frozenset(OBSERVABLE))


def a_gpu() -> Gpu:
    (gpu,) = inventory.merge(None, Scan(DriverInfo(), (driver_gpu(0),)), HostFacts(), 0.0).gpus
    return gpu


def verdict(record: Record, policy: Policy = POLICY) -> Verdict:
    """Of a GPU that may be withdrawn."""
    (braked,) = health.brake({GPU: record}, policy, 0.0).values()
    return judge(braked, policy)


def reason(record: Record) -> str:
    return verdict(record).reason


# --- Xids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [*CATALOG, 999])
def test_an_xid_withdraws_the_gpu_if_that_is_its_effect(code: int) -> None:
    record = on_xid(WELL, code, 7.0, POLICY)
    if POLICY.effect(code) is Effect.UNHEALTHY:
        said = verdict(record)
        assert (said.health, said.reason, said.since_s) == (Health.UNHEALTHY, f"xid-{code}", 7.0)
    else:
        assert verdict(record).health is Health.HEALTHY
        assert record.cases == ()


def test_single_codes_and_unknown_ones_can_be_set() -> None:
    policy = Policy(xids={94: Effect.UNHEALTHY, 79: Effect.REPORT}, unknown_xid=Effect.UNHEALTHY)
    assert on_xid(WELL, 94, 7.0, policy).cases
    assert not on_xid(WELL, 79, 7.0, policy).cases
    assert on_xid(WELL, 999, 7.0, policy).cases
    assert not on_xid(WELL, 31, 7.0, policy).cases


def test_the_first_reason_stays() -> None:
    record = on_xid(on_xid(WELL, 48, 7.0, POLICY), 79, 8.0, POLICY)
    assert (reason(record), verdict(record).since_s) == ("xid-48", 7.0)


def test_power_smoothing_that_works_again_ends_what_its_failure_began() -> None:
    policy = Policy(xids={163: Effect.UNHEALTHY}, hold_down_s=0.0)
    record = on_xid(WELL, 163, 7.0, policy)
    assert verdict(record, policy).reason == "xid-163"
    assert verdict(on_xid(record, 162, 8.0, policy), policy).health is Health.HEALTHY


def test_a_45_soon_after_another_follows_it() -> None:
    record = on_xid(WELL, 31, 7.0, POLICY)
    assert health.follows(record, 45, 17.0) == 31
    assert health.follows(record, 45, 17.1) is None
    assert health.follows(WELL, 45, 7.0) is None
    assert health.follows(record, 13, 8.0) is None
    assert on_xid(record, 45, 8.0, POLICY).last_xid == (31, 7.0)


# --- the way back --------------------------------------------------------------------------------


def test_a_gpu_that_answers_is_no_evidence_against_an_xid() -> None:
    sick = on_xid(WELL, 79, 7.0, POLICY)
    assert on_reading(sick, OK, 8.0, POLICY) is sick


@pytest.mark.parametrize("signs", [(RESET,), (SILENT, OK), (SILENT, SILENT, OK)])
def test_a_sign_of_a_reset_begins_the_hold_down_and_time_ends_it(
    signs: tuple[Reading, ...],
) -> None:
    record = on_xid(WELL, 48, 7.0, POLICY)
    for sign in signs:
        record = on_reading(record, sign, 8.0, POLICY)
    said = verdict(record)
    assert (said.health, said.stage, said.reason) == (
        Health.UNHEALTHY,
        Stage.RECOVERING,
        "lost" if len(signs) > 1 and said.reason == "lost" else "xid-48",
    )
    assert health.due_s(record) == 68.0
    assert verdict(tick(record, 67.9)).health is Health.UNHEALTHY
    well = verdict(tick(record, 68.0))
    assert (well.health, well.reason, well.since_s) == (Health.HEALTHY, "", 68.0)


def test_silence_does_not_take_the_first_reasons_place() -> None:
    silent = on_reading(on_xid(WELL, 79, 7.0, POLICY), SILENT, 8.0, POLICY)
    assert (reason(silent), verdict(silent).since_s) == ("xid-79", 7.0)


def test_a_lost_gpu_is_unhealthy_until_it_answers() -> None:
    silent = on_reading(WELL, SILENT, 8.0, POLICY)
    assert reason(silent) == "lost"
    assert on_reading(silent, OK, 9.0, POLICY).stage is Stage.RECOVERING


@pytest.mark.parametrize("code", [64])
def test_some_faults_end_with_a_new_boot_only(code: int) -> None:
    record = on_xid(WELL, code, 7.0, POLICY)
    for reading in (RESET, SILENT, OK):
        record = on_reading(record, reading, 8.0, POLICY)
    assert reason(record) == f"xid-{code}"
    assert verdict(health.after_boot(record, 5.0, -100.0)).health is Health.HEALTHY


def test_a_relapse_doubles_the_hold_down_up_to_its_cap() -> None:
    record, now_s, holds = WELL, 10.0, []
    for _ in range(9):
        record = on_xid(record, 48, now_s, POLICY)
        record = on_reading(record, RESET, now_s + 1, POLICY)
        holds.append(record.hold_down_s)
        now_s += 1 + record.hold_down_s
        record = tick(record, now_s)
    assert holds == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    assert max(holds) == HOLD_DOWN_MAX_S
    later = on_xid(record, 48, now_s + 3601, POLICY)
    assert later.hold_down_s == 60, "an hour of health makes it a first fault again"


def test_a_fault_while_it_recovers_begins_anew() -> None:
    record = on_reading(on_xid(WELL, 48, 7.0, POLICY), RESET, 8.0, POLICY)
    record = on_xid(record, 119, 20.0, POLICY)
    assert (record.stage, reason(record), record.hold_down_s) == (
        Stage.UNHEALTHY,
        "xid-119",
        120.0,
    )
    assert tick(record, 1000.0) is record


# --- what the driver tells when it is asked ---------------------------------------------------


@pytest.mark.parametrize("action", RecoveryAction)
def test_any_recovery_action_but_none_is_unhealthy(action: RecoveryAction) -> None:
    record = on_reading(WELL, replace(OK, action=action), 8.0, POLICY)
    if action is RecoveryAction.NONE:
        assert record is WELL
        return
    assert reason(record) == f"recovery-{action.value}"
    assert on_reading(record, OK, 9.0, POLICY) is record, "not told is not none"
    over = on_reading(record, replace(OK, action=RecoveryAction.NONE), 9.0, POLICY)
    assert over.stage is Stage.RECOVERING


def test_an_action_that_turns_into_another_one_is_named() -> None:
    record = on_reading(WELL, replace(OK, action=RecoveryAction.DRAIN_P2P), 8.0, POLICY)
    record = on_reading(record, replace(OK, action=RecoveryAction.GPU_RESET), 9.0, POLICY)
    assert [case.reason for case in record.cases] == ["recovery-gpu-reset"]


def test_rows_that_wait_for_a_reset_are_no_fault_and_a_failed_remap_is_for_good() -> None:
    pending = replace(OK, remap=RowRemap(pending=True, failed=False))
    assert on_reading(WELL, pending, 8.0, POLICY) is WELL
    failed = on_reading(WELL, replace(OK, remap=RowRemap(False, failed=True)), 8.0, POLICY)
    assert reason(failed) == "row-remap-failure"
    assert reason(on_reading(failed, RESET, 9.0, POLICY)) == "row-remap-failure"


@pytest.mark.parametrize("fabric", Fabric)
def test_a_fabric_that_is_not_complete_is_unhealthy_until_it_is(fabric: Fabric) -> None:
    record = on_reading(WELL, replace(OK, fabric=fabric), 8.0, POLICY)
    if fabric is Fabric.COMPLETED:
        assert record is WELL
        return
    assert reason(record) == "fabric"
    done = on_reading(record, replace(OK, fabric=Fabric.COMPLETED), 9.0, POLICY)
    assert verdict(done).health is Health.HEALTHY, "it was not at fault"


def test_uncorrected_errors_alone_are_no_verdict() -> None:
    assert on_reading(WELL, replace(OK, uncorrected_errors=7), 8.0, POLICY) is WELL


def test_low_clocks_alone_are_no_verdict() -> None:
    hot = replace(OK, throttled_by=("temperature", "power brake"))
    assert on_reading(WELL, hot, 8.0, POLICY) is WELL


def test_what_was_logged_before_a_gpu_was_known_to_be_good_is_history() -> None:
    assert health.on_logged(WELL, 79, 1.0, POLICY) is WELL
    sick = health.on_logged(WELL, 79, 1.1, POLICY)
    assert (reason(sick), sick.cases[0].source) == ("xid-79", Source.KERNEL_LOG)
    again = on_xid(WELL, 79, 7.0, POLICY)
    assert health.on_logged(again, 79, 7.0, POLICY).cases == again.cases, "it was told before"
    recovering = on_reading(again, RESET, 9.0, POLICY)
    assert health.on_logged(recovering, 79, 7.0, POLICY) is recovering
    assert reason(health.on_logged(recovering, 79, 9.5, POLICY)) == "xid-79"


def test_an_event_that_asks_for_a_reset_ends_with_one() -> None:
    record = health.on_event(WELL, Fault("poison", "fatal poison"), 7.0, POLICY)
    assert reason(on_reading(record, OK, 8.0, POLICY)) == "poison"
    assert on_reading(record, RESET, 8.0, POLICY).stage is Stage.RECOVERING


# --- the list ---------------------------------------------------------------------------------


def test_a_gpu_that_the_driver_lists_no_more_is_absent_until_it_answers_again() -> None:
    absent = on_scan(WELL, replace(a_gpu(), gone_since_s=3.0), 8.0, POLICY)
    assert reason(absent) == "absent"
    assert verdict(absent).since_s == 3.0, "since it went, which may be before this process"
    listed = on_scan(absent, a_gpu(), 9.0, POLICY)
    assert reason(listed) == "absent", "being listed is not yet an answer"
    assert on_reading(listed, OK, 10.0, POLICY).stage is Stage.RECOVERING


def test_a_gpu_that_could_not_be_looked_for_has_nothing_to_prove() -> None:
    absent = health.on_missing(None, Fault("absent", "no driver yet"), 3.0, POLICY)
    assert reason(absent) == "absent"
    seen = on_reading(on_scan(absent, a_gpu(), 9.0, POLICY), OK, 10.0, POLICY)
    assert verdict(seen) == Verdict(Health.HEALTHY, "", "", 10.0)


def test_a_gpu_in_mig_mode_is_not_offered_until_it_leaves_it() -> None:
    gpu = a_gpu()
    split = on_scan(None, replace(gpu, mig_enabled=True), 1.0, POLICY)
    assert reason(split) == "mig-mode"
    assert on_reading(split, RESET, 2.0, POLICY) is split
    whole = on_scan(split, replace(gpu, mig_enabled=False), 3.0, POLICY)
    assert verdict(whole) == Verdict(Health.HEALTHY, "", "", 3.0)


def test_a_new_gpu_that_the_driver_calls_lost_starts_unhealthy() -> None:
    assert reason(on_scan(None, replace(a_gpu(), fault=LOST), 1.0, POLICY)) == "lost"


def test_a_scan_alone_never_makes_a_gpu_well() -> None:
    sick = on_xid(WELL, 79, 7.0, POLICY)
    assert on_scan(sick, a_gpu(), 8.0, POLICY) is sick


def test_in_maintenance_nothing_counts_and_afterwards_it_is_as_new() -> None:
    held = on_scan(
        on_xid(WELL, 79, 7.0, POLICY),
        replace(a_gpu(), maintenance=Maintenance("riser", 8.0)),
        8.0,
        POLICY,
    )
    assert (reason(held), verdict(held).detail) == ("maintenance", "riser")
    assert on_xid(held, 48, 9.0, POLICY) is held
    assert on_reading(held, SILENT, 9.0, POLICY) is held
    assert health.on_event(held, LOST, 9.0, POLICY) is held
    assert health.on_word(held, True, "", 9.0, None) is held
    assert verdict(on_scan(held, a_gpu(), 10.0, POLICY)) == Verdict(Health.HEALTHY, "", "", 10.0)


def test_silence_of_the_driver_says_least_and_ends_with_an_answer() -> None:
    lost = health.on_silence(WELL, "it hangs", 7.0)
    assert reason(lost) == "monitoring-lost"
    assert reason(on_xid(lost, 79, 8.0, POLICY)) == "xid-79"
    assert verdict(on_reading(lost, OK, 8.0, POLICY)) == Verdict(Health.HEALTHY, "", "", 8.0)
    sick = on_xid(WELL, 79, 7.0, POLICY)
    assert health.on_silence(sick, "it hangs", 8.0) is sick


# --- the operator's word ----------------------------------------------------------------------


def test_an_operator_can_say_that_a_gpu_is_well() -> None:
    sick = on_xid(WELL, 64, 7.0, POLICY)
    well = health.on_word(sick, True, "new board", 8.0, None)
    assert verdict(well) == Verdict(Health.HEALTHY, "", "", 8.0)
    assert reason(on_xid(well, 79, 9.0, POLICY)) == "xid-79", "new faults count"


def test_for_a_time_an_operator_wants_a_gpu_offered_whatever_is_heard() -> None:
    well = health.on_word(WELL, True, "test", 8.0, until_s=100.0)
    sick = on_xid(well, 79, 9.0, POLICY)
    said = verdict(sick)
    assert (said.health, said.held, said.reason) == (Health.HEALTHY, Held.EXCUSED, "xid-79")
    assert verdict(tick(sick, 100.0)).health is Health.UNHEALTHY
    gone = on_scan(sick, replace(a_gpu(), gone_since_s=10.0), 11.0, POLICY)
    assert verdict(gone).health is Health.UNHEALTHY, "what is not there cannot be offered"


def test_an_operator_can_say_that_a_gpu_is_not_well_until_he_takes_it_back() -> None:
    sick = health.on_word(WELL, False, "smells", 8.0, None)
    assert (reason(sick), verdict(sick).detail) == ("operator", "smells")
    assert on_reading(sick, RESET, 9.0, POLICY) is sick
    assert verdict(health.on_clear(sick, 10.0)) == Verdict(Health.HEALTHY, "", "", 10.0)
    assert verdict(sick, OBSERVE).health is Health.UNHEALTHY, "his word is meant"
    assert reason(health.after_boot(sick, 5.0, -100.0)) == "operator"
    timed = health.on_word(WELL, False, "", 8.0, until_s=20.0)
    assert verdict(tick(timed, 20.0)).health is Health.HEALTHY


# --- observing --------------------------------------------------------------------------------


def test_an_observed_source_is_shown_and_withdraws_nothing() -> None:
    sick = on_xid(WELL, 48, 7.0, POLICY)
    for policy in (OBSERVE, Policy(observe=frozenset({Source.XID}))):
        said = verdict(sick, policy)
        assert (said.health, said.held, said.reason) == (Health.HEALTHY, Held.OBSERVED, "xid-48")
    assert verdict(sick, Policy(observe=frozenset({Source.FABRIC}))).health is Health.UNHEALTHY
    lost = on_reading(sick, SILENT, 8.0, POLICY)
    assert verdict(lost, Policy(observe=frozenset({Source.XID}))).reason == "lost"

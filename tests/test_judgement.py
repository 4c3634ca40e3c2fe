"""deviceplugin.health.judgement: the blast limit, and what no sequence of events can do"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deviceplugin import health
from deviceplugin.health import Policy, Record, brake, judge, on_reading, on_xid, tick
from deviceplugin.health.judgement import WINDOW_S
from deviceplugin.health.record import OBSERVABLE
from deviceplugin.model import Fabric, Fault, GpuId, Health, Held, Reading, RecoveryAction, Verdict
from tests.builders import gpu_id

POLICY = Policy(hold_down_s=60.0)
LOST = Fault("lost", "silent")
EIGHT = tuple(gpu_id(number) for number in range(8))


class Node:
    """Records as the doctor keeps them."""

    def __init__(self, policy: Policy = POLICY, gpus: tuple[GpuId, ...] = EIGHT) -> None:
        self.policy = policy
        self.now_s = 1000.0
        self.records: dict[GpuId, Record] = {gpu: health.new(self.now_s) for gpu in gpus}

    def xid(self, *numbers: int, code: int = 48) -> None:
        for number in numbers:
            gpu = gpu_id(number)
            self.records[gpu] = on_xid(self.records[gpu], code, self.now_s, self.policy)

    def read(self, number: int, **facts: object) -> None:
        gpu = gpu_id(number)
        reading = replace(Reading(gpu), **facts)  # type: ignore[arg-type] # fields of Reading
        self.records[gpu] = on_reading(self.records[gpu], reading, self.now_s, self.policy)

    def judge(self) -> dict[GpuId, Verdict]:
        ticked = {gpu: tick(record, self.now_s) for gpu, record in self.records.items()}
        self.records = dict(brake(ticked, self.policy, self.now_s))
        return {gpu: judge(record, self.policy) for gpu, record in self.records.items()}

    def counts(self) -> tuple[int, int]:
        """How many are withdrawn, and how many are held."""
        said = self.judge().values()
        return (
            sum(verdict.health is Health.UNHEALTHY for verdict in said),
            sum(verdict.held is Held.LIMIT for verdict in said),
        )


def test_of_six_that_turn_bad_at_once_half_of_the_node_is_withdrawn_and_the_rest_is_held() -> None:
    node = Node()
    node.xid(0, 1, 2, 3, 4, 5)
    assert node.counts() == (4, 2)
    assert node.counts() == (4, 2), "judging again changes nothing"


def test_those_that_were_sick_first_are_withdrawn_first() -> None:
    node = Node(Policy(max_unhealthy=1))
    node.xid(5)
    node.now_s += 1
    node.xid(2)
    sick = [gpu for gpu, said in node.judge().items() if said.health is Health.UNHEALTHY]
    assert sick == [gpu_id(5)]


def test_when_the_window_has_room_what_is_held_is_withdrawn() -> None:
    node = Node()
    node.xid(0, 1, 2, 3, 4, 5)
    node.judge()
    node.now_s += WINDOW_S
    assert node.counts() == (6, 0)


def test_a_gpu_that_comes_back_within_the_window_makes_no_room() -> None:
    node = Node(Policy(hold_down_s=0.0, max_unhealthy=1))
    node.xid(0)
    assert node.counts() == (1, 0)
    node.read(0, was_reset=True)
    assert node.counts() == (0, 0)
    node.xid(1)
    assert node.counts() == (0, 1)
    node.xid(0)
    assert node.counts() == (1, 1), "it is counted in this window already"


def test_facts_are_not_limited() -> None:
    node = Node(Policy(max_unhealthy=0))
    node.xid(0, code=79)
    node.read(1, fault=LOST)
    node.read(2, fabric=Fabric.IN_PROGRESS)
    word = health.on_word(node.records[gpu_id(3)], False, "mine", node.now_s, None)
    node.records[gpu_id(3)] = word
    node.xid(4)
    node.read(5, action=RecoveryAction.GPU_RESET)
    assert node.counts() == (4, 2)


@pytest.mark.parametrize(("gpus", "limit"), [(1, 1), (2, 1), (3, 1), (8, 4), (16, 8)])
def test_the_limit_is_half_of_the_node_and_at_least_one(gpus: int, limit: int) -> None:
    assert POLICY.limit(gpus) == limit
    assert Policy(max_unhealthy=0).limit(gpus) == 0


def test_a_gpu_that_recovers_stays_withdrawn_until_it_has() -> None:
    node = Node()
    node.xid(0)
    node.judge()
    node.read(0, was_reset=True)
    node.now_s += 59
    assert node.counts() == (1, 0)
    node.now_s += 1
    assert node.counts() == (0, 0)


# --- any sequence -------------------------------------------------------------------------------

LIMITED_XIDS = [46, 48, 64, 95, 109, 119, 143]
_numbers = st.integers(0, 7)
_steps = st.one_of(
    st.tuples(st.just("xid"), _numbers, st.sampled_from([13, 31, 45, 94, 154, *LIMITED_XIDS])),
    st.tuples(st.just("reset"), _numbers, st.just(0)),
    st.tuples(st.just("ok"), _numbers, st.just(0)),
    st.tuples(st.just("action"), _numbers, st.sampled_from([*RecoveryAction])),
    st.tuples(st.just("wait"), st.just(0), st.sampled_from([0.1, 10, 61, 300, 700, 4000])),
)


def do(node: Node, step: tuple[str, int, object]) -> None:
    match step:
        case ("xid", number, int(code)):
            node.xid(number, code=code)
        case ("reset", number, _):
            node.read(number, was_reset=True)
        case ("ok", number, _):
            node.read(number)
        case ("action", number, action):
            node.read(number, action=action)
        case ("wait", _, int() | float() as seconds):
            node.now_s += seconds


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(_steps, max_size=60), limit=st.integers(0, 8))
def test_no_sequence_passes_the_blast_limit(
    steps: list[tuple[str, int, object]], limit: int
) -> None:
    node = Node(Policy(hold_down_s=60.0, max_unhealthy=limit))
    withdrawn: dict[GpuId, float] = {}
    before: set[GpuId] = set()
    for step in steps:
        do(node, step)
        sick = {gpu for gpu, said in node.judge().items() if said.health is Health.UNHEALTHY}
        for gpu in sick - before:
            if node.now_s - withdrawn.get(gpu, -WINDOW_S) >= WINDOW_S:
                withdrawn[gpu] = node.now_s
        recent = [at_s for at_s in withdrawn.values() if node.now_s - at_s < WINDOW_S]
        assert len(recent) <= limit
        before = sick


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(_steps, max_size=60))
def test_nothing_turns_healthy_without_its_evidence(steps: list[tuple[str, int, object]]) -> None:
    node = Node(Policy(hold_down_s=60.0, max_unhealthy=8))
    node.judge()
    needs_reset: dict[GpuId, bool] = {}
    evidence_s: dict[GpuId, float] = {}
    for step in steps:
        do(node, step)
        kind, number, what = step
        gpu = gpu_id(number)
        if kind == "xid" and what in LIMITED_XIDS:
            needs_reset[gpu] = True
            evidence_s.pop(gpu, None)
        if kind == "reset" and needs_reset.get(gpu):
            evidence_s[gpu] = node.now_s
            needs_reset[gpu] = False
        for each, said in node.judge().items():
            if said.health is Health.HEALTHY:
                assert not needs_reset.get(each), f"{each} needs a reset"
                if each in evidence_s:
                    assert node.now_s - evidence_s[each] >= 60.0
                    del evidence_s[each]


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(_steps, max_size=40))
def test_one_gpus_events_never_change_another_ones_verdict(
    steps: list[tuple[str, int, object]],
) -> None:
    both = Node(Policy(max_unhealthy=8))
    alone = Node(Policy(max_unhealthy=8))
    for step in steps:
        do(both, step)
        if step[0] == "wait" or step[1] == 0:
            do(alone, step)
        assert both.judge()[gpu_id(0)] == alone.judge()[gpu_id(0)]


@settings(max_examples=100, deadline=None)
@given(steps=st.lists(_steps, max_size=40))
def test_in_observe_mode_nothing_is_withdrawn(steps: list[tuple[str, int, object]]) -> None:
    node = Node(Policy(observe=frozenset(OBSERVABLE)))
    for step in steps:
        do(node, step)
        assert node.counts() == (0, 0)

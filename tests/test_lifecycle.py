"""deviceplugin.lifecycle"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deviceplugin import lifecycle as lc
from deviceplugin.lifecycle import Phase, SocketId, State

KUBELET = SocketId(1, 10, 1000)
NEXT_KUBELET = SocketId(1, 10, 2000)  # the same inode number, used again
HALF = 0.5


def run(events: Iterable[lc.Event], state: State | None = None, now_s: float = 0.0) -> lc.Step:
    """All events at one moment; the last state and the actions of the last event."""
    state = state or State()
    actions: tuple[lc.Action, ...] = ()
    for event in events:
        state, actions = lc.step(state, event, now_s, HALF)
    return state, actions


READY: list[lc.Event] = [lc.KubeletSocket(KUBELET), lc.Publishable(), lc.ServerStarted(1)]
REGISTERED: list[lc.Event] = [*READY, lc.RegisterAnswered(1, None), lc.Streams(1, 1)]


def test_nothing_is_served_before_there_is_something_to_publish() -> None:
    assert run([lc.KubeletSocket(KUBELET)])[1] == ()
    assert run([lc.KubeletSocket(KUBELET), lc.Publishable()])[1] == (lc.StartServer(1),)


def test_without_a_kubelet_the_server_waits_for_its_socket() -> None:
    state, _ = run([lc.Publishable()])
    assert state.phase is Phase.NO_KUBELET
    state, actions = run([lc.KubeletSocket(KUBELET)], state)
    assert actions == (lc.StartServer(1),)
    assert state.restarts == 0, "a first kubelet is no restart"


def test_the_server_serves_before_it_registers() -> None:
    assert run(READY[:2])[1] == (lc.StartServer(1),)
    assert run(READY)[1] == (lc.Register(1),)


def test_registered_means_that_a_stream_is_open() -> None:
    state, _ = run([*READY, lc.RegisterAnswered(1, None)])
    assert state.phase is Phase.AWAITING_STREAM
    state, actions = run([lc.Streams(1, 1)], state)
    assert state.phase is Phase.REGISTERED
    assert actions == (lc.Report("registered"),)


def test_the_stream_may_come_before_the_answer() -> None:
    state, _ = run([*READY, lc.Streams(1, 1), lc.RegisterAnswered(1, None)])
    assert state.phase is Phase.REGISTERED


def test_a_kubelet_that_listens_although_the_answer_was_lost_is_enough() -> None:
    state, _ = run([*READY, lc.Streams(1, 1), lc.RegisterAnswered(1, "timed out")])
    assert state.phase is Phase.REGISTERED


def test_a_kubelet_that_never_opens_the_stream_is_registered_with_again() -> None:
    state, _ = run([*READY, lc.RegisterAnswered(1, None)])
    assert run([lc.Tick()], state, lc.STREAM_WITHIN_S - 0.1)[0].phase is Phase.AWAITING_STREAM
    state, actions = run([lc.Tick()], state, lc.STREAM_WITHIN_S)
    assert actions[0] == lc.StopServer(1)
    assert state.phase is Phase.BACKING_OFF


def test_the_old_server_is_stopped_before_the_next_one_starts() -> None:
    state, actions = run([*REGISTERED, lc.KubeletSocket(NEXT_KUBELET)])
    assert actions == (lc.Report("kubelet restarted"), lc.StopServer(1), lc.StartServer(2))
    assert state.restarts == 1


def test_the_same_socket_seen_twice_is_no_restart() -> None:
    assert run([*REGISTERED, lc.KubeletSocket(KUBELET)])[1] == ()


def test_a_lost_stream_is_followed_by_a_new_registration_after_a_short_while() -> None:
    state, actions = run([*REGISTERED, lc.Streams(1, 0)])
    assert actions[0] == lc.StopServer(1)
    assert state.phase is Phase.BACKING_OFF
    assert state.due_s == lc.BACK_OFF_FIRST_S
    assert run([lc.Tick()], state, lc.BACK_OFF_FIRST_S)[1] == (lc.StartServer(2),)


def test_one_stream_of_two_that_ends_changes_nothing() -> None:
    assert run([*REGISTERED, lc.Streams(1, 2), lc.Streams(1, 1)])[1] == ()


def test_a_new_kubelet_socket_cuts_the_back_off_short() -> None:
    state, _ = run([*READY, lc.RegisterAnswered(1, "refused")])
    assert state.phase is Phase.BACKING_OFF
    state, actions = run([lc.KubeletSocket(NEXT_KUBELET)], state)
    assert actions == (lc.Report("kubelet restarted"), lc.StartServer(2))
    assert state.failures == 0


def test_the_back_off_doubles_up_to_its_cap_and_goes_on() -> None:
    state, now_s, waits = run(READY)[0], 0.0, []
    for _ in range(12):
        number = state.incarnation
        state, _ = run([lc.RegisterAnswered(number, "refused")], state, now_s)
        assert state.due_s is not None
        waits.append(round(state.due_s - now_s, 6))
        now_s = state.due_s
        state, actions = run([lc.Tick()], state, now_s)
        assert actions == (lc.StartServer(number + 1),)
        state, _ = run([lc.ServerStarted(number + 1)], state, now_s)
    assert waits[:6] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
    assert set(waits[6:]) == {lc.BACK_OFF_MAX_S}


@pytest.mark.parametrize(("dice", "wait_s"), [(0.0, 0.2), (0.999999, 0.3)])
def test_back_off_has_jitter_of_a_fifth_either_way(dice: float, wait_s: float) -> None:
    state, _ = run(READY)
    state, _ = lc.step(state, lc.RegisterAnswered(1, "refused"), 0.0, dice)
    assert state.due_s == pytest.approx(wait_s, abs=1e-6)


def test_only_a_stream_that_lasted_ends_the_memory_of_failures() -> None:
    state = State(Phase.REGISTERED, KUBELET, incarnation=1, failures=4, streaming_since_s=0.0)
    brief, _ = run([lc.Streams(1, 0)], state, lc.SETTLED_AFTER_S - 0.1)
    assert brief.failures == 5
    lasting, _ = run([lc.Streams(1, 0)], state, lc.SETTLED_AFTER_S)
    assert lasting.failures == 1


def test_the_loss_of_our_socket_waits_for_the_kubelet_that_wiped_it() -> None:
    state, actions = run([*REGISTERED, lc.OwnSocketGone(1)])
    assert actions == ()
    wiped, actions = run([lc.KubeletSocket(NEXT_KUBELET)], state, 0.01)
    assert actions == (lc.Report("kubelet restarted"), lc.StopServer(1), lc.StartServer(2))
    assert wiped.due_s is None
    alone, actions = run([lc.Tick()], state, lc.WIPED_GRACE_S)
    assert actions[0] == lc.StopServer(1)
    assert alone.phase is Phase.BACKING_OFF


def test_a_kubelet_that_listens_is_kept_although_its_socket_file_is_gone() -> None:
    state, actions = run([*REGISTERED, lc.KubeletSocket(None)])
    assert state.phase is Phase.REGISTERED
    assert actions == (lc.Report("kubelet.sock gone"),)


def test_a_server_that_cannot_be_made_is_tried_again() -> None:
    state, actions = run([*READY[:2], lc.ServerFailed(1, "no space")])
    assert actions == (lc.StopServer(1), lc.Report("not registered", "no space", 0.25))
    assert run([lc.Tick()], state, 1.0)[1] == (lc.StartServer(2),)


@pytest.mark.parametrize(
    "event",
    [
        lc.ServerStarted(1),
        lc.ServerFailed(1, "x"),
        lc.OwnSocketGone(1),
        lc.RegisterAnswered(1, "x"),
        lc.Streams(1, 0),
    ],
)
def test_news_of_an_earlier_incarnation_changes_nothing(event: lc.Event) -> None:
    state, _ = run([*REGISTERED, lc.KubeletSocket(NEXT_KUBELET), lc.ServerStarted(2)])
    assert run([event], state) == (state, ())


def test_stop_ends_everything_and_nothing_begins_after_it() -> None:
    state, actions = run([*REGISTERED, lc.Stop()])
    assert actions == (lc.StopServer(1), lc.Exit())
    assert run([lc.KubeletSocket(NEXT_KUBELET), lc.Publishable(), lc.Tick()], state) == (state, ())


def test_while_another_plugin_serves_nothing_is_begun() -> None:
    state, actions = run([lc.Owned("pod a"), lc.KubeletSocket(KUBELET), lc.Publishable()])
    assert state.phase is Phase.OWNED_BY_OTHER
    assert actions == (lc.Report("owned by another", "pod a"),)
    assert run([lc.KubeletSocket(NEXT_KUBELET)], state)[1] == ()


def test_when_the_other_plugin_is_gone_it_is_taken_over() -> None:
    state, _ = run([lc.Owned("pod a"), lc.KubeletSocket(KUBELET), lc.Publishable()])
    assert run([lc.Owned(None)], state)[1] == (lc.StartServer(1),)


def test_a_lock_that_is_lost_to_another_plugin_ends_the_server() -> None:
    state, actions = run([*REGISTERED, lc.Owned("pod b")])
    assert actions == (lc.StopServer(1), lc.Report("owned by another", "pod b"))
    assert state.phase is Phase.OWNED_BY_OTHER


class World(RuleBasedStateMachine):
    """Any sequence of events, with a model of what the agent and a kubelet do.

    The kubelet may be down, refuse, forget to open the stream or drop it; our
    socket may vanish. Whatever happened: once it behaves, time alone leads to
    a registered plugin.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = State()
        self.now_s = 0.0
        self.kubelet: SocketId | None = None
        self.kubelets = 0
        self.server: int | None = None
        self.calls: list[int] = []
        self.streams = 0
        self.used: set[int] = set()
        self.exited = False

    def tell(self, event: lc.Event, dice: float = HALF) -> None:
        self.state, actions = lc.step(self.state, event, self.now_s, dice)
        for action in actions:
            match action:
                case lc.StartServer(incarnation=number):
                    assert self.server is None, "two live servers"
                    assert number not in self.used, "an incarnation used twice"
                    self.used.add(number)
                    self.server, self.streams = number, 0
                case lc.StopServer():
                    self.server, self.streams, self.calls = None, 0, []
                case lc.Register(incarnation=number):
                    assert number == self.server, "registers a server that does not run"
                    assert not self.calls, "two registrations of one incarnation"
                    self.calls.append(number)
                case lc.Report(retry_in_s=float(wait)):
                    assert wait <= lc.BACK_OFF_MAX_S * 1.2
                case lc.Exit():
                    assert self.server is None
                    self.exited = True

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 6.0, 20.0]), dice=st.floats(0, 0.99))
    def time_passes(self, seconds: float, dice: float) -> None:
        self.now_s += seconds
        self.tell(lc.Tick(), dice)

    @rule()
    def gpus_are_found(self) -> None:
        self.tell(lc.Publishable())

    @rule()
    def a_kubelet_starts(self) -> None:
        self.kubelets += 1
        self.kubelet = SocketId(1, 10, self.kubelets)
        self.tell(lc.KubeletSocket(self.kubelet))

    @rule()
    def kubelet_sock_is_deleted(self) -> None:
        self.kubelet = None
        self.tell(lc.KubeletSocket(None))

    @rule(owner=st.sampled_from([None, "pod a", "pod b"]))
    def the_lock_is_looked_at(self, owner: str | None) -> None:
        self.tell(lc.Owned(owner))

    @precondition(lambda self: self.state.phase is Phase.STARTING)
    @rule(works=st.booleans())
    def the_server_starts(self, works: bool) -> None:
        number = self.state.incarnation
        self.tell(lc.ServerStarted(number) if works else lc.ServerFailed(number, "no space"))

    @precondition(lambda self: self.calls)
    @rule(why=st.sampled_from([None, "refused", "timed out"]))
    def the_kubelet_answers(self, why: str | None) -> None:
        self.tell(lc.RegisterAnswered(self.calls.pop(), why))

    @precondition(lambda self: self.server is not None)
    @rule(change=st.sampled_from([-1, 1]))
    def a_stream_opens_or_ends(self, change: int) -> None:
        self.streams = max(0, self.streams + change)
        self.tell(lc.Streams(self.state.incarnation, self.streams))

    @precondition(lambda self: self.server is not None)
    @rule()
    def our_socket_vanishes(self) -> None:
        self.tell(lc.OwnSocketGone(self.state.incarnation))

    @rule(number=st.integers(0, 5))
    def late_news_of_an_old_server_arrives(self, number: int) -> None:
        if number < self.state.incarnation:
            self.tell(lc.Streams(number, 0))
            self.tell(lc.RegisterAnswered(number, "late"))

    @invariant()
    def a_running_server_is_the_states_own(self) -> None:
        assert (self.server is not None) == self.state.serving

    @invariant()
    def nothing_is_served_while_another_plugin_does(self) -> None:
        assert self.state.owner is None or self.server is None

    @invariant()
    def registered_means_a_stream(self) -> None:
        if self.state.phase is Phase.REGISTERED:
            assert self.streams > 0

    def teardown(self) -> None:
        """A well-behaved kubelet and time: it ends up registered, soon."""
        self.gpus_are_found()
        self.tell(lc.Owned(None))
        if self.kubelet is None:
            self.a_kubelet_starts()
        for _ in range(60):
            if self.state.phase is Phase.STARTING:
                self.tell(lc.ServerStarted(self.state.incarnation))
            elif self.calls:
                self.tell(lc.RegisterAnswered(self.calls.pop(), None))
            elif self.state.phase is Phase.AWAITING_STREAM:
                self.streams = 1
                self.tell(lc.Streams(self.state.incarnation, 1))
            elif self.state.phase is Phase.REGISTERED and self.state.due_s is None:
                break
            else:
                self.now_s += 1.0
                self.tell(lc.Tick())
        assert self.state.phase is Phase.REGISTERED
        self.tell(lc.Stop())
        assert self.exited


World.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnySequenceOfEvents = World.TestCase

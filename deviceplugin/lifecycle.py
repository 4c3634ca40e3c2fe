"""When to serve, register, back off, start over and stop: decided here, done elsewhere.

``step(state, event, now, dice)`` is a pure function that returns the next
state and the actions to take; the agent takes them and reports back with
more events. What it guarantees:

- **Registered means that the kubelet listens**: a ListAndWatch stream is open
  on the running server. Register's own answer is only a promise; without a
  stream within ``STREAM_WITHIN_S`` the plugin starts over.
- **One incarnation, one server, one Register.** An incarnation is a server on
  a socket name never used before. Starting over always stops the old server
  wholly first: the kubelet looks the resource up by name when a stream ends,
  so the late end of an old stream would disconnect a newer registration.
- **One plugin a node.** Nothing is served while another plugin of the same
  resource holds the lock; it is taken over when that one is gone.
- **A new kubelet.sock is acted on at once**, whatever back-off is running. The
  loss of our own socket is not: a starting kubelet wipes all sockets before
  it makes its own, and a socket made in between would be wiped again.
- Back-off grows to ``BACK_OFF_MAX_S`` and never gives up.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

STREAM_WITHIN_S = 5.0
"""How long after Register the kubelet may take to open the stream."""
BACK_OFF_FIRST_S = 0.25
BACK_OFF_MAX_S = 10.0
SETTLED_AFTER_S = 10.0
"""A stream this old ends the memory of earlier failures."""
WIPED_GRACE_S = 1.0
"""How long a new kubelet.sock may take to follow the wipe of our socket."""


@dataclass(frozen=True, slots=True)
class SocketId:
    """Tells one kubelet.sock from the next one at the same path.

    Inode numbers are reused, so the time of creation belongs to it: a socket's
    mtime is set by bind and, unlike its ctime, not by chmod or chown.
    """

    device: int
    inode: int
    mtime_ns: int


# --- what happens ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Publishable:
    """There is a device list to serve."""


@dataclass(frozen=True, slots=True)
class KubeletSocket:
    """What lies at kubelet.sock now; None: nothing does."""

    id: SocketId | None


@dataclass(frozen=True, slots=True)
class Owned:
    """Whether this plugin may serve; ``by``: who does instead, None when we do."""

    by: str | None


@dataclass(frozen=True, slots=True)
class ServerStarted:
    incarnation: int


@dataclass(frozen=True, slots=True)
class ServerFailed:
    """The server could not be started, or died."""

    incarnation: int
    why: str


@dataclass(frozen=True, slots=True)
class OwnSocketGone:
    """The file of the running server's socket is not there any more."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class RegisterAnswered:
    """The kubelet took the registration, or ``why`` it did not."""

    incarnation: int
    why: str | None


@dataclass(frozen=True, slots=True)
class Streams:
    """How many ListAndWatch streams are open on this incarnation now."""

    incarnation: int
    open: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The process is asked to end."""


Event = (
    Publishable
    | KubeletSocket
    | Owned
    | ServerStarted
    | ServerFailed
    | OwnSocketGone
    | RegisterAnswered
    | Streams
    | Tick
    | Stop
)


# --- what to do ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartServer:
    """Serve on a new socket; report ServerStarted or ServerFailed."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class StopServer:
    """Stop wholly, streams included, and remove the socket, before going on."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Register:
    """Call the kubelet; report RegisterAnswered."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Report:
    """Log this change. ``retry_in_s``: when the plugin tries again, if it has to."""

    kind: str
    why: str = ""
    retry_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Exit:
    """Everything is stopped."""


Action = StartServer | StopServer | Register | Report | Exit


# --- state -----------------------------------------------------------------------


class Phase(enum.Enum):
    """Where the plugin stands; the values are for people."""

    NOTHING_TO_PUBLISH = "waiting for GPUs"
    OWNED_BY_OTHER = "waiting for another plugin of this resource to end"
    NO_KUBELET = "waiting for kubelet.sock"
    BACKING_OFF = "waiting before the next try"
    STARTING = "starting the server"
    REGISTERING = "registering"
    AWAITING_STREAM = "registered, waiting for the kubelet to listen"
    REGISTERED = "registered"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class State:
    """The whole memory.

    Attributes:
        owner: who else serves the resource on this node; None: nobody.
        incarnation: number of the last server started; 0 before the first.
        failures: tries that failed in a row.
        due_s: monotonic time at which to act again; None: wait for an event.
        streaming_since_s: when the first of the open streams was opened.
        restarts: kubelet restarts seen.
        why: what the last failure was, in words; "" after success.
    """

    phase: Phase = Phase.NOTHING_TO_PUBLISH
    kubelet: SocketId | None = None
    owner: str | None = None
    incarnation: int = 0
    failures: int = 0
    due_s: float | None = None
    streaming_since_s: float | None = None
    restarts: int = 0
    why: str = ""

    @property
    def serving(self) -> bool:
        """A server of ours runs or is being started."""
        return self.phase in _SERVING


_SERVING = frozenset({Phase.STARTING, Phase.REGISTERING, Phase.AWAITING_STREAM, Phase.REGISTERED})

Step = tuple[State, tuple[Action, ...]]


def step(state: State, event: Event, now_s: float, dice: float) -> Step:
    """What follows from one event.

    Args:
        now_s: monotonic time.
        dice: a random number in [0, 1), for jitter.
    """
    if state.phase is Phase.STOPPED:
        return state, ()
    match event:
        case Stop():
            stop = (StopServer(state.incarnation),) if state.serving else ()
            return replace(state, phase=Phase.STOPPED, due_s=None), (*stop, Exit())
        case Publishable():
            if state.phase is not Phase.NOTHING_TO_PUBLISH:
                return state, ()
            return _begin(state)
        case KubeletSocket(id=socket):
            return _kubelet(state, socket)
        case Owned(by=owner):
            return _owned(state, owner)
        case Tick():
            return _tick(state, now_s, dice)
        case ServerStarted() | ServerFailed() | OwnSocketGone() | RegisterAnswered() | Streams():
            if event.incarnation != state.incarnation or not state.serving:
                return state, ()  # of a server that is gone
            return _server(state, event, now_s, dice)


def _server(
    state: State,
    event: ServerStarted | ServerFailed | OwnSocketGone | RegisterAnswered | Streams,
    now_s: float,
    dice: float,
) -> Step:
    match event:
        case ServerStarted():
            if state.phase is not Phase.STARTING:
                return state, ()
            state = replace(state, phase=Phase.REGISTERING)
            return state, (Register(state.incarnation),)
        case ServerFailed():
            return _start_over(state, event.why, now_s, dice)
        case RegisterAnswered(why=why):
            if state.streaming_since_s is not None:
                # Whatever was answered: the kubelet listens, and that is what counts.
                return _registered(state)
            if why is not None:
                return _start_over(state, why, now_s, dice)
            due = now_s + STREAM_WITHIN_S
            return replace(state, phase=Phase.AWAITING_STREAM, due_s=due), ()
        case Streams(open=0):
            gone = state.streaming_since_s
            if gone is None:
                return state, ()
            if now_s - gone >= SETTLED_AFTER_S:
                state = replace(state, failures=0)
            state = replace(state, streaming_since_s=None)
            if state.phase is Phase.REGISTERED:
                return _start_over(state, "the kubelet closed its stream", now_s, dice)
            return state, ()  # Register is still under way and will decide
        case Streams():
            if state.streaming_since_s is None:
                state = replace(state, streaming_since_s=now_s)
            if state.phase is Phase.AWAITING_STREAM:
                return _registered(state)
            return state, ()
        case OwnSocketGone():
            if state.phase is Phase.REGISTERED and state.due_s is None:
                return replace(state, due_s=now_s + WIPED_GRACE_S), ()
            return state, ()


def _registered(state: State) -> Step:
    state = replace(state, phase=Phase.REGISTERED, due_s=None, why="")
    return state, (Report("registered"),)


def _begin(state: State, *also: Action) -> Step:
    """Start the next incarnation, if it is ours to serve and there is a kubelet."""
    if state.owner is not None:
        report = Report("owned by another", state.owner)
        return replace(state, phase=Phase.OWNED_BY_OTHER, due_s=None), (*also, report)
    if state.kubelet is None:
        return replace(state, phase=Phase.NO_KUBELET, due_s=None), (*also, Report("no kubelet"))
    number = state.incarnation + 1
    state = replace(
        state, phase=Phase.STARTING, incarnation=number, due_s=None, streaming_since_s=None
    )
    return state, (*also, StartServer(number))


def _start_over(state: State, why: str, now_s: float, dice: float) -> Step:
    """Stop the server and try again after a while."""
    wait = min(BACK_OFF_MAX_S, BACK_OFF_FIRST_S * 2.0 ** min(state.failures, 16))
    wait *= 0.8 + 0.4 * dice
    stopped = StopServer(state.incarnation)
    state = replace(
        state,
        phase=Phase.BACKING_OFF,
        failures=state.failures + 1,
        due_s=now_s + wait,
        streaming_since_s=None,
        why=why,
    )
    return state, (stopped, Report("not registered", why, wait))


def _owned(state: State, owner: str | None) -> Step:
    before, state = state.owner, replace(state, owner=owner)
    if owner == before or state.phase is Phase.NOTHING_TO_PUBLISH:
        return state, ()
    if owner is None:
        return _begin(state) if state.phase is Phase.OWNED_BY_OTHER else (state, ())
    # The lock was lost: with its directory, to somebody who was faster.
    stop = (StopServer(state.incarnation),) if state.serving else ()
    return _begin(state, *stop)


def _kubelet(state: State, socket: SocketId | None) -> Step:
    if socket == state.kubelet:
        return state, ()
    before = state.kubelet
    state = replace(state, kubelet=socket)
    if state.phase in (Phase.NOTHING_TO_PUBLISH, Phase.OWNED_BY_OTHER):
        return state, ()
    if socket is None:
        # A kubelet that listens is alive, whatever became of the file.
        return state, (Report("kubelet.sock gone"),)
    actions: tuple[Action, ...] = (StopServer(state.incarnation),) if state.serving else ()
    if before is not None or state.incarnation > 0:
        state = replace(state, restarts=state.restarts + 1)
        actions = (Report("kubelet restarted"), *actions)
    return _begin(replace(state, failures=0), *actions)


def _tick(state: State, now_s: float, dice: float) -> Step:
    if state.due_s is None or now_s < state.due_s:
        return state, ()
    state = replace(state, due_s=None)
    match state.phase:
        case Phase.BACKING_OFF:
            return _begin(state)
        case Phase.AWAITING_STREAM:
            return _start_over(state, "the kubelet did not open ListAndWatch", now_s, dice)
        case Phase.REGISTERED:
            return _start_over(state, "our socket was removed", now_s, dice)
        case _:
            return state, ()

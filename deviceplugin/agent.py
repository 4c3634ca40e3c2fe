"""The daemon: owns the threads and does what the lifecycle decides.

The main thread reads one queue of events, steps the lifecycle and performs
its actions; every other thread only puts events into that queue. Once a
second it also looks at the kubelet's directory for itself, so that nothing
depends on a notification.

What the first registration does not need (directory watch, control socket,
metrics) is loaded and started after it, by a short-lived thread, so that the
main thread stays free to act: a pod that the kubelet admits before the plugin
is back fails.
"""

from __future__ import annotations

import queue
import random
import signal
import socket
import threading
from pathlib import Path
from typing import Any, Protocol

from deviceplugin import __version__, kubelet, lifecycle, logs, standing
from deviceplugin.casebook import Casebook
from deviceplugin.checkpoint import Checkpoint
from deviceplugin.clock import Clock
from deviceplugin.commands import Commands
from deviceplugin.config import Loaded, Settings, parse_address, socket_stem
from deviceplugin.doctor import Doctor
from deviceplugin.errors import ListTooLong
from deviceplugin.hardware import Hardware, Host
from deviceplugin.hardware.kmsg import open_log
from deviceplugin.holders import Holders
from deviceplugin.inbox import Inbox
from deviceplugin.incarnation import Incarnations, say
from deviceplugin.keeper import Keeper
from deviceplugin.lifecycle import Phase
from deviceplugin.memory import Memory
from deviceplugin.monitor import Monitor, Policy
from deviceplugin.ownership import Ownership
from deviceplugin.reload import Changed, Reloader
from deviceplugin.roll import Roll
from deviceplugin.sockets import directory_trouble
from deviceplugin.stats import Stats
from deviceplugin.store import Store

LOOK_EVERY_S = 1.0
LATE_START_S = 0.3
"""When the rest is started at the latest, registered or not."""
STUCK_AFTER_S = 30.0
"""Longer than any single thing the main thread does."""

_log = logs.get("agent")


class Part(Protocol):
    """Something with a thread of its own that is started late."""

    def stop(self) -> None: ...
    def trouble(self) -> str | None: ...


class _Look:
    """Something in the kubelet's directory may have changed."""


class _Reload:
    """An operator wants the settings read again."""


class _Crash:
    """A thread of ours ended by a fault of ours."""

    def __init__(self, who: str, cause: BaseException) -> None:
        self.who = who
        self.cause = cause


class Agent:
    """One run of the daemon."""

    def __init__(
        self,
        settings: Settings,
        hardware: Hardware,
        host: Host,
        clock: Clock,
        reloader: Reloader | None = None,
    ) -> None:
        """
        Args:
            reloader: looks for new settings; None: they never change.
        """
        self._settings = settings
        self._reloader = reloader
        self._clock = clock
        self._directory = Path(settings.device_plugin_dir)
        self._stem = socket_stem(settings.resource_name)
        self._events: queue.SimpleQueue[lifecycle.Event | _Look | _Reload | _Crash]
        self._events = queue.SimpleQueue()
        self._state = lifecycle.State()
        self._watch = kubelet.DirectoryWatch(self._directory, self._look_soon)
        self._ownership = Ownership(
            self._directory, self._stem, settings.pod_name or socket.gethostname()
        )
        self._parts: list[Part] = []
        self._store = Store()
        self._stats = Stats()
        self._stats.set("registered", settings.resource_name, to=0)
        resource = settings.resource_name
        self._incarnations = Incarnations(
            self._directory,
            resource,
            self._store,
            self._stats,
            self._events.put,
            check_before_start=settings.health_check_before_start,
        )
        holders = Holders(
            Checkpoint(self._directory, resource), Path(settings.pod_resources_socket), resource
        )
        memory = Memory(Path(settings.state_dir), self._memory_name(), self._stats, clock)
        policy = Policy.of(settings)
        casebook = Casebook(Path(settings.state_dir), self._memory_name(), self._stats, clock)
        doctor = Doctor(
            self._stats,
            clock,
            policy.health,
            casebook,
            holders=lambda: holders.held(named=True) or {},
        )
        keeper = Keeper(
            host,
            self._store,
            self._stats,
            clock,
            doctor,
            Roll(memory, holders, clock),
            Inbox(Path(settings.state_dir), self._stats, clock),
            on_publishable=lambda: self._events.put(lifecycle.Publishable()),
        )
        self._monitor = Monitor(
            hardware,
            keeper,
            self._stats,
            clock,
            policy,
            on_crash=lambda cause: self._events.put(_Crash("monitor", cause)),
            kernel_log=(
                open_log(Path(settings.dev_root) / "kmsg")
                if settings.health_kernel_log == "on"
                else None
            ),
        )
        self._commands = Commands(self._monitor, casebook, clock, self._status)
        self._late = threading.Thread(target=self._start_late, name="late start", daemon=True)
        self._can_watch = False
        self._started_s = clock.monotonic()
        self._beat_s = self._started_s
        self._exit_code: int | None = None
        self._stop_asked = False
        self._next_settings: Loaded | None = None
        self.stuck = False
        """After ``run``: a thread hangs in the driver, and only _exit ends the process."""

    def _memory_name(self) -> str:
        """Simulated GPUs are no part of what the real node is known to have."""
        return f"simulated.{self._stem}" if self._settings.simulate is not None else self._stem

    # --- running --------------------------------------------------------------------

    def stop(self) -> None:
        """Ask the daemon to end. Safe from any thread and from a signal handler."""
        self._stop_asked = True
        self._events.put(lifecycle.Stop())

    @property
    def next_settings(self) -> Loaded | None:
        """After ``run``: begin again with these; None once it was asked to stop."""
        return None if self._stop_asked else self._next_settings

    def run(self) -> int:
        """Run until stopped; in the main thread.

        Returns:
            The exit code: 0 stopped, 1 a part of the daemon died.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stop())
        signal.signal(signal.SIGHUP, lambda *_: self._events.put(_Reload()))
        settings = self._settings
        _log.info(
            "starting",
            version=__version__,
            resource=settings.resource_name,
            node=settings.node_name,
            simulate=settings.simulate,
        )
        self._monitor.start()
        try:
            self._loop()
        except Exception as error:  # noqa: BLE001  # reported, and the exit code says so
            _log.error("stopping by a fault of ours", cause=error)
            self._exit_code = 1
        return self._wind_down()

    def _loop(self) -> None:
        look_due_s = self._clock.monotonic()
        while self._exit_code is None:
            now_s = self._beat_s = self._clock.monotonic()
            if now_s >= look_due_s:
                self._look()
                if self._reloader is not None:
                    self._adopt(self._reloader.look(self._stats))
                look_due_s = now_s + LOOK_EVERY_S
            late_due_s = self._start_the_rest(now_s)
            due = [s for s in (look_due_s, self._state.due_s, late_due_s) if s is not None]
            try:
                event = self._events.get(timeout=max(0.0, min(due) - self._clock.monotonic()))
            except queue.Empty:
                event = lifecycle.Tick()
            match event:
                case _Look():
                    self._look()
                case _Reload():
                    if self._reloader is not None:
                        self._adopt(self._reloader.reload(self._stats))
                case _Crash(cause=ListTooLong()):
                    _log.error("stopping: nothing can be published", why=event.cause)
                    self._exit_code = 2
                case _Crash():
                    _log.error("stopping: a thread died", thread=event.who, cause=event.cause)
                    self._exit_code = 1
                case _:
                    self._step(event)
            if self._state.due_s is not None:
                self._step(lifecycle.Tick())  # however many events there are

    def _start_the_rest(self, now_s: float) -> float | None:
        """Start what can be late, once it is time; when that is, or None if it was."""
        if self._late.ident is not None:
            return None
        due_s = self._started_s + LATE_START_S
        if self._state.phase is not Phase.REGISTERED and now_s < due_s:
            return due_s
        self._late.start()
        return None

    def _wind_down(self) -> int:
        """Stop everything. Each step is bounded: together well under a second."""
        self._monitor.stop()
        self._incarnations.stop()
        self._ownership.release()
        if self._late.ident is not None:
            self._late.join(0.5)
        for part in self._parts:
            part.stop()
        self._watch.stop()
        if not self._monitor.join(0.6):
            _log.warning("the driver does not answer, leaving it behind")
            self.stuck = True
        code = self._exit_code or 0
        if self.next_settings is None:
            _log.info("stopped", exit_code=code)
        return code

    # --- new settings -----------------------------------------------------------------

    def _adopt(self, changed: Changed | None) -> None:
        """Take new settings over, in place or by a new start of the whole agent."""
        if changed is None:
            return
        if not changed.live:
            _log.info("starting anew with the new settings")
            self._next_settings = changed.loaded
            self._exit_code = 0
            return
        self._settings = changed.loaded.settings
        logs.set_up(self._settings.log_format, self._settings.log_level)
        self._monitor.policy = Policy.of(self._settings)

    # --- looking ----------------------------------------------------------------------

    def _look_soon(self) -> None:
        self._events.put(_Look())

    def _look(self) -> None:
        """See for ourselves what lies in the kubelet's directory."""
        if self._can_watch:
            self._watch.ensure()
        self._step(lifecycle.Owned(self._ownership.claim()))
        self._step(lifecycle.KubeletSocket(kubelet.socket_id(self._directory)))
        wrong = self._incarnations.look(self._clock.monotonic())
        if wrong is not None:
            self._step(wrong)

    def _start_late(self) -> None:
        """Load and start the rest; in a thread of its own."""
        try:
            kubelet.DirectoryWatch.load()
            self._can_watch = True
            self._look_soon()
            from deviceplugin.control import ControlServer

            control = ControlServer(Path(self._settings.state_dir), self._commands.handlers())
            control.start()
            self._parts.append(control)
            if self._settings.metrics_address:
                from deviceplugin.metrics import Endpoint, SnapshotCollector

                resource = self._settings.resource_name
                host, port = parse_address(self._settings.metrics_address)
                collector = SnapshotCollector(self._store, self._stats, self._clock, resource)
                endpoint = Endpoint(host, port, collector, self.healthz, self.readyz)
                endpoint.start()
                self._parts.append(endpoint)
        except Exception as error:  # noqa: BLE001  # a thread that dies must be heard of
            self._events.put(_Crash("late start", error))

    # --- the lifecycle's actions --------------------------------------------------------

    def _step(self, event: lifecycle.Event) -> None:
        before = self._state
        self._state, actions = lifecycle.step(
            before,
            event,
            self._clock.monotonic(),
            random.random(),  # noqa: S311  # jitter
        )
        if (
            isinstance(event, lifecycle.RegisterAnswered)
            and event.incarnation == before.incarnation
        ):
            self._incarnations.settle()
            result = "ok" if event.why is None else "failed"
            self._stats.add("registrations", self._settings.resource_name, result)
        for action in actions:
            self._perform(action)
        if self._state.phase is not before.phase:
            _log.debug("phase", now=self._state.phase.value)
            registered = self._state.phase is Phase.REGISTERED
            self._stats.set("registered", self._settings.resource_name, to=registered)

    def _perform(self, action: lifecycle.Action) -> None:
        match action:
            case lifecycle.StartServer():
                self._incarnations.start(action.incarnation)
            case lifecycle.StopServer():
                self._incarnations.stop()
            case lifecycle.Register():
                self._incarnations.register(action.incarnation)
            case lifecycle.Report():
                if action.kind == "kubelet restarted":
                    self._stats.add("kubelet_restarts")
                resource, devices = self._settings.resource_name, self._store.snapshot.devices
                say(action, resource, devices, self._why_no_kubelet)
            case lifecycle.Exit():
                self._exit_code = 0

    def _why_no_kubelet(self) -> str:
        trouble = directory_trouble(self._directory)
        return trouble or f"there is no kubelet.sock in {self._directory}"

    # --- what is wrong ------------------------------------------------------------------

    def healthz(self) -> tuple[bool, list[str]]:
        """Whether this process is to live, and else why not: threads of ours that are
        dead or stuck. Never the state of the driver or of the kubelet."""
        found = [self._monitor.trouble(), *(part.trouble() for part in self._parts)]
        age_s = self._clock.monotonic() - self._beat_s
        if age_s > STUCK_AFTER_S:
            found.append(f"the main thread has been stuck for {age_s:.0f} s")
        troubles = [trouble for trouble in found if trouble is not None]
        return not troubles, troubles

    def readyz(self) -> tuple[bool, list[str]]:
        """Whether pods get what there is to get, and else why not."""
        stand = self._stand()
        return stand.ready, list(stand.lines)

    def _status(self) -> dict[str, Any]:
        return standing.status(self._settings, self._stand(), self._state, self._store.snapshot)

    def _stand(self) -> standing.Standing:
        state = self._state
        return standing.stand(
            self._settings,
            state,
            self._store.snapshot,
            no_kubelet=self._why_no_kubelet() if state.phase is Phase.NO_KUBELET else "",
            looking_for_s=self._clock.monotonic() - self._started_s,
        )

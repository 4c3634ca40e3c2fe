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

import os
import queue
import random
import signal
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from deviceplugin import __version__, kubelet, lifecycle, logs, server
from deviceplugin.checkpoint import Checkpoint
from deviceplugin.clock import Clock
from deviceplugin.config import Settings, parse_address, socket_stem
from deviceplugin.errors import ServeError
from deviceplugin.hardware import Hardware, Host
from deviceplugin.lifecycle import Phase
from deviceplugin.memory import Memory
from deviceplugin.model import Health
from deviceplugin.monitor import Monitor
from deviceplugin.ownership import Ownership
from deviceplugin.roll import Roll
from deviceplugin.servicer import Servicer
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


class _Crash:
    """A thread of ours ended by a fault of ours."""

    def __init__(self, who: str, cause: BaseException) -> None:
        self.who = who
        self.cause = cause


class Agent:
    """One run of the daemon."""

    def __init__(self, settings: Settings, hardware: Hardware, host: Host, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._directory = Path(settings.device_plugin_dir)
        self._stem = socket_stem(settings.resource_name)
        self._events: queue.SimpleQueue[lifecycle.Event | _Look | _Crash] = queue.SimpleQueue()
        self._state = lifecycle.State()
        self._server: server.PluginServer | None = None
        self._registration: kubelet.Registration | None = None
        self._watch = kubelet.DirectoryWatch(self._directory, self._look_soon)
        self._ownership = Ownership(
            self._directory, self._stem, settings.pod_name or socket.gethostname()
        )
        self._parts: list[Part] = []
        self._store = Store()
        self._stats = Stats()
        self._stats.set("registered", settings.resource_name, to=0)
        self._monitor = Monitor(
            hardware,
            host,
            self._store,
            self._stats,
            clock,
            poll_interval_s=settings.poll_interval_s,
            on_publishable=lambda: self._events.put(lifecycle.Publishable()),
            on_crash=lambda cause: self._events.put(_Crash("monitor", cause)),
            roll=Roll(
                Memory(Path(settings.state_dir), self._stem, self._stats),
                Checkpoint(self._directory, settings.resource_name),
            ),
        )
        self._late = threading.Thread(target=self._start_late, name="late start", daemon=True)
        self._can_watch = False
        self._started_s = clock.monotonic()
        self._beat_s = self._started_s
        self._exit_code: int | None = None

    # --- running --------------------------------------------------------------------

    def stop(self) -> None:
        """Ask the daemon to end. Safe from any thread and from a signal handler."""
        self._events.put(lifecycle.Stop())

    def run(self) -> int:
        """Run until stopped; in the main thread.

        Returns:
            The exit code: 0 stopped, 1 a part of the daemon died.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stop())
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
        self._close_registration()
        self._stop_server()
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
        _log.info("stopped", exit_code=code)
        return code

    stuck = False
    """After ``run``: a thread hangs in the driver, and only _exit ends the process."""

    # --- looking ----------------------------------------------------------------------

    def _look_soon(self) -> None:
        self._events.put(_Look())

    def _look(self) -> None:
        """See for ourselves what lies in the kubelet's directory."""
        if self._can_watch:
            self._watch.ensure()
        self._step(lifecycle.Owned(self._ownership.claim()))
        self._step(lifecycle.KubeletSocket(kubelet.socket_id(self._directory)))
        if self._server is not None and not self._server.in_place():
            self._step(lifecycle.OwnSocketGone(self._state.incarnation))

    def _start_late(self) -> None:
        """Load and start the rest; in a thread of its own."""
        try:
            kubelet.DirectoryWatch.load()
            self._can_watch = True
            self._look_soon()
            from deviceplugin.control import ControlServer

            control = ControlServer(
                Path(self._settings.state_dir),
                {"status": self._status, "forget": self._forget},
            )
            if control.start():
                self._parts.append(control)
            if self._settings.metrics_address:
                from deviceplugin.metrics import Endpoint, SnapshotCollector

                resource = self._settings.resource_name
                host, port = parse_address(self._settings.metrics_address)
                collector = SnapshotCollector(self._store, self._stats, resource)
                endpoint = Endpoint(host, port, collector, self.unhealthy, self.unready)
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
            self._close_registration()
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
                self._start_server(action.incarnation)
            case lifecycle.StopServer():
                self._close_registration()
                self._stop_server()
            case lifecycle.Register():
                self._register(action.incarnation)
            case lifecycle.Report():
                self._report(action)
            case lifecycle.Exit():
                self._exit_code = 0

    def _start_server(self, incarnation: int) -> None:
        servicer = Servicer(
            self._store,
            self._stats,
            on_streams=lambda n: self._events.put(lifecycle.Streams(incarnation, n)),
        )
        server.remove_stale(self._directory, self._stem)  # of a plugin that was killed
        path = self._directory / server.socket_name(self._stem)
        try:
            self._server = server.PluginServer(path, servicer)
        except ServeError as error:
            self._events.put(lifecycle.ServerFailed(incarnation, str(error)))
        else:
            self._events.put(lifecycle.ServerStarted(incarnation))

    def _stop_server(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _register(self, incarnation: int) -> None:
        if self._server is None:
            return
        self._registration = kubelet.Registration(
            self._directory,
            self._server.path.name,
            self._settings.resource_name,
            on_answer=lambda why: self._events.put(lifecycle.RegisterAnswered(incarnation, why)),
        )

    def _close_registration(self) -> None:
        if self._registration is not None:
            self._registration.close()
            self._registration = None

    def _report(self, report: lifecycle.Report) -> None:
        fields: dict[str, object] = {"resource": self._settings.resource_name}
        match report.kind:
            case "registered":
                devices = self._store.snapshot.devices
                healthy = sum(device.health is Health.HEALTHY for device in devices)
                _log.info("registered", devices=len(devices), healthy=healthy, **fields)
            case "not registered":
                _log.warning(
                    "not registered, trying again",
                    why=report.why,
                    retry_in_s=round(report.retry_in_s or 0, 2),
                    **fields,
                )
            case "kubelet restarted":
                self._stats.add("kubelet_restarts")
                _log.info("kubelet restarted, registering again", **fields)
            case "owned by another":
                _log.warning(
                    "another plugin serves this resource, waiting for it to end",
                    owner=report.why,
                    **fields,
                )
            case "kubelet.sock gone":
                _log.warning("kubelet.sock is gone, waiting for it", directory=self._directory)
            case "no kubelet":
                _log.warning("no kubelet yet, waiting for it", why=self._why_no_kubelet())

    def _why_no_kubelet(self) -> str:
        trouble = directory_trouble(self._directory)
        return trouble or f"there is no kubelet.sock in {self._directory}"

    # --- what is wrong ------------------------------------------------------------------

    def unhealthy(self) -> list[str]:
        """Reasons to kill this process: threads of ours that are dead or stuck."""
        found = [self._monitor.trouble(), *(part.trouble() for part in self._parts)]
        age_s = self._clock.monotonic() - self._beat_s
        if age_s > STUCK_AFTER_S:
            found.append(f"the main thread has been stuck for {age_s:.0f} s")
        return [trouble for trouble in found if trouble is not None]

    def unready(self) -> list[str]:
        """Why pods cannot get devices from this plugin now."""
        state, snapshot = self._state, self._store.snapshot
        if state.phase is Phase.REGISTERED:
            return []
        reasons = [f"{self._settings.resource_name}: {state.phase.value}"]
        if state.owner is not None:
            reasons.append(f"it is served by {state.owner}")
        if state.why:
            reasons.append(f"last try: {state.why}")
        if state.phase is Phase.NO_KUBELET:
            reasons.append(self._why_no_kubelet())
        if snapshot.trouble is not None:
            reasons.append(f"driver: {snapshot.trouble.detail}")
        elif snapshot.inventory is None:
            age_s = self._clock.monotonic() - self._started_s
            reasons.append(f"driver: the first look at the GPUs takes {age_s:.0f} s so far")
        return reasons

    def _forget(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to ``deviceplugin forget``."""
        return {"refused": self._monitor.forget(str(request.get("device")))}

    def _status(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to ``deviceplugin status``."""
        snapshot = self._store.snapshot
        inventory = snapshot.inventory
        return {
            "version": __version__,
            "pid": os.getpid(),
            "uptime_s": round(self._clock.monotonic() - self._started_s, 3),
            "node": self._settings.node_name,
            "resource": self._settings.resource_name,
            "simulate": self._settings.simulate,
            "phase": self._state.phase.value,
            "ready": self._state.phase is Phase.REGISTERED,
            "not_ready_because": self.unready(),
            "kubelet_restarts": self._state.restarts,
            "driver": inventory.driver.driver_version if inventory is not None else None,
            "driver_trouble": snapshot.trouble.detail if snapshot.trouble is not None else None,
            "devices": [
                {
                    "id": device.id,
                    "health": device.health.value,
                    "numa_nodes": list(device.numa_nodes),
                    "reason": snapshot.verdicts[device.gpu].reason,
                    "detail": snapshot.verdicts[device.gpu].detail,
                    "since_s": snapshot.verdicts[device.gpu].since_s,
                }
                for device in snapshot.devices
            ],
        }

"""Does what the lifecycle decides about servers and registrations, and reports back.

One incarnation is a server on a socket name never used before, and at most one
registration of it. Used by the main thread; answers come back as events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from deviceplugin import kubelet, lifecycle, logs, server
from deviceplugin.config import socket_stem
from deviceplugin.errors import ServeError
from deviceplugin.model import Device, Health
from deviceplugin.servicer import Servicer
from deviceplugin.stats import Stats
from deviceplugin.store import Store

CHECK_EVERY_S = 10.0
"""How often our own server is called, to see that it still answers."""

_log = logs.get("agent")


class Incarnations:
    """The server and the registration that there are now, if any."""

    def __init__(
        self,
        directory: Path,
        resource: str,
        store: Store,
        stats: Stats,
        put: Callable[[lifecycle.Event], None],
        *,
        check_before_start: bool,
    ) -> None:
        """
        Args:
            check_before_start: as for ``Servicer``.
            put: takes events, from any thread.
        """
        self._directory = directory
        self._resource = resource
        self._stem = socket_stem(resource)
        self._store = store
        self._stats = stats
        self._put = put
        self._check_before_start = check_before_start
        self._number = 0
        self._server: server.PluginServer | None = None
        self._registration: kubelet.Registration | None = None
        self._check_due_s = 0.0

    def start(self, number: int) -> None:
        """Serve on a new socket."""
        self._number = number
        servicer = Servicer(
            self._store,
            self._stats,
            on_streams=lambda n: self._put(lifecycle.Streams(number, n)),
            check_before_start=self._check_before_start,
        )
        server.remove_stale(self._directory, self._stem)  # of a plugin that was killed
        path = self._directory / server.socket_name(self._stem)
        try:
            self._server = server.PluginServer(path, servicer)
        except ServeError as error:
            self._put(lifecycle.ServerFailed(number, str(error)))
        else:
            self._put(lifecycle.ServerStarted(number))

    def stop(self) -> None:
        """End registration and server wholly."""
        self.settle()
        if self._server is not None:
            self._server.stop()
            self._server = None

    def register(self, number: int) -> None:
        """Call the kubelet."""
        if self._server is not None:
            self._registration = kubelet.Registration(
                self._directory,
                self._server.path.name,
                self._resource,
                on_answer=lambda why: self._put(lifecycle.RegisterAnswered(number, why)),
            )

    def settle(self) -> None:
        """The registration was answered, or is not wanted any more."""
        if self._registration is not None:
            self._registration.close()
            self._registration = None

    def look(self, now_s: float) -> lifecycle.Event | None:
        """See whether the server can still be reached: what is wrong at first sight.
        Whether it answers is told later, as an event."""
        if self._server is None:
            return None
        if not self._server.in_place():
            return lifecycle.OwnSocketGone(self._number)
        if now_s >= self._check_due_s:
            self._check_due_s = now_s + CHECK_EVERY_S
            number = self._number
            self._server.check(lambda why: self._put(lifecycle.ServerFailed(number, why)))
        return None


def say(
    report: lifecycle.Report,
    resource: str,
    devices: Sequence[Device],
    why_no_kubelet: Callable[[], str],
) -> None:
    """Log what the lifecycle has to report."""
    match report.kind:
        case "registered":
            healthy = sum(device.health is Health.HEALTHY for device in devices)
            _log.info("registered", devices=len(devices), healthy=healthy, resource=resource)
        case "not registered":
            _log.warning(
                "not registered, trying again",
                why=report.why,
                retry_in_s=round(report.retry_in_s or 0, 2),
                resource=resource,
            )
        case "kubelet restarted":
            _log.info("kubelet restarted, registering again", resource=resource)
        case "owned by another":
            _log.warning(
                "another plugin serves this resource, waiting for it to end",
                owner=report.why,
                resource=resource,
            )
        case "kubelet.sock gone":
            _log.warning("kubelet.sock is gone, waiting for it", resource=resource)
        case "no kubelet":
            _log.warning("no kubelet yet, waiting for it", why=why_no_kubelet())

"""/metrics, /healthz and /readyz over HTTP.

Only this module says ``prometheus_client``. A scrape reads the snapshot and
the counters, never the driver, so it costs the node nothing and a GPU that
is gone leaves no series behind.
"""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from deviceplugin import __version__, logs
from deviceplugin.clock import Clock, date
from deviceplugin.model import Health
from deviceplugin.stats import Stats
from deviceplugin.store import Store

PREFIX = "deviceplugin_"
BIND_AGAIN_S = 10.0

_log = logs.get("metrics")

_COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "registrations": ("Registrations with the kubelet, by result.", ("resource", "result")),
    "kubelet_restarts": ("Times that the kubelet was seen to have restarted.", ()),
    "list_updates": ("Device lists sent to the kubelet.", ()),
    "oversized_lists": (
        "Scans whose device list would be too large for the kubelet: the one before stays.",
        (),
    ),
    "config_reloads": ("Times that the settings were read again, by result.", ("result",)),
    "rpc": ("Calls by the kubelet, by method and gRPC status.", ("method", "code")),
    "xid_errors": (
        "Xid errors reported by the driver, by GPU (empty: not ours) and by what the code does.",
        ("gpu", "xid", "verdict"),
    ),
    "health_transitions": ("Changes of a GPU's health, by the new health.", ("gpu", "health")),
    "driver_errors": ("Driver calls that failed, by the driver's error.", ("call", "code")),
}

_GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "registered": (
        "1 while the kubelet is listening to the resource's device list, else 0.",
        ("resource",),
    ),
    "list_and_watch_streams": ("Device list streams that are open.", ()),
    "state_write_failed": (
        "1 while this file of what has to outlive the process cannot be written, else 0.",
        ("file",),
    ),
    "verdicts_held": (
        "GPUs that stay offered because too many would be withdrawn within ten minutes.",
        (),
    ),
    "inbox_bad_files": ("Files in the inbox of verdicts that are ignored, being wrong.", ()),
    "config_refused": ("1 while the configuration file is wrong and not in use, else 0.", ()),
    "monitoring_lost": ("1 while the driver has not been heard of for too long, else 0.", ()),
    "monitor_last_success_timestamp_seconds": (
        "When the driver last answered, in seconds since the epoch.",
        (),
    ),
}


class SnapshotCollector(Collector):
    """Renders the latest snapshot and the counters."""

    def __init__(self, store: Store, stats: Stats, clock: Clock, resource: str) -> None:
        self._store = store
        self._stats = stats
        self._clock = clock
        self._resource = resource

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily(
            PREFIX + "build", "The plugin's version.", value={"version": __version__}
        )
        for name, (text, labels) in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
            counts = self._stats.counts(name)
            for values, count in (counts or ({} if labels else {(): 0.0})).items():
                counter.add_metric(values, count)
            yield counter
        for name, (text, labels) in _GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=labels)
            for values, value in self._stats.gauges(name).items():
                gauge.add_metric(values, value)
            yield gauge
        yield from self._devices()

    def _devices(self) -> Iterator[Metric]:
        snapshot = self._store.snapshot
        devices = GaugeMetricFamily(
            PREFIX + "devices",
            "Devices published to the kubelet, by health.",
            labels=("resource", "health"),
        )
        for health in Health:
            count = sum(device.health is health for device in snapshot.devices)
            devices.add_metric((self._resource, health.value), count)
        yield devices
        healthy = GaugeMetricFamily(
            PREFIX + "device_healthy",
            "1 for a device that is offered to pods, 0 for one that is not.",
            labels=(
                "resource",
                "device",
                "gpu",
                "index",
                "model",
                "pci_bus_id",
                "numa_node",
            ),
        )
        reason = GaugeMetricFamily(
            PREFIX + "device_unhealthy_reason",
            "Why a device is not offered; the value is since when, in seconds since the epoch.",
            labels=("resource", "device", "gpu", "reason"),
        )
        gpus = {gpu.id: gpu for gpu in snapshot.inventory.gpus} if snapshot.inventory else {}
        for device in snapshot.devices:
            gpu, verdict = gpus[device.gpu], snapshot.verdicts[device.gpu]
            healthy.add_metric(
                (
                    self._resource,
                    device.id,
                    device.gpu,
                    str(gpu.index),
                    gpu.model or "",
                    gpu.pci_bus_id or "",
                    "" if gpu.numa.node is None else str(gpu.numa.node),
                ),
                device.health is Health.HEALTHY,
            )
            if verdict.health is Health.UNHEALTHY:
                reason.add_metric(
                    (self._resource, device.id, device.gpu, verdict.reason),
                    date(self._clock, verdict.since_s),
                )
        yield healthy
        yield reason


Probe = Callable[[], tuple[bool, list[str]]]
"""Answers 200 when True, and says the sentences, or else "ok"."""


class _Stopped(Exception):
    """Ends ``serve_forever``."""


class _Server(http.server.ThreadingHTTPServer):
    """Sleeps until there is a request or ``stop``: nothing is polled."""

    daemon_threads = True
    stopping = False

    def __init__(self, host: str, port: int, handler: type[http.server.BaseHTTPRequestHandler]):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        # Connections of an earlier process that are still winding down are no hindrance.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # HTTPServer's own asks the resolver for this host's name, which can take seconds.
        socket.socket.bind(self.socket, self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def serve(self) -> None:
        """Serve until ``stop``."""
        with contextlib.suppress(_Stopped):
            self.serve_forever(poll_interval=3600)

    def stop(self) -> None:
        """End ``serve``, from another thread."""
        self.stopping = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the wait for requests

    def service_actions(self) -> None:
        if self.stopping:
            raise _Stopped

    def handle_error(self, request: object, client_address: object) -> None:
        _log.debug("HTTP request failed", client=client_address)


class Endpoint:
    """The HTTP server, in a thread of its own.

    An address in use is no reason to stop serving GPUs: it is tried again.
    """

    def __init__(
        self,
        host: str,
        port: int,
        collector: Collector,
        healthz: Probe,
        readyz: Probe,
    ) -> None:
        self._address = host, port
        registry = CollectorRegistry()
        registry.register(collector)
        ProcessCollector(namespace="deviceplugin", registry=registry)
        self._handler = _handler(registry, healthz, readyz)
        self._server: _Server | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        """Begin to serve, or to try."""
        self._thread.start()

    def trouble(self) -> str | None:
        """What is wrong with this thread, for the liveness probe."""
        return None if self._thread.is_alive() else "the metrics thread is dead"

    def stop(self) -> None:
        """Stop listening; waits until the thread has ended."""
        self._stop.set()
        with self._lock:
            server = self._server
        if server is not None:
            server.stop()
        self._thread.join(0.5)

    def _run(self) -> None:
        complained = False
        while not self._stop.is_set():
            try:
                server = _Server(*self._address, self._handler)
            except OSError as error:
                if not complained:
                    _log.error(
                        "metrics address cannot be had, serving GPUs without it",
                        host=self._address[0],
                        port=self._address[1],
                        why=error,
                        retry_every_s=BIND_AGAIN_S,
                    )
                complained = True
                self._stop.wait(BIND_AGAIN_S)
                continue
            with self._lock:
                if self._stop.is_set():
                    server.server_close()
                    return
                self._server = server
            _log.info("metrics served", host=server.server_name, port=server.server_port)
            with server:
                server.serve()
            return


def _handler(
    registry: CollectorRegistry,
    healthz: Probe,
    readyz: Probe,
) -> type[http.server.BaseHTTPRequestHandler]:
    probes = {"/healthz": healthz, "/readyz": readyz}

    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = 5.0  # a client that says nothing holds a thread no longer

        def version_string(self) -> str:
            return "deviceplugin"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                encode, content_type = choose_encoder(self.headers.get("Accept") or "")
                self._send(HTTPStatus.OK, content_type, encode(registry))
            elif path in probes:
                good, lines = probes[path]()
                status = HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
                text = "".join(f"{line}\n" for line in lines) or "ok\n"
                self._send(status, "text/plain; charset=utf-8", text.encode())
            else:
                text = "here are /metrics, /healthz and /readyz\n"
                self._send(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", text.encode())

        def do_HEAD(self) -> None:
            self.do_GET()

        def _send(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base's name
            _log.debug("HTTP request", line=format % args, client=self.client_address[0])

    return Handler

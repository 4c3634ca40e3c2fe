"""deviceplugin.metrics"""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from deviceplugin import __version__
from deviceplugin.metrics import Endpoint, SnapshotCollector
from deviceplugin.stats import Stats
from deviceplugin.store import Store
from tests.builders import SetClock, gpu_id, snapshot

RESOURCE = "vendor.example/gpu"


class Served:
    def __init__(self, port: int) -> None:
        self.store, self.stats = Store(), Stats()
        self.clock = SetClock()
        self.clock.boottime_s = 110.0  # ten seconds after what builders.snapshot says
        self.health: tuple[bool, list[str]] = True, []
        self.readiness = False, ["waiting for GPUs", "driver: none"]
        self.endpoint = Endpoint(
            "127.0.0.1",
            port,
            SnapshotCollector(self.store, self.stats, self.clock, RESOURCE),
            lambda: self.health,
            lambda: self.readiness,
        )
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, method: str = "GET") -> tuple[int, str]:
        request = urllib.request.Request(self.url + path, method=method)  # noqa: S310  # http
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310  # http
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def samples(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        status, text = self.get("/metrics")
        assert status == 200
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served(free_port())
    made.endpoint.start()
    for _ in range(500):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", int(made.url.rpartition(":")[2]))) == 0:
                break
    yield made
    made.endpoint.stop()


def test_devices_are_counted_by_health_and_described_one_by_one(served: Served) -> None:
    served.store.publish(snapshot([0, None], sick={1: "xid-79"}))
    samples = served.samples()
    devices = "deviceplugin_devices"
    assert samples[devices, (("health", "Healthy"), ("resource", RESOURCE))] == 1
    assert samples[devices, (("health", "Unhealthy"), ("resource", RESOURCE))] == 1
    labels = {
        "device": gpu_id(0),
        "gpu": gpu_id(0),
        "index": "0",
        "model": "NVIDIA L4",
        "numa_node": "0",
        "pci_bus_id": "0000:10:00.0",
        "resource": RESOURCE,
    }
    assert samples["deviceplugin_device_healthy", tuple(sorted(labels.items()))] == 1
    reason = {"device": gpu_id(1), "gpu": gpu_id(1), "reason": "xid-79", "resource": RESOURCE}
    key = "deviceplugin_device_unhealthy_reason", tuple(sorted(reason.items()))
    assert samples[key] == 999_990.0, "since when, in seconds since the epoch"


def test_a_device_that_recovered_has_no_reason_left(served: Served) -> None:
    served.store.publish(snapshot([0], sick={0: "lost"}))
    served.store.publish(snapshot([0]))
    assert not [name for name, _ in served.samples() if name.endswith("unhealthy_reason")]


def test_counters_and_gauges_have_their_labels(served: Served) -> None:
    served.stats.add("xid_errors", gpu_id(0), "79", "unhealthy")
    served.stats.add("xid_errors", gpu_id(0), "79", "unhealthy")
    served.stats.set("registered", RESOURCE, to=1)
    samples = served.samples()
    xid = (("gpu", gpu_id(0)), ("verdict", "unhealthy"), ("xid", "79"))
    assert samples["deviceplugin_xid_errors_total", xid] == 2
    assert samples["deviceplugin_registered", (("resource", RESOURCE),)] == 1
    assert samples["deviceplugin_kubelet_restarts_total", ()] == 0
    assert samples["deviceplugin_build_info", (("version", __version__),)] == 1


def test_every_metric_has_a_help_text() -> None:
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(Store(), Stats(), SetClock(), RESOURCE))
    for family in registry.collect():
        assert family.documentation.endswith(".")


def test_probes_say_what_is_wrong(served: Served) -> None:
    assert served.get("/healthz") == (200, "ok\n")
    assert served.get("/readyz") == (503, "waiting for GPUs\ndriver: none\n")
    served.readiness = True, ["nothing to publish"]
    served.health = False, ["the monitor thread is dead"]
    assert served.get("/readyz") == (200, "nothing to publish\n")
    assert served.get("/healthz") == (503, "the monitor thread is dead\n")


def test_other_paths_and_methods_are_answered_politely(served: Served) -> None:
    assert served.get("/nope") == (404, "here are /metrics, /healthz and /readyz\n")
    assert served.get("/healthz", "HEAD") == (200, "")
    assert served.get("/healthz", "POST")[0] == 501
    assert served.get("/metrics?name=x")[0] == 200


def test_an_address_in_use_costs_only_the_endpoint() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        second = Served(taken.getsockname()[1])
        second.endpoint.start()
        assert second.endpoint.trouble() is None
        second.endpoint.stop()

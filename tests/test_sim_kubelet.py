"""deviceplugin.sim.kubelet against a plugin that does what the test says"""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from api.podresources.v1 import api_pb2 as pr
from api.podresources.v1.api_pb2_grpc import PodResourcesListerStub
from api.v1beta1 import api_pb2 as pb
from api.v1beta1.api_pb2_grpc import (
    DevicePluginServicer,
    RegistrationStub,
    add_DevicePluginServicer_to_server,
)
from deviceplugin.sim.kubelet import Container, Fault, Kubelet, Pod
from deviceplugin.sim.kubelet.devices import ENDPOINT_GRACE_S, Devices
from deviceplugin.sim.kubelet.names import is_extended_resource

R = "vendor.example/gpu"


def device(name: str, health: str = "Healthy", numa: tuple[int, ...] = ()) -> pb.Device:
    made = pb.Device(ID=name, health=health)
    for node in numa:
        made.topology.nodes.add(ID=node)
    return made


class FakePlugin(DevicePluginServicer):
    """Serves whatever is in its attributes; keeps what it was asked."""

    def __init__(self, directory: Path, name: str = "fake.sock") -> None:
        self.path = directory / name
        self.devices = [device("a"), device("b"), device("c")]
        self.options = pb.DevicePluginOptions(get_preferred_allocation_available=True)
        self.preferred: list[str] = []
        self.no_response = False
        self.error: str | None = None
        self.hold: threading.Event | None = None  # Allocate waits for it
        self.held = threading.Event()
        self.calls: list[tuple[str, list[str]]] = []
        self.asked: list[pb.ContainerPreferredAllocationRequest] = []
        self._lists: list[queue.SimpleQueue[bool]] = []
        self._workers = ThreadPoolExecutor(8)
        self._server = grpc.server(self._workers)
        add_DevicePluginServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.path}")
        self._server.start()

    def close(self) -> None:
        for changed in self._lists:
            changed.put(False)
        self._server.stop(None).wait()
        self._workers.shutdown()

    def send(self, *devices: pb.Device) -> None:
        """Change the list and send it on every stream."""
        self.devices = list(devices)
        for changed in self._lists:
            changed.put(True)

    def end_streams(self) -> None:
        for changed in self._lists:
            changed.put(False)

    def GetDevicePluginOptions(
        self, request: pb.Empty, context: grpc.ServicerContext
    ) -> pb.DevicePluginOptions:
        return self.options

    def ListAndWatch(
        self, request: pb.Empty, context: grpc.ServicerContext
    ) -> Iterator[pb.ListAndWatchResponse]:
        changed: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._lists.append(changed)
        context.add_callback(lambda: changed.put(False))
        yield pb.ListAndWatchResponse(devices=self.devices)
        while changed.get():
            yield pb.ListAndWatchResponse(devices=self.devices)

    def GetPreferredAllocation(
        self, request: pb.PreferredAllocationRequest, context: grpc.ServicerContext
    ) -> pb.PreferredAllocationResponse:
        self.asked.append(request.container_requests[0])
        response = pb.PreferredAllocationResponse()
        response.container_responses.add(deviceIDs=self.preferred)
        return response

    def Allocate(
        self, request: pb.AllocateRequest, context: grpc.ServicerContext
    ) -> pb.AllocateResponse:
        ids = list(request.container_requests[0].devices_ids)
        self.calls.append(("Allocate", ids))
        if self.hold is not None:
            self.held.set()
            self.hold.wait(10)
        if self.error is not None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.error)
        response = pb.AllocateResponse()
        if not self.no_response:
            response.container_responses.add(envs={"IDS": ",".join(ids)})
        return response

    def PreStartContainer(
        self, request: pb.PreStartContainerRequest, context: grpc.ServicerContext
    ) -> pb.PreStartContainerResponse:
        self.calls.append(("PreStartContainer", list(request.devices_ids)))
        return pb.PreStartContainerResponse()


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Kubelet]:
    with Kubelet(tmp_path / "dp", pod_resources_dir=tmp_path / "pr") as started:
        yield started


Plug = Callable[..., FakePlugin]


@pytest.fixture
def plug(kubelet: Kubelet) -> Iterator[Plug]:
    made: list[FakePlugin] = []

    def make(name: str = "fake.sock") -> FakePlugin:
        made.append(FakePlugin(kubelet.directory, name))
        return made[-1]

    yield make
    for plugin in made:
        plugin.close()


def register(
    kubelet: Kubelet,
    endpoint: str = "fake.sock",
    resource: str = R,
    version: str = "v1beta1",
    timeout_s: float = 15,
) -> None:
    request = pb.RegisterRequest(version=version, endpoint=endpoint, resource_name=resource)
    with grpc.insecure_channel(f"unix:{kubelet.directory / 'kubelet.sock'}") as channel:
        RegistrationStub(channel).Register(request, timeout=timeout_s)


def refused(kubelet: Kubelet, **how: str) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        register(kubelet, **how)  # type: ignore[arg-type] # all are texts here
    assert caught.value.code() is grpc.StatusCode.UNKNOWN
    return caught.value.details() or ""


@pytest.fixture
def plugin(kubelet: Kubelet, plug: Plug) -> FakePlugin:
    """One that is registered, with devices a, b and c."""
    made = plug()
    register(kubelet)
    assert kubelet.wait_allocatable(R, 3)
    return made


def pod(name: str, *counts: int, init: tuple[int, ...] = ()) -> Pod:
    return Pod(
        name,
        tuple(Container(f"c{n}", {R: count}) for n, count in enumerate(counts)),
        tuple(Container(f"i{n}", {R: count}) for n, count in enumerate(init)),
    )


# --- start --------------------------------------------------------------------------


def test_a_start_wipes_sockets_and_leaves_files(tmp_path: Path) -> None:
    directory = tmp_path / "dp"
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(directory / "old.sock"))
    (directory / "plain").write_text("x")
    (directory / "folder").mkdir()
    with Kubelet(directory):
        assert {path.name for path in directory.iterdir()} == {"plain", "folder", "kubelet.sock"}


def test_a_killed_kubelet_leaves_a_socket_that_refuses(kubelet: Kubelet) -> None:
    kubelet.stop()
    assert (kubelet.directory / "kubelet.sock").is_socket()
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(str(kubelet.directory / "kubelet.sock"))


def test_a_path_too_long_for_a_socket_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too long for a unix socket"):
        Kubelet(tmp_path / ("d" * 120)).start()


# --- Register -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vendor.example/gpu", "vendor.example/GPU_1.x"])
def test_extended_resources_are_taken(name: str) -> None:
    assert is_extended_resource(name)


@pytest.mark.parametrize(
    "name",
    [
        "gpu",
        "kubernetes.io/gpu",
        "requests.vendor.example/gpu",
        "vendor.example/a/b",
        "Vendor.Example/gpu",
        "vendor_example/gpu",
    ],
)
def test_other_names_are_refused(kubelet: Kubelet, plug: Plug, name: str) -> None:
    plug()
    assert refused(kubelet, resource=name) == f'the ResourceName "{name}" is invalid'
    assert not kubelet.registered(name)


def test_only_v1beta1_is_spoken(kubelet: Kubelet, plug: Plug) -> None:
    plug()
    assert 'requested API version "v1" is not supported' in refused(kubelet, version="v1")


def test_a_plugin_that_does_not_serve_is_not_registered(kubelet: Kubelet) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        register(kubelet, timeout_s=1)
    assert caught.value.code() in (
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )
    assert not kubelet.registered(R)


def test_the_options_that_count_are_those_the_plugin_answers(
    kubelet: Kubelet, plugin: FakePlugin
) -> None:
    kubelet.admit(pod("p", 1))
    assert len(plugin.asked) == 1, "the request named no options, the plugin did"


@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.DIE, Fault.HANG])
def test_register_can_be_made_to_fail(kubelet: Kubelet, plug: Plug, fault: Fault) -> None:
    plug()
    with kubelet.misbehaving(fault), pytest.raises(grpc.RpcError):
        register(kubelet, timeout_s=0.5)
    assert not kubelet.registered(R)


@pytest.mark.parametrize("fault", [Fault.NO_DIAL_BACK, Fault.NO_STREAM])
def test_register_can_be_made_to_agree_without_devices(
    kubelet: Kubelet, plug: Plug, fault: Fault
) -> None:
    plug()
    with kubelet.misbehaving(fault):
        register(kubelet)
    assert kubelet.capacity(R) == 0
    assert not kubelet.happened("list")


# --- lists ------------------------------------------------------------------------------


def test_only_the_exact_word_counts_as_healthy(kubelet: Kubelet, plugin: FakePlugin) -> None:
    plugin.send(device("a"), device("b", "healthy"), device("c", ""), device("d", "Unhealthy"))
    assert kubelet.wait_allocatable(R, 1)
    assert kubelet.capacity(R) == 4


def test_a_device_listed_twice_with_two_healths_is_counted_twice(
    kubelet: Kubelet, plugin: FakePlugin
) -> None:
    plugin.send(device("a"), device("a", "Unhealthy"))
    assert kubelet.wait_allocatable(R, 1)
    assert kubelet.capacity(R) == 2
    assert kubelet.devices(R)["a"].health == "Unhealthy"


def test_an_empty_list_is_no_devices_at_all(kubelet: Kubelet, plugin: FakePlugin) -> None:
    plugin.send()
    assert kubelet.wait_allocatable(R, 0)
    assert kubelet.capacity(R) == 0


def test_a_stream_that_ends_costs_allocatable_and_is_never_opened_again(
    kubelet: Kubelet, plugin: FakePlugin
) -> None:
    plugin.end_streams()
    assert kubelet.wait_allocatable(R, 0)
    assert kubelet.capacity(R) == 3
    assert not kubelet.registered(R)
    assert len(kubelet.happened("registered")) == 1


def test_capacity_follows_after_five_minutes() -> None:
    devices = Devices()
    devices.add(R)
    devices.update(R, [device("a")])
    devices.stop(R, 100.0)
    assert devices.capacity(R, 100.0 + ENDPOINT_GRACE_S - 1) == 1
    assert devices.capacity(R, 100.0 + ENDPOINT_GRACE_S) == 0


def test_a_message_over_four_mebibytes_ends_the_stream(
    kubelet: Kubelet, plugin: FakePlugin
) -> None:
    plugin.send(*(device(f"{n:050d}") for n in range(70_000)))
    assert kubelet.wait_allocatable(R, 0)
    assert "ResourceExhausted" in kubelet.happened("stream ended")[-1].detail


def test_the_end_of_an_old_stream_disconnects_a_newer_registration(
    kubelet: Kubelet, plugin: FakePlugin, plug: Plug
) -> None:
    plug("new.sock")
    register(kubelet, "new.sock")
    assert kubelet.wait_for(lambda: len(kubelet.happened("list")) == 2)
    assert kubelet.allocatable(R) == 3
    plugin.end_streams()
    assert kubelet.wait_allocatable(R, 0)
    assert not kubelet.registered(R)


def test_a_stream_can_be_dropped(kubelet: Kubelet, plugin: FakePlugin) -> None:
    kubelet.drop_stream(R)
    assert kubelet.wait_allocatable(R, 0)
    assert plugin.path.exists()


def test_an_allocated_device_that_vanishes_would_crash_the_kubelet(
    kubelet: Kubelet, plugin: FakePlugin
) -> None:
    assert kubelet.admit(pod("p", 3)).admitted
    plugin.send(device("a"), device("b"))
    assert kubelet.wait_allocatable(R, 2)
    assert kubelet.wait_for(lambda: bool(kubelet.happened("crash")))
    assert kubelet.crashes == [f"{R}: allocated but no longer listed: ['c']"]


# --- admission ----------------------------------------------------------------------------


def test_the_whole_free_set_is_offered_and_the_answer_is_followed(
    kubelet: Kubelet, plugin: FakePlugin
) -> None:
    plugin.preferred = ["c", "b"]
    admission = kubelet.admit(pod("p", 2))
    (grant,) = admission.grants
    assert grant.devices == ("b", "c")
    assert dict(grant.response.envs) == {"IDS": "b,c"}
    (asked,) = plugin.asked
    assert list(asked.available_deviceIDs) == ["a", "b", "c"]
    assert (list(asked.must_include_deviceIDs), asked.allocation_size) == ([], 2)


@pytest.mark.parametrize(
    ("preferred", "devices"),
    [
        (["c"], ("a", "c")),
        (["x", "y"], ("a", "b")),
        (["c", "b", "a"], ("a", "b")),
        ([], ("a", "b")),
    ],
)
def test_answers_that_do_not_fit_are_filled_up_or_cut(
    kubelet: Kubelet, plugin: FakePlugin, preferred: list[str], devices: tuple[str, ...]
) -> None:
    plugin.preferred = preferred
    assert kubelet.admit(pod("p", 2)).grants[0].devices == devices


def test_what_is_held_is_not_given_out_until_it_is_released(
    kubelet: Kubelet, plugin: FakePlugin
) -> None:
    first = pod("first", 2)
    assert kubelet.admit(first).admitted
    refusal = kubelet.admit(pod("second", 2))
    assert not refusal.admitted
    assert refusal.reason == "UnexpectedAdmissionError"
    assert refusal.message == (
        f"Allocate failed due to requested number of devices unavailable for {R}."
        " Requested: 2, Available: 1, which is unexpected"
    )
    kubelet.remove(first)
    assert kubelet.admit(pod("third", 3)).admitted


def test_an_error_of_the_plugin_fails_the_pod_and_frees_its_devices(
    kubelet: Kubelet, plugin: FakePlugin
) -> None:
    plugin.error = "unhealthy: a (xid-79)"
    refusal = kubelet.admit(pod("p", 2))
    assert refusal.message == (
        "Allocate failed due to rpc error: code = FailedPrecondition"
        " desc = unhealthy: a (xid-79), which is unexpected"
    )
    plugin.error = None
    assert kubelet.admit(pod("p", 3)).admitted


def test_an_answer_without_a_container_leaks_devices_until_a_pod_goes_away(
    kubelet: Kubelet, plugin: FakePlugin
) -> None:
    other = pod("other", 1)
    assert kubelet.admit(other).admitted
    plugin.no_response = True
    assert not kubelet.admit(pod("p", 1)).admitted
    plugin.no_response = False
    assert not kubelet.admit(pod("q", 2)).admitted, "one is leaked"
    kubelet.remove(other)
    assert kubelet.admit(pod("q", 3)).admitted


def test_devices_of_init_containers_are_used_again(kubelet: Kubelet, plugin: FakePlugin) -> None:
    plugin.preferred = ["c", "b"]
    admission = kubelet.admit(pod("p", 3, init=(2,)))
    init, main = admission.grants
    assert init.devices == ("b", "c")
    assert main.devices == ("a", "b", "c")
    assert list(plugin.asked[-1].must_include_deviceIDs) == ["b", "c"]
    assert plugin.asked[-1].allocation_size == 3


def test_a_resource_that_nobody_registered_is_refused(kubelet: Kubelet) -> None:
    refusal = kubelet.admit(pod("p", 1))
    assert refusal.message == (
        f"Allocate failed due to can't allocate unregistered device {R}, which is unexpected"
    )


def test_pre_start_is_called_when_asked_for_and_at_a_restart_in_place(
    kubelet: Kubelet, plug: Plug
) -> None:
    plugin = plug()
    plugin.options = pb.DevicePluginOptions(pre_start_required=True)
    register(kubelet)
    assert kubelet.wait_allocatable(R, 3)
    running = pod("p", 1)
    assert kubelet.admit(running).admitted
    (grant,) = kubelet.restart_container(running, running.containers[0])
    assert dict(grant.response.envs) == {"IDS": "a"}
    assert plugin.calls == [
        ("Allocate", ["a"]),
        ("PreStartContainer", ["a"]),
        ("PreStartContainer", ["a"]),
    ]


def test_an_aligner_narrows_the_offer(tmp_path: Path) -> None:
    with Kubelet(tmp_path / "dp", align=lambda *_: frozenset({1})) as kubelet:
        plugin = FakePlugin(kubelet.directory)
        plugin.devices = [device("a", numa=(0,)), device("b", numa=(1,)), device("c", numa=(1,))]
        plugin.preferred = ["c"]
        register(kubelet)
        assert kubelet.wait_allocatable(R, 3)
        (grant,) = kubelet.admit(pod("p", 1)).grants
        assert (grant.devices, grant.numa_nodes) == (("c",), (1,))
        assert list(plugin.asked[0].available_deviceIDs) == ["b", "c"]
        (rest,) = kubelet.admit(pod("q", 2)).grants
        assert rest.devices == ("a", "b")
        assert list(plugin.asked[1].must_include_deviceIDs) == ["b"], "aligned ones come first"
        plugin.close()


def test_lists_arrive_while_an_admission_waits_for_the_plugin(
    kubelet: Kubelet, plugin: FakePlugin
) -> None:
    plugin.hold = threading.Event()
    admitting = threading.Thread(target=kubelet.admit, args=(pod("p", 1),))
    admitting.start()
    assert plugin.held.wait(5)
    plugin.send(device("a"))
    assert kubelet.wait_allocatable(R, 1)
    assert admitting.is_alive()
    plugin.hold.set()
    admitting.join(5)


# --- restart --------------------------------------------------------------------------------


def test_a_killed_kubelet_does_not_go_on_dialling(kubelet: Kubelet) -> None:
    def ask() -> None:
        with pytest.raises(grpc.RpcError):
            register(kubelet, "nobody.sock")

    asking = threading.Thread(target=ask)
    asking.start()
    assert kubelet.wait_for(lambda: kubelet.register_calls == 1)
    kubelet.stop()
    asking.join(5)
    (refused,) = kubelet.happened("refused")
    assert refused.detail == "the kubelet is killed"


def test_after_a_restart_nothing_is_registered_and_pods_keep_what_they_hold(
    kubelet: Kubelet, plugin: FakePlugin, plug: Plug
) -> None:
    running = pod("running", 2)
    assert kubelet.admit(running).grants[0].devices == ("a", "b")
    kubelet.restart()
    assert (kubelet.allocatable(R), kubelet.capacity(R)) == (0, 0)
    assert not kubelet.admit(pod("early", 1)).admitted
    plug("new.sock")
    register(kubelet, "new.sock")
    assert kubelet.wait_allocatable(R, 3)
    assert kubelet.admit(pod("p", 1)).grants[0].devices == ("c",)
    kubelet.remove(running)
    assert kubelet.admit(pod("q", 2)).grants[0].devices == ("a", "b")


def test_the_checkpoint_has_the_kubelets_layout(kubelet: Kubelet, plugin: FakePlugin) -> None:
    plugin.send(device("a", numa=(0,)), device("b", numa=(0, 1)), device("c"))
    assert kubelet.wait_for(lambda: len(kubelet.happened("list")) == 2)
    running = pod("p", 3)
    kubelet.admit(running)
    content = json.loads((kubelet.directory / "kubelet_internal_checkpoint").read_text())
    (entry,) = content["Data"]["PodDeviceEntries"]
    assert entry["PodUID"] == running.uid
    assert (entry["ContainerName"], entry["ResourceName"]) == ("c0", R)
    assert entry["DeviceIDs"] == {"0": ["a", "b"], "1": ["b"], "-1": ["c"]}
    assert content["Data"]["RegisteredDevices"] == {R: ["a", "b", "c"]}


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"Data": {}, "Checksum": 1}'])
def test_a_damaged_checkpoint_counts_as_none(
    kubelet: Kubelet, plugin: FakePlugin, plug: Plug, damage: str
) -> None:
    kubelet.admit(pod("p", 2))
    kubelet.stop()
    (kubelet.directory / "kubelet_internal_checkpoint").write_text(damage)
    kubelet.start()
    plug("new.sock")
    register(kubelet, "new.sock")
    assert kubelet.wait_allocatable(R, 3)
    assert kubelet.admit(pod("q", 3)).admitted


# --- pod resources ----------------------------------------------------------------------------


def test_pod_resources_say_who_holds_what(kubelet: Kubelet, plugin: FakePlugin) -> None:
    plugin.send(device("a", numa=(0, 1)), device("b"), device("c", "Unhealthy"))
    assert kubelet.wait_allocatable(R, 2)
    kubelet.admit(pod("p", 2))
    assert kubelet.pod_resources_dir is not None
    with grpc.insecure_channel(f"unix:{kubelet.pod_resources_dir / 'kubelet.sock'}") as channel:
        stub = PodResourcesListerStub(channel)
        (listed,) = stub.List(pr.ListPodResourcesRequest(), timeout=5).pod_resources
        got = stub.Get(pr.GetPodResourcesRequest(pod_name="p", pod_namespace="default"), timeout=5)
        allocatable = stub.GetAllocatableResources(pr.AllocatableResourcesRequest(), timeout=5)
        with pytest.raises(grpc.RpcError):
            stub.Get(pr.GetPodResourcesRequest(pod_name="q", pod_namespace="default"), timeout=5)
    assert (listed.name, listed.namespace) == ("p", "default")
    assert got.pod_resources == listed

    def entries(devices: object) -> list[tuple[list[str], list[int]]]:
        return [
            (list(d.device_ids), [n.ID for n in d.topology.nodes])
            for d in devices  # type: ignore[attr-defined] # a repeated field
        ]

    both = [(["a"], [0]), (["a"], [1]), (["b"], [])]
    assert entries(listed.containers[0].devices) == both
    assert entries(allocatable.devices) == both


def test_a_present_but_empty_topology_hides_a_device_from_pod_resources(
    kubelet: Kubelet, plugin: FakePlugin
) -> None:
    hidden = pb.Device(ID="a", health="Healthy", topology=pb.TopologyInfo())
    plugin.send(hidden, device("b"))
    assert kubelet.wait_allocatable(R, 2)
    assert kubelet.pod_resources_dir is not None
    with grpc.insecure_channel(f"unix:{kubelet.pod_resources_dir / 'kubelet.sock'}") as channel:
        stub = PodResourcesListerStub(channel)
        shown = stub.GetAllocatableResources(pr.AllocatableResourcesRequest(), timeout=5)
    assert [list(entry.device_ids) for entry in shown.devices] == [["b"]]

"""deviceplugin.servicer and deviceplugin.server, over a real socket"""

from __future__ import annotations

import contextlib
import queue
import resource
import socket
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest

from api.v1beta1 import api_pb2 as pb
from api.v1beta1.api_pb2_grpc import DevicePluginStub
from deviceplugin import server
from deviceplugin.errors import ServeError
from deviceplugin.servicer import MAX_STREAMS, Servicer
from deviceplugin.stats import Stats
from deviceplugin.store import Store
from tests.builders import gpu_id, snapshot

STEM = "vendor.example_gpu"


@dataclass
class Plugin:
    """A served store, and a client for it."""

    directory: Path
    check_before_start: bool = False
    store: Store = field(default_factory=Store)
    stats: Stats = field(default_factory=Stats)
    stream_counts: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.store.publish(snapshot([0, 0, 1, None], sick={1: "xid-79"}))
        servicer = Servicer(
            self.store,
            self.stats,
            self.stream_counts.put,
            check_before_start=self.check_before_start,
        )
        self.server = server.PluginServer(self.directory / server.socket_name(STEM), servicer)
        self.channel = grpc.insecure_channel(f"unix:{self.server.path}")
        self.stub = DevicePluginStub(self.channel)

    def close(self) -> None:
        self.channel.close()
        self.server.stop()

    def wait_streams(self, count: int) -> None:
        """Until so many are open; the counts come in order."""
        while self.stream_counts.get(timeout=5) != count:
            pass


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Plugin]:
    with contextlib.closing(Plugin(tmp_path)) as made:
        yield made


def health_of(message: pb.ListAndWatchResponse) -> list[str]:
    return [device.health for device in message.devices]


def test_the_options_say_that_preferences_can_be_asked_for(plugin: Plugin) -> None:
    options = plugin.stub.GetDevicePluginOptions(pb.Empty(), timeout=5)
    assert options.get_preferred_allocation_available
    assert not options.pre_start_required


def test_a_stream_starts_with_the_whole_list(plugin: Plugin) -> None:
    stream = plugin.stub.ListAndWatch(pb.Empty(), timeout=5)
    first = next(stream)
    assert [device.ID for device in first.devices] == [gpu_id(n) for n in range(4)]
    assert health_of(first) == ["Healthy", "Unhealthy", "Healthy", "Healthy"]
    stream.cancel()


def test_every_open_stream_gets_every_change(plugin: Plugin) -> None:
    streams = [plugin.stub.ListAndWatch(pb.Empty(), timeout=10) for _ in range(3)]
    for stream in streams:
        next(stream)
    plugin.store.publish(snapshot([0, 0, 1, None], sick={0: "lost", 1: "xid-79"}))
    for stream in streams:
        assert health_of(next(stream)) == ["Unhealthy", "Unhealthy", "Healthy", "Healthy"]
        stream.cancel()


def test_what_changes_nothing_in_the_list_is_not_sent(plugin: Plugin) -> None:
    stream = plugin.stub.ListAndWatch(pb.Empty(), timeout=10)
    next(stream)
    plugin.store.publish(snapshot([0, 0, 1, None], sick={1: "xid-48"}))  # another reason
    plugin.store.publish(snapshot([0, 0, 1, None]))
    assert health_of(next(stream)) == ["Healthy"] * 4
    assert plugin.stats.counts("list_updates") == {(): 2}
    stream.cancel()


def test_a_dead_stream_keeps_no_thread_and_takes_nothing_from_a_live_one(plugin: Plugin) -> None:
    live = plugin.stub.ListAndWatch(pb.Empty(), timeout=20)
    next(live)
    for _ in range(3 * MAX_STREAMS):
        dead = plugin.stub.ListAndWatch(pb.Empty(), timeout=10)
        next(dead)
        dead.cancel()
        plugin.wait_streams(1)
    plugin.store.publish(snapshot([0]))
    assert health_of(next(live)) == ["Healthy"]
    live.cancel()
    plugin.wait_streams(0)


def test_many_streams_leave_a_thread_for_the_other_calls(plugin: Plugin) -> None:
    streams = [plugin.stub.ListAndWatch(pb.Empty(), timeout=20) for _ in range(MAX_STREAMS)]
    for stream in streams:
        next(stream)
    with pytest.raises(grpc.RpcError) as refused:
        next(plugin.stub.ListAndWatch(pb.Empty(), timeout=5))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    plugin.stub.GetDevicePluginOptions(pb.Empty(), timeout=5)
    for stream in streams:
        stream.cancel()
    plugin.wait_streams(0)


def allocate(plugin: Plugin, *containers: list[str]) -> pb.AllocateResponse:
    requests = [pb.ContainerAllocateRequest(devices_ids=ids) for ids in containers]
    return plugin.stub.Allocate(pb.AllocateRequest(container_requests=requests), timeout=5)


def test_allocate_hands_out_the_variable_and_the_device_nodes(plugin: Plugin) -> None:
    (response,) = allocate(plugin, [gpu_id(2), gpu_id(0), gpu_id(2)]).container_responses
    assert dict(response.envs) == {"NVIDIA_VISIBLE_DEVICES": f"{gpu_id(0)},{gpu_id(2)}"}
    assert [node.host_path for node in response.devices] == [
        "/dev/nvidia0",
        "/dev/nvidia2",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
    ]


def test_several_containers_of_one_call_are_answered_in_order(plugin: Plugin) -> None:
    one, other = allocate(plugin, [gpu_id(2)], [gpu_id(0)]).container_responses
    assert one.envs["NVIDIA_VISIBLE_DEVICES"] == gpu_id(2)
    assert other.envs["NVIDIA_VISIBLE_DEVICES"] == gpu_id(0)


@pytest.mark.parametrize(
    ("containers", "code", "text"),
    [
        ([], grpc.StatusCode.INVALID_ARGUMENT, "no container is named"),
        ([[]], grpc.StatusCode.INVALID_ARGUMENT, "no devices are named"),
        ([["GPU-x"]], grpc.StatusCode.INVALID_ARGUMENT, "not published here: GPU-x"),
        (
            [[gpu_id(1)]],
            grpc.StatusCode.FAILED_PRECONDITION,
            f"unhealthy: {gpu_id(1)} (xid-79)",
        ),
    ],
)
def test_allocate_refuses_with_a_code_and_a_name(
    plugin: Plugin, containers: list[list[str]], code: grpc.StatusCode, text: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        allocate(plugin, *containers)
    assert caught.value.code() is code
    assert text in (caught.value.details() or "")
    assert plugin.stats.counts("rpc") == {("Allocate", code.name): 1}


def prefer(
    plugin: Plugin, *asked: tuple[list[int], list[int], int]
) -> pb.PreferredAllocationResponse:
    request = pb.PreferredAllocationRequest()
    for available, must, size in asked:
        request.container_requests.add(
            available_deviceIDs=[gpu_id(n) for n in available],
            must_include_deviceIDs=[gpu_id(n) for n in must],
            allocation_size=size,
        )
    return plugin.stub.GetPreferredAllocation(request, timeout=5)


def test_preferences_are_answered_for_each_container(plugin: Plugin) -> None:
    response = prefer(plugin, ([0, 2, 3], [], 1), ([0, 1, 2], [2], 2))
    assert [list(c.deviceIDs) for c in response.container_responses] == [
        [gpu_id(0)],
        [gpu_id(0), gpu_id(2)],
    ]


def test_a_preference_that_cannot_be_is_invalid(plugin: Plugin) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        prefer(plugin, ([0], [2], 1))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert gpu_id(2) in (caught.value.details() or "")


def test_before_a_start_the_gpus_are_checked_if_that_is_wanted(tmp_path: Path) -> None:
    with contextlib.closing(Plugin(tmp_path, check_before_start=True)) as plugin:
        assert plugin.stub.GetDevicePluginOptions(pb.Empty(), timeout=5).pre_start_required
        well = pb.PreStartContainerRequest(devices_ids=[gpu_id(0)])
        assert plugin.stub.PreStartContainer(well, timeout=5) == pb.PreStartContainerResponse()
        sick = pb.PreStartContainerRequest(devices_ids=[gpu_id(0), gpu_id(1)])
        with pytest.raises(grpc.RpcError) as caught:
            plugin.stub.PreStartContainer(sick, timeout=5)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert caught.value.details() == f"unhealthy: {gpu_id(1)} (xid-79)"


def test_pre_start_is_answered_although_nobody_should_ask(plugin: Plugin) -> None:
    request = pb.PreStartContainerRequest(devices_ids=[gpu_id(0)])
    assert plugin.stub.PreStartContainer(request, timeout=5) == pb.PreStartContainerResponse()


def test_a_fault_of_ours_is_answered_as_such(plugin: Plugin) -> None:
    plugin.store.publish(replace(snapshot([0], sick={0: "lost"}), verdicts={}))
    with pytest.raises(grpc.RpcError) as caught:
        allocate(plugin, [gpu_id(0)])
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == "KeyError in the device plugin"
    assert plugin.stats.counts("rpc") == {("Allocate", "INTERNAL"): 1}
    plugin.stub.GetDevicePluginOptions(pb.Empty(), timeout=5)


def test_stop_ends_streams_removes_the_socket_and_leaves_no_thread(plugin: Plugin) -> None:
    stream = plugin.stub.ListAndWatch(pb.Empty(), timeout=20)
    next(stream)
    plugin.server.stop()
    with pytest.raises(grpc.RpcError):
        next(stream)
    assert not plugin.server.path.exists()
    plugin.wait_streams(0)


def test_the_socket_is_for_its_owner_alone(plugin: Plugin) -> None:
    assert stat.S_IMODE(plugin.server.path.stat().st_mode) == 0o600


def test_a_wiped_or_replaced_socket_is_noticed(plugin: Plugin) -> None:
    assert plugin.server.in_place()
    plugin.server.path.unlink()
    assert not plugin.server.in_place()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(plugin.server.path))
        assert not plugin.server.in_place()


def test_an_old_server_that_stops_late_does_not_take_the_new_ones_socket(tmp_path: Path) -> None:
    old, new = Plugin(tmp_path), Plugin(tmp_path)
    old.close()
    assert new.server.in_place()
    new.stub.GetDevicePluginOptions(pb.Empty(), timeout=5)
    new.close()


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    threads = threading.active_count()
    with pytest.raises(ServeError, match="/no does not exist"):
        server.PluginServer(tmp_path / "no/x.sock", Servicer(Store(), Stats()))
    assert threading.active_count() == threads


def test_only_dead_sockets_of_our_own_name_are_removed(tmp_path: Path, plugin: Plugin) -> None:
    def dead(name: str) -> Path:
        with socket.socket(socket.AF_UNIX) as closed:
            closed.bind(str(tmp_path / name))
        return tmp_path / name

    ours = dead(f"{STEM}.0123abcd.sock")
    others = [
        dead("vendor.example_gpu-h100.0123abcd.sock"),
        dead("other.sock"),
        dead(f"{STEM}.0123abcd.sock.bak"),
    ]
    plain = tmp_path / f"{STEM}.89abcdef.sock"
    plain.write_text("no socket")
    assert server.remove_stale(tmp_path, STEM) == [plugin.server.path.name]
    assert not ours.exists()
    assert all(path.exists() for path in [*others, plain, plugin.server.path])


def test_a_missing_directory_has_no_stale_sockets(tmp_path: Path) -> None:
    assert server.remove_stale(tmp_path / "no", STEM) == []


def test_what_keeps_a_socket_from_being_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServeError, match="file is not a directory"):
        server.PluginServer(tmp_path / "file/x.sock", Servicer(Store(), Stats()))
    (tmp_path / "x.sock").mkdir()
    with pytest.raises(ServeError, match="Address already in use"):
        server.PluginServer(tmp_path / "x.sock", Servicer(Store(), Stats()))


# --- the server looks at itself ------------------------------------------------------------------


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _check(plugin: Plugin, told: list[str]) -> None:
    """One check to its end."""
    plugin.server.check(told.append)
    for _ in range(1000):
        if plugin.server._channel is None:
            return
        time.sleep(0.01)
    raise AssertionError("the check does not end")


def test_a_server_that_answers_itself_is_well(plugin: Plugin) -> None:
    told: list[str] = []
    _check(plugin, told)
    files = _open_files()
    for _ in range(5):
        _check(plugin, told)
    assert told == []
    for _ in range(500):
        if _open_files() <= files:
            return
        time.sleep(0.01)
    raise AssertionError(f"{files} open files became {_open_files()}")


def test_a_server_that_does_not_answer_twice_is_told(plugin: Plugin) -> None:
    told: list[str] = []
    _check(plugin, told)
    plugin.server._server.stop(None).wait(5)
    _check(plugin, told)
    assert told == []
    _check(plugin, told)
    assert told == ["our own server does not answer"]


def test_a_server_that_answers_between_two_failures_is_well(plugin: Plugin) -> None:
    told: list[str] = []
    plugin.server._unanswered = 1  # the machine was asleep
    _check(plugin, told)
    plugin.server._server.stop(None).wait(5)
    _check(plugin, told)
    assert told == []


def test_a_process_without_a_file_left_to_open_is_not_taken_for_dead(plugin: Plugin) -> None:
    told: list[str] = []
    _check(plugin, told)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4, hard))
    try:
        for _ in range(3):
            _check(plugin, told)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert told == []

"""The daemon as a process, from the driver library to the kubelet, over real sockets."""

from __future__ import annotations

import json
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import psutil
import pytest

from api.v1beta1 import api_pb2 as pb
from api.v1beta1.api_pb2_grpc import DevicePluginStub
from deviceplugin.sim import profile
from deviceplugin.sim.kubelet import Fault
from tests import fakenvml
from tests.daemon import RESOURCE, Daemon, Node, command, pod
from tests.machine import Machine

H100X8 = ("--simulate", "h100x8")


# --- the driver's side ----------------------------------------------------------------


def test_gpus_are_discovered_registered_and_handed_out(node: Node, machine: Machine) -> None:
    node.kubelet.start()
    daemon = machine.start(node)
    node.wait_allocatable(8)
    listed = node.kubelet.devices(RESOURCE)
    assert {name: [n.ID for n in device.topology.nodes] for name, device in listed.items()} == {
        machine.id(number): [number // 4] for number in range(8)
    }
    (grant,) = node.kubelet.admit(pod("train", 2)).grants
    assert set(grant.devices) == {machine.id(0), machine.id(1)}
    assert grant.numa_nodes == (0,)
    assert dict(grant.response.envs) == {
        "NVIDIA_VISIBLE_DEVICES": f"{machine.id(0)},{machine.id(1)}"
    }
    assert [(d.host_path, d.container_path, d.permissions) for d in grant.response.devices] == [
        (path, path, "rw")
        for path in ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm")
    ]
    daemon.wait_ready()
    assert daemon.get("/healthz") == (200, "ok\n")
    assert daemon.stop() == 0
    assert daemon.garbage == [], "every line of the log is JSON"


def test_no_call_of_the_kubelet_reaches_the_driver(node: Node, machine: Machine) -> None:
    node.kubelet.start()
    machine.start(node, "--poll-interval", "3600")
    node.wait_allocatable(8)
    machine.gpus.await_call("nvmlEventSetWait_v2", count=2)
    machine.gpus.forget_calls()
    for number in range(4):
        assert node.kubelet.admit(pod(f"p{number}", 2)).admitted
    assert set(machine.gpus.calls()) <= {"nvmlEventSetWait_v2"}


def test_a_fatal_xid_withdraws_the_gpu_and_its_pod_runs_on(node: Node, machine: Machine) -> None:
    node.kubelet.start()
    daemon = machine.start(node)
    node.wait_allocatable(8)
    assert node.kubelet.admit(pod("holds-0-to-3", 4)).admitted
    machine.gpus.xid(0, 79)
    node.wait_allocatable(7)
    assert node.kubelet.devices(RESOURCE)[machine.id(0)].health == "Unhealthy"
    assert node.kubelet.capacity(RESOURCE) == 8, "the device stays in the list"
    assert node.kubelet.crashes == []
    event = daemon.event("GPU unhealthy, not offered any more")
    assert (event["gpu"], event["reason"]) == (machine.id(0), "xid-79")
    assert f'gpu="{machine.id(0)}",reason="xid-79"' in daemon.get("/metrics")[1]
    refused = node.kubelet.admit(pod("five", 5))
    assert "Requested: 5, Available: 4" in refused.message


def test_an_application_error_withdraws_nothing(node: Node, machine: Machine) -> None:
    node.kubelet.start()
    daemon = machine.start(node)
    node.wait_allocatable(8)
    machine.gpus.xid(2, 13)
    machine.gpus.xid(None, 79)
    machine.gpus.xid(3, 79, gi=1, ci=0)
    daemon.event("Xid error", gpu=machine.id(2), xid=13)
    daemon.event("Xid error of a GPU that is not ours", xid=79)
    daemon.event("Xid error", gpu=machine.id(3), gi=1, ci=0)
    assert node.kubelet.allocatable(RESOURCE) == 8
    assert len(node.kubelet.happened("list")) == 1


def test_an_unhealthy_device_that_a_racing_kubelet_wants_is_refused(
    node: Node, machine: Machine
) -> None:
    node.kubelet.start()
    machine.start(node)
    node.wait_allocatable(8)
    machine.gpus.xid(0, 79)
    node.wait_allocatable(7)
    (name,) = node.sockets()
    with grpc.insecure_channel(f"unix:{node.kubelet.directory / name}") as channel:
        request = pb.AllocateRequest()
        request.container_requests.add(devices_ids=[machine.id(0)])
        with pytest.raises(grpc.RpcError) as caught:
            DevicePluginStub(channel).Allocate(request, timeout=5)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.details() == f"unhealthy: {machine.id(0)} (xid-79)"


def test_a_gpu_that_is_lost_without_a_word_is_found_and_comes_back(
    node: Node, machine: Machine
) -> None:
    node.kubelet.start()
    machine.start(node)
    node.wait_allocatable(8)
    machine.gpus.lose(5)
    node.wait_allocatable(7)
    assert node.kubelet.devices(RESOURCE)[machine.id(5)].health == "Unhealthy"
    machine.gpus.restore(5)
    node.wait_allocatable(8)


def test_a_gpu_that_is_lost_at_the_start_costs_only_itself(node: Node, machine: Machine) -> None:
    machine.gpus.lose(2)
    node.kubelet.start()
    daemon = machine.start(node)
    node.wait_allocatable(7)
    assert daemon.event("GPU unreadable", index=2)["code"] == "lost"
    machine.gpus.restore(2)
    node.wait_allocatable(8)


def test_a_driver_of_another_version_is_waited_for(node: Node, machine: Machine) -> None:
    machine.gpus.mismatch()
    node.kubelet.start()
    daemon = machine.start(node)
    daemon.wait_ready("driver library and kernel driver differ in version")
    assert daemon.get("/healthz") == (200, "ok\n")
    assert node.kubelet.register_calls == 0
    machine.gpus.mismatch(False)
    node.wait_allocatable(8)
    daemon.wait_ready()


def test_gpus_that_come_late_are_found(node: Node, fake_library: Path) -> None:
    machine = Machine(node.directory, fake_library, fakenvml.FakeNode(node.directory / "nvml"))
    node.kubelet.start()
    daemon = machine.start(node)
    daemon.wait_ready()
    assert daemon.get("/readyz") == (200, "nothing to publish: the driver lists no GPU\n")
    machine.gpus.put(0, fakenvml.FakeGpu("GPU-late", "00000000:1B:00.0"))
    node.wait_allocatable(1)


def test_no_driver_at_all_is_said_and_waited_for(node: Node) -> None:
    node.kubelet.start()
    (node.directory / "nothing").mkdir()
    root = ("--driver-root", str(node.directory / "nothing"))
    daemon = node.start(*root)
    answer = daemon.wait_ready()
    assert answer.startswith("nothing to publish: no libnvidia-ml.so.1 below")
    status = command("status", "--state-dir", str(node.directory / "state")).stdout
    assert status.startswith(f"{RESOURCE}: idle, pid ")
    assert daemon.get("/healthz") == (200, "ok\n")
    assert node.kubelet.register_calls == 0
    assert daemon.stop() == 0
    daemon = node.start(*root, "--require-gpu")
    answer = daemon.wait_ready("no libnvidia-ml.so.1 below")
    assert answer.startswith(f"{RESOURCE}: waiting for GPUs\n")
    assert daemon.get("/healthz") == (200, "ok\n")
    assert daemon.stop() == 0


def test_an_older_driver_library_costs_only_what_it_cannot_tell(
    node: Node, machine: Machine, tmp_path: Path
) -> None:
    older = fakenvml.build(
        tmp_path,
        frozenset(
            {
                "nvmlDeviceGetTopologyCommonAncestor",
                "nvmlDeviceGetNvLinkRemoteDeviceType",
                "nvmlDeviceGetMigMode",
                "nvmlSystemGetCudaDriverVersion_v2",
                "nvmlDeviceGetMinorNumber",
            }
        ),
    )
    for number, gpu in machine.gpus.gpus.items():
        told = node.directory / f"proc/driver/nvidia/gpus/{gpu.sysfs_id}/information"
        told.parent.mkdir(parents=True)
        told.write_text(f"Model:\t\t NVIDIA\nDevice Minor: \t {number}\n")
    machine.flags = (*machine.flags, "--driver-root", str(older.parent))
    node.kubelet.start()
    machine.start(node)
    node.wait_allocatable(8)
    machine.gpus.xid(7, 79)
    node.wait_allocatable(7)
    (grant,) = node.kubelet.admit(pod("p", 1)).grants
    assert grant.response.devices[0].host_path == "/dev/nvidia4", "the host tells the minor number"


@pytest.mark.parametrize("function", ["nvmlEventSetWait_v2", "nvmlDeviceGetMemoryInfo"])
def test_a_driver_that_hangs_blocks_neither_pods_nor_the_stop(
    node: Node, machine: Machine, function: str
) -> None:
    node.kubelet.start()
    daemon = machine.start(node)
    node.wait_allocatable(8)
    machine.gpus.forget_calls()
    machine.gpus.hang(function)
    machine.gpus.await_call(function if "Event" in function else f"{function} 0")
    assert node.kubelet.admit(pod("p", 2)).admitted
    node.kubelet.restart()
    node.wait_allocatable(8)
    assert daemon.get("/healthz") == (200, "ok\n"), "the driver's state is no reason to be killed"
    assert daemon.stop() == 0
    assert daemon.event("stopped")
    assert node.sockets() == []


@pytest.mark.parametrize("how", ["crash", "kill"])
def test_a_driver_process_that_dies_is_replaced_and_no_device_is_lost(
    node: Node, machine: Machine, how: str
) -> None:
    node.kubelet.start()
    daemon = machine.start(node)
    node.wait_allocatable(8)
    (child,) = psutil.Process(daemon.process.pid).children()
    if how == "kill":
        child.kill()
    else:
        machine.gpus.crash("nvmlDeviceGetMemoryInfo")
    signal_name = "SIGKILL" if how == "kill" else "SIGSEGV"
    why = f"the driver's process was killed by {signal_name}"
    daemon.event("driver cannot be used", code="driver_crashed", why=why)
    machine.gpus.clear_faults()
    daemon.event("driver can be used again")
    assert len(node.kubelet.happened("list")) == 1, "the kubelet noticed nothing"
    machine.gpus.xid(1, 79)
    node.wait_allocatable(7)


def test_a_driver_that_hangs_at_the_start_is_said_and_blocks_no_stop(
    node: Node, machine: Machine
) -> None:
    machine.gpus.hang("nvmlInitWithFlags")
    node.kubelet.start()
    daemon = machine.start(node)
    daemon.wait_ready("driver: the first look at the GPUs takes ")
    assert daemon.get("/healthz") == (200, "ok\n")
    (child,) = psutil.Process(daemon.process.pid).children()
    assert daemon.stop() == 0
    assert not child.is_running()


def test_a_slow_driver_is_waited_for(node: Node, machine: Machine) -> None:
    machine.gpus.slow("nvmlDeviceGetUUID", ms=50)
    node.kubelet.start()
    machine.start(node)
    node.wait_allocatable(8)


def test_a_driver_that_fails_for_a_while_costs_no_device(node: Node, machine: Machine) -> None:
    node.kubelet.start()
    daemon = machine.start(node)
    node.wait_allocatable(8)
    machine.gpus.fail("nvmlEventSetWait_v2", code=999)
    daemon.event("driver cannot be used", code="driver_failed")
    assert node.kubelet.allocatable(RESOURCE) == 8
    machine.gpus.clear_faults()
    daemon.event("driver can be used again")
    machine.gpus.xid(1, 79)
    node.wait_allocatable(7)
    assert (
        'driver_errors_total{call="nvmlEventSetWait_v2",code="unknown"}'
        in (daemon.get("/metrics")[1])
    )


# --- the kubelet's side ---------------------------------------------------------------------


@pytest.fixture
def registered(node: Node) -> Daemon:
    """A daemon on simulated GPUs that is registered and watches the directory."""
    node.kubelet.start()
    daemon = node.start(*H100X8)
    node.wait_allocatable(8)
    daemon.event("metrics served")
    return daemon


def test_a_kubelet_that_comes_later_is_registered_with(node: Node) -> None:
    daemon = node.start(*H100X8)
    daemon.wait_ready(f"{node.kubelet.directory} does not exist")
    node.kubelet.directory.mkdir()
    daemon.wait_ready(f"there is no kubelet.sock in {node.kubelet.directory}")
    node.kubelet.start()
    node.wait_allocatable(8)
    daemon.wait_ready()


Disturbance = Callable[[Node], None]


def _recreate_directory(node: Node) -> None:
    node.kubelet.stop()
    node.kubelet.remove_directory()
    node.kubelet.start()


def _wipe_our_socket(node: Node) -> None:
    for name in node.sockets():
        (node.kubelet.directory / name).unlink()


def _replace_socket_in_place(node: Node) -> None:
    node.kubelet.stop()
    node.kubelet.start()


def _down_for_a_while(node: Node) -> None:
    node.kubelet.stop()
    node.kubelet.remove_socket()
    _wipe_our_socket(node)
    node.kubelet.restart(downtime_s=0.5)


@pytest.mark.parametrize(
    "disturb",
    [
        lambda node: node.kubelet.restart(),
        lambda node: node.kubelet.drop_stream(RESOURCE),
        _replace_socket_in_place,
        _recreate_directory,
        _wipe_our_socket,
        _down_for_a_while,
    ],
    ids=["restart", "stream", "in place", "directory", "wiped", "down"],
)
def test_whatever_happens_to_the_kubelet_the_plugin_registers_again(
    node: Node, registered: Daemon, disturb: Disturbance
) -> None:
    before = node.kubelet.register_calls
    disturb(node)
    node.wait_for(lambda: node.kubelet.register_calls > before)
    node.wait_allocatable(8)
    registered.wait_ready()
    assert len(node.sockets()) == 1
    assert registered.process.poll() is None


@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.DIE, Fault.NO_STREAM, Fault.NO_DIAL_BACK])
def test_a_kubelet_that_misbehaves_is_tried_until_it_does_not(
    node: Node, registered: Daemon, fault: Fault
) -> None:
    before = node.kubelet.register_calls
    with node.kubelet.misbehaving(fault):
        node.kubelet.restart()
        node.wait_for(lambda: node.kubelet.register_calls > before)
        if fault is Fault.REFUSE:
            why = "the kubelet refused: refused on purpose"
            registered.event("not registered, trying again", why=why)
    if fault is Fault.DIE:
        node.kubelet.restart()
    node.wait_allocatable(8)


def test_a_registration_that_hangs_does_not_keep_the_daemon_from_stopping(
    node: Node, registered: Daemon
) -> None:
    before = node.kubelet.register_calls
    with node.kubelet.misbehaving(Fault.HANG):
        node.kubelet.restart()
        node.wait_for(lambda: node.kubelet.register_calls > before)
        assert registered.stop() == 0


def test_a_restarted_kubelet_is_counted_and_a_touched_socket_is_not(
    node: Node, registered: Daemon
) -> None:
    (node.kubelet.directory / "kubelet.sock").chmod(0o777)
    node.kubelet.restart()
    node.wait_allocatable(8)
    registered.event("registered", count=2)
    text = registered.get("/metrics")[1]
    assert "deviceplugin_kubelet_restarts_total 1.0" in text
    assert f'deviceplugin_registrations_total{{resource="{RESOURCE}",result="ok"}} 2.0' in text


# --- start and stop ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_with_nothing_left(
    node: Node, registered: Daemon, number: signal.Signals
) -> None:
    assert node.sockets()
    assert registered.stop(number) == 0
    assert node.sockets() == []
    assert not (node.directory / "state/control.sock").exists()
    assert registered.event("stopped", exit_code=0)


def test_a_killed_daemon_is_followed_by_one_that_cleans_up(node: Node, registered: Daemon) -> None:
    registered.stop(signal.SIGKILL)
    node.wait_allocatable(0)
    (stale,) = node.sockets()
    again = node.start(*H100X8)
    node.wait_allocatable(8)
    assert stale not in node.sockets()
    again.event("metrics served")
    assert command("status", "--state-dir", str(node.directory / "state")).returncode == 0


def test_a_gpu_that_is_missing_after_a_restart_is_missed_until_it_is_forgotten(
    node: Node, machine: Machine
) -> None:
    node.kubelet.start()
    daemon = machine.start(node)
    node.wait_allocatable(8)
    held, free = machine.id(0), machine.id(1)
    holder = pod("holds-one", 1)
    assert node.kubelet.admit(holder).grants[0].devices == (held,)
    daemon.stop()
    machine.gpus.remove(0)
    machine.gpus.remove(1)
    daemon = machine.start(node)
    node.wait_allocatable(6)
    assert node.kubelet.capacity(RESOURCE) == 8
    assert node.kubelet.crashes == [], "what a pod holds stays listed"
    daemon.event("GPU is missing, listed as unhealthy until it is back or forgotten")
    assert f'gpu="{free}",reason="absent"' in daemon.get("/metrics")[1]
    state = str(node.directory / "state")
    refused = command("forget", held, "--state-dir", state)
    assert (refused.returncode, "is held by the pod with uid" in refused.stderr) == (1, True)
    forgotten = command("forget", free, "--state-dir", state)
    assert (forgotten.returncode, forgotten.stdout) == (0, f"{free} is forgotten\n")
    node.wait_for(lambda: node.kubelet.capacity(RESOURCE) == 7)
    node.kubelet.remove(holder)
    assert command("forget", held, "--state-dir", state).returncode == 0
    daemon.stop()
    machine.start(node)
    node.wait_allocatable(6)
    node.wait_for(lambda: node.kubelet.capacity(RESOURCE) == 6)


def test_a_missing_gpu_that_returns_is_offered_again(node: Node, machine: Machine) -> None:
    node.kubelet.start()
    daemon = machine.start(node)
    node.wait_allocatable(8)
    daemon.stop()
    gone = machine.gpus.gpus[3]
    machine.gpus.remove(3)
    machine.start(node)
    node.wait_allocatable(7)
    machine.gpus.put(3, gone)
    node.wait_allocatable(8)


# --- maintenance, and a driver that is away -----------------------------------------------------


def test_maintenance_withdraws_a_gpu_lets_go_of_it_and_survives_a_restart(
    node: Node, machine: Machine
) -> None:
    node.kubelet.start()
    daemon = machine.start(node)
    node.wait_allocatable(8)
    holder = pod("holds-one", 1)
    assert node.kubelet.admit(holder).grants[0].devices == (machine.id(0),)
    state = ("--state-dir", str(node.directory / "state"))
    pods = ("--pod-resources-socket", str(node.directory / "pods/kubelet.sock"))
    daemon.stop()
    daemon = machine.start(node, *pods)
    node.wait_allocatable(8)
    (child,) = psutil.Process(daemon.process.pid).children()
    done = command("maintenance", "start", "0", machine.id(5), "--reason", "new riser", *state)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"{machine.id(0)} is withdrawn; pod default/holds-one holds it and runs on",
        f"{machine.id(5)} is withdrawn",
    ]
    assert not child.is_running(), "the process that had them open is gone"
    node.wait_allocatable(6)
    told = command("status", *state).stdout
    assert re.search(
        f"^{machine.id(5)}: maintenance since .* UTC: new riser; ends with", told, re.MULTILINE
    )
    assert node.kubelet.capacity(RESOURCE) == 8
    assert node.kubelet.crashes == []
    assert f'gpu="{machine.id(5)}",reason="maintenance"' in daemon.get("/metrics")[1]
    machine.gpus.forget_calls()
    machine.gpus.await_call("nvmlEventSetWait_v2")
    machine.gpus.xid(5, 79)
    machine.gpus.xid(1, 79)
    node.wait_allocatable(5)
    daemon.event("GPU unhealthy, not offered any more", gpu=machine.id(1))  # and remembered
    assert not [call for call in machine.gpus.calls() if call.endswith((" 0", " 5"))]
    daemon.stop(signal.SIGKILL)
    machine.gpus.forget_calls()
    daemon = machine.start(node, *pods)
    node.wait_allocatable(5)
    assert daemon.event("a fault of before still counts", gpu=machine.id(1), reason="xid-79")
    assert daemon.event("maintenance goes on", gpu=machine.id(5), reason="new riser")
    assert not [call for call in machine.gpus.calls() if call.endswith((" 0", " 5"))]
    ended = command("maintenance", "end", "all", *state)
    assert ended.stdout.splitlines() == [
        f"{machine.id(number)} is looked at again" for number in (0, 5)
    ]
    node.wait_allocatable(7)


def test_with_all_gpus_in_maintenance_no_process_has_the_driver(
    node: Node, machine: Machine
) -> None:
    node.kubelet.start()
    daemon = machine.start(node)
    node.wait_allocatable(8)
    state = ("--state-dir", str(node.directory / "state"))
    machine.gpus.hang("nvmlDeviceGetMemoryInfo")
    machine.gpus.await_call("nvmlDeviceGetMemoryInfo 0", count=2)
    done = command("maintenance", "start", "all", *state)
    assert (done.returncode, done.stdout.count("is withdrawn\n")) == (0, 8), done.stderr
    assert psutil.Process(daemon.process.pid).children() == []
    node.wait_allocatable(0)
    daemon.wait_ready()
    machine.gpus.clear_faults()
    machine.gpus.remove(7)
    assert command("maintenance", "end", "0000:1b:00.0", *state).returncode == 0
    node.wait_allocatable(1)
    assert command("maintenance", "end", "all", *state).returncode == 0
    node.wait_allocatable(7)
    assert node.kubelet.capacity(RESOURCE) == 8, "the one that was taken out is missed"


def test_a_wrong_maintenance_does_nothing_and_says_why(node: Node, registered: Daemon) -> None:
    state = ("--state-dir", str(node.directory / "state"))
    for arguments, text in [
        (("start", "8"), "8 is no GPU's id, PCI bus id or index"),
        (("start", "all", "0"), "'all' stands alone"),
        (("end", "0"), "0 is not in maintenance"),
        (("end", "all"), "no GPU is in maintenance"),
    ]:
        done = command("maintenance", *arguments, *state)
        assert (done.returncode, text in done.stderr) == (1, True), done.stderr
    for usage in (("start",), (), ("pause", "all")):
        assert command("maintenance", *usage, *state).returncode == 2
    assert node.kubelet.allocatable(RESOURCE) == 8


def test_gpus_known_from_before_are_missed_while_the_driver_is_away(
    node: Node, machine: Machine
) -> None:
    node.kubelet.start()
    daemon = machine.start(node)
    node.wait_allocatable(8)
    assert node.kubelet.admit(pod("holds-two", 2)).admitted
    daemon.stop()
    machine.gpus.mismatch()
    daemon = machine.start(node)
    node.wait_for(lambda: node.kubelet.capacity(RESOURCE) == 8)
    daemon.wait_ready()
    assert node.kubelet.allocatable(RESOURCE) == 0
    assert node.kubelet.crashes == []
    assert f'gpu="{machine.id(0)}",reason="absent"' in daemon.get("/metrics")[1]
    machine.gpus.mismatch(False)
    node.wait_allocatable(8)


def test_monitoring_that_is_lost_is_told_and_withdraws_only_if_wanted(
    node: Node, machine: Machine
) -> None:
    node.kubelet.start()
    daemon = machine.start(node, "--monitoring-lost-after", "0.1")
    node.wait_allocatable(8)
    machine.gpus.fail("nvmlEventSetWait_v2", code=999)
    event = daemon.event("monitoring lost: nothing is heard of the GPUs")
    assert event["offered"] is True
    assert "deviceplugin_monitoring_lost 1.0" in daemon.get("/metrics")[1]
    assert node.kubelet.allocatable(RESOURCE) == 8
    daemon.wait_ready()
    daemon.stop()
    machine.start(node, "--monitoring-lost-after", "0.1", "--on-monitoring-lost", "unhealthy")
    node.wait_allocatable(0)
    machine.gpus.clear_faults()
    node.wait_allocatable(8)


# --- settings that change ---------------------------------------------------------------------


def test_settings_change_while_it_runs(node: Node) -> None:
    node.kubelet.start()
    file = node.directory / "c.yaml"

    def write(text: str) -> None:
        new = node.directory / "c.new"
        new.write_text(f"version: v1\nsimulate: h100x8\n{text}\n")
        new.replace(file)

    write("")
    daemon = node.start("--config", str(file))
    node.wait_allocatable(8)
    write("pollIntervalS: 0.5")
    daemon.event("settings read again", changed="poll_interval_s")
    assert node.kubelet.register_calls == 1, "such a change disturbs nobody"
    write("resourceName: nonsense")
    daemon.event("new settings are wrong, going on with those before")
    assert "deviceplugin_config_refused 1.0" in daemon.get("/metrics")[1]
    assert node.kubelet.allocatable(RESOURCE) == 8
    write("simulate: nope")
    write("resourceName: vendor.example/other")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.event("starting anew with the new settings")
    other = "vendor.example/other"
    assert node.kubelet.wait_allocatable(other, 8, 20)
    node.wait_for(lambda: not node.kubelet.allocatable(RESOURCE))
    assert daemon.stop() == 0
    assert node.sockets() == []


def test_new_settings_that_cannot_be_used_leave_those_before(node: Node) -> None:
    node.kubelet.start()
    file = node.directory / "c.yaml"
    file.write_text("version: v1\nsimulate: l4x1\n")
    daemon = node.start("--config", str(file))
    node.wait_allocatable(1)
    file.write_text("version: v1\nsimulate: l4x1\nsimulateControl: /nope/x\n")
    event = daemon.event("new settings cannot be used, taking those before")
    assert "/nope/x cannot be made" in event["why"]
    daemon.event("registered", count=2)
    node.wait_allocatable(1)
    file.write_text("version: v1\nsimulate: h100x8\n")
    node.wait_allocatable(8)
    assert daemon.stop() == 0


@pytest.mark.parametrize("after_s", [0, 0.005, 0.02, 0.06])
def test_a_signal_between_two_starts_is_not_lost(node: Node, after_s: float) -> None:
    node.kubelet.start()
    file = node.directory / "c.yaml"
    file.write_text("version: v1\nsimulate: l4x1\n")
    daemon = node.start("--config", str(file))
    node.wait_allocatable(1)
    file.write_text("version: v1\nsimulate: h100x8\n")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.event("starting anew with the new settings")
    time.sleep(after_s)
    daemon.process.send_signal(signal.SIGHUP)
    assert daemon.stop() == 0
    assert node.sockets() == []
    assert not (node.directory / "state/control.sock").exists()


def test_a_hangup_without_a_file_changes_nothing(node: Node, registered: Daemon) -> None:
    registered.process.send_signal(signal.SIGHUP)
    registered.event("settings read again", changed="nothing")
    assert node.kubelet.register_calls == 1
    assert registered.stop() == 0


# --- start and stop, continued ----------------------------------------------------------------


def test_a_list_that_the_kubelet_would_refuse_is_exit_code_2(node: Node) -> None:
    node.kubelet.start()
    held = {"PodUID": "a", "ContainerName": "c", "ResourceName": RESOURCE}
    ids = [f"MIG-{number:060d}" for number in range(60_000)]
    data = {"PodDeviceEntries": [{**held, "DeviceIDs": {"-1": ids}}], "RegisteredDevices": {}}
    checkpoint = node.kubelet.directory / "kubelet_internal_checkpoint"
    checkpoint.write_text(json.dumps({"Data": data, "Checksum": 1}))
    daemon = node.start(*H100X8)
    event = daemon.event("stopping: nothing can be published")
    assert "the kubelet takes at most 4194304" in event["why"]
    assert daemon.process.wait(20) == 2
    assert node.kubelet.register_calls == 0


def test_the_metrics_port_is_free_again_at_once(node: Node) -> None:
    node.kubelet.start()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    for _ in range(2):
        daemon = node.start(*H100X8, "--metrics-address", address)
        assert daemon.get("/healthz") == (200, "ok\n")
        daemon.stop()
        assert "Address already in use" not in str(daemon.events)


def test_simulated_gpus_are_no_part_of_what_the_real_node_is_known_to_have(
    node: Node, machine: Machine
) -> None:
    node.kubelet.start()
    daemon = node.start(*H100X8)
    node.wait_allocatable(8)
    daemon.stop()
    machine.gpus.remove(7)
    machine.start(node)
    node.wait_allocatable(7)
    assert node.kubelet.capacity(RESOURCE) == 7


def test_it_runs_without_any_standard_file(node: Node) -> None:
    node.kubelet.start()
    run = f"{sys.executable} -m deviceplugin run --simulate l4x1 --metrics-address ''"
    paths = f"--device-plugin-dir {node.kubelet.directory} --state-dir {node.directory}/state"
    process = subprocess.Popen(["/bin/sh", "-c", f"exec {run} {paths} <&- >&- 2>&-"])
    try:
        node.wait_allocatable(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()


def test_a_second_plugin_waits_says_for_whom_and_takes_over(node: Node, registered: Daemon) -> None:
    second = node.start(
        *H100X8, "--state-dir", str(node.directory / "other"), env={"POD_NAME": "second"}
    )
    pid = registered.process.pid
    answer = second.wait_ready("it is served by pod ")
    assert f", pid {pid}\n" in answer
    assert second.get("/healthz") == (200, "ok\n")
    assert node.kubelet.register_calls == 1
    assert node.kubelet.allocatable(RESOURCE) == 8
    registered.stop(signal.SIGKILL)
    second.wait_ready()
    node.wait_allocatable(8)
    assert len(node.sockets()) == 1


def test_a_second_plugin_that_takes_over_can_be_asked(node: Node, registered: Daemon) -> None:
    second = node.start(*H100X8)
    second.event("no control socket: 'deviceplugin status' will not work")
    registered.stop()
    second.event("control socket is there now")
    status = command("status", "--json", "--state-dir", str(node.directory / "state"))
    assert json.loads(status.stdout)["pid"] == second.process.pid


def test_a_taken_metrics_port_and_an_unusable_state_directory_cost_only_themselves(
    node: Node,
) -> None:
    node.kubelet.start()
    (node.directory / "file").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        daemon = node.start(
            *H100X8, "--metrics-address", address, "--state-dir", str(node.directory / "file")
        )
        node.wait_allocatable(8)
        daemon.event("metrics address cannot be had, serving GPUs without it")
        daemon.event("no control socket: 'deviceplugin status' will not work")
        assert daemon.stop() == 0


def test_a_wrong_configuration_is_exit_code_2_with_every_mistake(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("version: v1\nlogLevl: debug\n")
    result = command(
        *("run", "--config", str(file), "--resource-name", "gpu"),
        env={"DEVICEPLUGIN_STATE_DIR": "here"},
    )
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "deviceplugin: the configuration is wrong:",
        f"  - file {file}: logLevl: unknown key; did you mean logLevel?",
        "  - flag --resource-name: resourceName: 'gpu' needs a domain, as in 'vendor.example/gpu'",
        "  - environment DEVICEPLUGIN_STATE_DIR: stateDir: 'here' is not an absolute path",
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "--config", "/nope.yaml"], "file /nope.yaml: cannot be read"),
        (["run", "--simulate", "nope"], "there is no profile 'nope'"),
        (["run", "--simulate", "l4x1", "--simulate-control", "/nope/x"], "cannot be made"),
        (["run", "--nope"], "unrecognized arguments: --nope"),
        (["nope"], "invalid choice: 'nope'"),
        ([], "required"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], text: str) -> None:
    result = command(*arguments)
    assert result.returncode == 2
    assert text in result.stderr


def test_the_file_named_by_the_environment_is_read(node: Node) -> None:
    file = node.directory / "c.json"
    file.write_text(json.dumps({"version": "v1", "simulate": "l4x1", "nodeName": "n1"}))
    node.kubelet.start()
    daemon = node.start(env={"DEVICEPLUGIN_CONFIG": str(file)})
    node.wait_allocatable(1)
    assert daemon.event("starting")["node"] == "n1"


# --- simulated GPUs, and the other commands -----------------------------------------------------


def test_simulated_gpus_are_changed_by_lines_in_the_fifo(node: Node) -> None:
    node.kubelet.start()
    fifo = node.directory / "control"
    daemon = node.start(*H100X8, "--simulate-control", str(fifo))
    node.wait_allocatable(8)
    uuid = profile.load("h100x8").gpus[2].id

    def say(line: str) -> None:
        fifo.write_text(line + "\n")

    say("xid 3 79")
    node.wait_allocatable(7)
    say(f"lost {uuid}")
    node.wait_allocatable(6)
    say("back 3")
    say("nonsense")
    bad = daemon.event("control line ignored")
    assert (bad["line"], bad["why"][:25]) == ("nonsense", "'nonsense' is no command;")
    assert node.kubelet.allocatable(RESOURCE) == 6, "back is no reset: the Xid stays"
    say("reset 3")
    node.wait_allocatable(7)
    say("back 2")
    node.wait_allocatable(8)
    assert daemon.stop() == 0
    assert not fifo.exists()


def test_a_simulated_node_without_gpus_of_its_own_hands_out_no_device_nodes(node: Node) -> None:
    node.kubelet.start()
    node.start("--simulate", "a100x8")
    node.wait_allocatable(8)
    (grant,) = node.kubelet.admit(pod("p", 2)).grants
    assert list(grant.response.devices) == []
    assert len(grant.response.envs["NVIDIA_VISIBLE_DEVICES"].split(",")) == 2


def test_status_asks_the_running_daemon(node: Node, registered: Daemon) -> None:
    state = str(node.directory / "state")
    result = command("status", "--json", "--state-dir", state)
    status = json.loads(result.stdout)
    assert (status["ready"], status["phase"], status["resource"]) == (True, "registered", RESOURCE)
    assert status["pid"] == registered.process.pid
    assert len(status["devices"]) == 8
    assert status["process"]["threads"] > 1
    text = command("status", "--state-dir", state).stdout
    assert text.startswith(f"{RESOURCE}: registered, pid {registered.process.pid}, version ")
    assert text.count(" Healthy\n") == 8
    assert stat.S_IMODE((node.directory / "state/control.sock").stat().st_mode) == 0o600


def test_status_without_a_daemon_says_so(tmp_path: Path) -> None:
    result = command("status", "--state-dir", str(tmp_path))
    assert result.returncode == 1
    assert result.stderr == (
        f"deviceplugin: no daemon answers on {tmp_path}/control.sock:"
        " is it running, with the same --state-dir?\n"
    )


def test_inspect_prints_what_would_be_published(node: Node, machine: Machine) -> None:
    machine.gpus.lose(6)
    result = command("inspect", "--json", *machine.flags, env=machine.env)
    found = json.loads(result.stdout)
    assert [gpu["index"] for gpu in found["gpus"]] == [0, 1, 2, 3, 4, 5, 7]
    assert found["unreadable"] == [
        {"index": 6, "reason": "lost", "detail": "the driver says that the GPU is lost"}
    ]
    first = found["gpus"][0]
    assert first["id"] == machine.id(0)
    assert first["numa"] == {"node": 0, "source": "device"}
    assert first["links"][machine.id(4)] == {"pcie": "SYS", "nvlinks": 18}
    assert first["device_nodes"] == ["/dev/nvidia0"]
    assert (first["health"], first["reason"]) == ("Healthy", "")
    lines = command("inspect", *machine.flags, env=machine.env).stdout.splitlines()
    assert lines[0] == f"{RESOURCE}, driver 550.54.15"
    assert lines[1] == "7 x NVIDIA H100 80GB HBM3, 80 GiB"
    assert lines[3].split() == ["GPU", "ID", "PCI", "NUMA", "HEALTH"]
    assert lines[4].split() == ["0", machine.id(0), "0000:1b:00.0", "0", "device", "Healthy"]
    assert lines[11].split()[-3:] == ["not", "published:", "lost"]
    assert max(map(len, lines[:11])) <= 80


def test_inspect_without_a_driver_says_why(tmp_path: Path) -> None:
    result = command("inspect", "--driver-root", str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith(f"deviceplugin: no libnvidia-ml.so.1 below {tmp_path}")


def test_the_version_is_told() -> None:
    assert command("--version").stdout.startswith("deviceplugin 0.")


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    inspect = f"{sys.executable} -m deviceplugin inspect --simulate v100x16"
    result = subprocess.run(
        ["/bin/sh", "-c", f"{inspect} | true"], capture_output=True, text=True, check=True
    )
    assert result.stderr == ""


def test_inspect_prints_a_row_for_each_gpu_and_the_links() -> None:
    result = command("inspect", "--simulate", "v100x16")
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) == 4 + 16 + 1 + 17


@pytest.mark.parametrize("name", ["h100x8", "dgx1v", "l4x1", "v100x16"])
def test_the_demo_holds_on_nodes_of_any_size(name: str) -> None:
    result = command("demo", "--profile", name)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "every step held" in result.stdout

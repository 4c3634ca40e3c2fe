"""Health as a whole process, from the driver library to the kubelet."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.daemon import RESOURCE, Daemon, Node, command, pod
from tests.machine import Machine

OUT = "GPU unhealthy, not offered any more"
SIMULATED = ("--simulate", "h100x8")


@pytest.fixture
def well(node: Node, machine: Machine) -> Daemon:
    """A daemon that offers eight GPUs."""
    node.kubelet.start()
    daemon = machine.start(node)
    node.wait_allocatable(8)
    daemon.event("metrics served")
    return daemon


def state(node: Node) -> tuple[str, str]:
    return "--state-dir", str(node.directory / "state")


def test_what_leaves_a_gpu_healthy_leaves_it_offered(
    node: Node,
    machine: Machine,
    well: Daemon,
) -> None:
    machine.gpus.change(2, remap="pending", errors=1)
    for code in (13, 43, 63, 94):
        machine.gpus.xid(2, code)
    for code in (13, 94):
        well.event("Xid error", gpu=machine.id(2), xid=code)
    told = ""
    for _ in range(200):
        told = command("health", *state(node)).stdout
        if "reset when convenient" in told:
            break
    assert f"{machine.id(2)}: memory rows wait to be remapped: reset when convenient" in told
    assert node.kubelet.allocatable(RESOURCE) == 8
    assert len(node.kubelet.happened("list")) == 1


def test_a_fault_a_reset_and_a_hold_down_bring_a_gpu_back(
    node: Node,
    machine: Machine,
) -> None:
    node.kubelet.start()
    pods = ("--pod-resources-socket", str(node.directory / "pods/kubelet.sock"))
    daemon = machine.start(node, "--health-hold-down", "0.5", *pods)
    node.wait_allocatable(8)
    assert node.kubelet.admit(pod("holder", 4)).admitted
    machine.gpus.xid(3, 109)
    node.wait_allocatable(7)
    event = daemon.event(OUT, gpu=machine.id(3))
    assert (event["was"], event["reason"]) == ("healthy", "xid-109")
    assert event["ends_with"] == "a sign of a reset, or a new boot"
    machine.gpus.lose(3)
    machine.gpus.await_call("nvmlShutdown")  # the plugin opens the driver anew, to see
    machine.gpus.restore(3)
    daemon.event("GPU recovering", gpu=machine.id(3))
    reset = daemon.event("GPU was reset while a pod held it", gpu=machine.id(3))
    assert reset["holder"] == "pod default/holder"
    assert node.kubelet.allocatable(RESOURCE) == 7
    node.wait_allocatable(8)
    told = command("health", "history", *state(node)).stdout
    assert re.search(f"{machine.id(3)} +healthy +xid-109", told)
    assert re.search(f"{machine.id(3)} +xid-109 +recovering", told)
    assert re.search(f"{machine.id(3)} +recovering +healthy", told)


def test_a_fabric_that_is_not_ready_withdraws_all_and_its_completion_brings_them_back(
    node: Node,
    machine: Machine,
) -> None:
    for number in range(8):
        machine.gpus.change(number, fabric="2")
    node.kubelet.start()
    machine.start(node, "--health-hold-down", "60")
    node.wait_for(lambda: node.kubelet.capacity(RESOURCE) == 8)
    node.wait_allocatable(0)
    for number in range(8):
        machine.gpus.change(number, fabric="3")
    node.wait_allocatable(8)


def test_the_drivers_recovery_action_decides_for_nvlink_errors(
    node: Node,
    machine: Machine,
    well: Daemon,
) -> None:
    machine.gpus.change(4, action=0)
    machine.gpus.xid(4, 145)
    well.event("Xid error", gpu=machine.id(4), xid=145, effect="ask the driver")
    assert node.kubelet.allocatable(RESOURCE) == 8
    machine.gpus.change(4, action=1)
    machine.gpus.event(4, 0x8000)
    node.wait_allocatable(7)
    assert well.event(OUT, gpu=machine.id(4))["reason"] == "recovery-gpu-reset"
    machine.gpus.change(4, action=0)
    node.wait_allocatable(8)


def test_a_killed_plugin_keeps_its_verdicts(
    node: Node,
    machine: Machine,
    well: Daemon,
) -> None:
    assert node.kubelet.admit(pod("holder", 4)).admitted
    machine.gpus.xid(0, 79)
    machine.gpus.xid(6, 95)
    node.wait_allocatable(6)
    for number in (0, 6):
        well.event(OUT, gpu=machine.id(number))
    well.stop(signal.SIGKILL)
    node.wait_allocatable(0)
    again = machine.start(node)
    node.wait_allocatable(6)
    assert again.event("a fault of before still counts", gpu=machine.id(6), reason="xid-95")
    assert node.kubelet.crashes == []


def test_of_six_gpus_that_turn_bad_at_once_half_of_the_node_is_kept(
    node: Node,
    machine: Machine,
    well: Daemon,
) -> None:
    for number in range(6):
        machine.gpus.xid(number, 119)
    node.wait_allocatable(4)
    held = "GPU would be withdrawn, held: too many within ten minutes; look at it"
    assert well.event(held, 2)["limit"] == 4
    assert "deviceplugin_verdicts_held 2.0" in well.get("/metrics")[1]
    told = json.loads(command("health", "--json", *state(node)).stdout)
    assert sum(device["held"] == "held by the blast limit" for device in told) == 2
    assert node.kubelet.allocatable(RESOURCE) == 4


def test_in_observe_mode_nothing_is_withdrawn_until_the_settings_say_so(node: Node) -> None:
    node.kubelet.start()
    file, fifo = node.directory / "c.yaml", node.directory / "fifo"
    file.write_text("version: v1\nhealth: {mode: observe}\n")
    daemon = node.start(*SIMULATED, "--simulate-control", str(fifo), "--config", str(file))
    node.wait_allocatable(8)
    fifo.write_text("xid 3 48\n")
    event = daemon.event("GPU stays offered in spite of a fault")
    assert (event["reason"], event["held"]) == ("xid-48", "observed only")
    assert node.kubelet.allocatable(RESOURCE) == 8
    file.write_text("version: v1\nhealth: {mode: enforce}\n")
    node.wait_allocatable(7)
    assert node.kubelet.register_calls == 1


def test_an_operators_word_counts_until_it_is_taken_back(
    node: Node,
    machine: Machine,
    well: Daemon,
) -> None:
    said = command("health", "set", "1", "unhealthy", "--reason", "smells", *state(node))
    assert (said.returncode, said.stdout) == (0, f"{machine.id(1)} is withdrawn\n")
    node.wait_allocatable(7)
    assert f"{machine.id(1)}: operator since" in command("health", *state(node)).stdout
    well.stop(signal.SIGKILL)
    well = machine.start(node)
    node.wait_allocatable(7)
    well.event("metrics served")
    assert command("health", "clear", "all", *state(node)).returncode == 0
    node.wait_allocatable(8)
    machine.gpus.xid(2, 64)
    node.wait_allocatable(7)
    assert command("health", "set", "2", "healthy", "--for", "1h", *state(node)).returncode == 0
    node.wait_allocatable(8)
    machine.gpus.xid(2, 64)
    well.event("GPU stays offered in spite of a fault", held="an operator wants it offered")
    assert node.kubelet.allocatable(RESOURCE) == 8


def test_a_storm_of_xids_costs_one_list_and_a_few_lines(
    node: Node, machine: Machine, well: Daemon
) -> None:
    for _ in range(1000):
        machine.gpus.xid(2, 31)
    for _ in range(1000):
        machine.gpus.xid(2, 48)
    node.wait_allocatable(7)
    labels = f'gpu="{machine.id(2)}",verdict="unhealthy",xid="48"'
    text = f"deviceplugin_xid_errors_total{{{labels}}} 1000.0"
    for _ in range(500):
        if text in well.get("/metrics")[1]:
            break
        time.sleep(0.01)
    assert text in well.get("/metrics")[1]
    assert len(node.kubelet.happened("list")) == 2
    assert len([event for event in well.events if event["event"] == "Xid error"]) == 2


def test_the_kernels_log_is_heard_if_that_is_wanted(node: Node, machine: Machine) -> None:
    os.mkfifo(node.directory / "dev/kmsg")
    node.kubelet.start()
    daemon = machine.start(node, "--health-kernel-log", "on")
    node.wait_allocatable(8)
    place = machine.gpus.gpus[2].sysfs_id.removesuffix(".0")
    now_us = round(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6) + 1000
    with (node.directory / "dev/kmsg").open("w") as log:
        log.write(f"3,1,1000,-;NVRM: Xid (PCI:{place}): 95, of long ago\n")
        log.write(f"3,2,{now_us},-;NVRM: Xid (PCI:{place}): 119, pid=1\n")
    node.wait_allocatable(7)
    assert daemon.event(OUT, gpu=machine.id(2))["reason"] == "xid-119"


def test_another_ones_verdict_comes_and_expires(node: Node, machine: Machine, well: Daemon) -> None:
    folder = node.directory / "state/verdicts.d"
    folder.mkdir()
    said = {"gpu": machine.id(5), "verdict": "unhealthy", "reason": "diag", "source": "dcgm"}
    (folder / "new").write_text(json.dumps({**said, "ttl_s": 2}))
    (folder / "new").rename(folder / "dcgm.json")
    (folder / "bad.json").write_text("{")
    node.wait_allocatable(7)
    assert well.event(OUT, gpu=machine.id(5))["reason"] == "inbox-dcgm"
    well.event("verdict ignored", file=str(folder / "bad.json"))
    node.wait_allocatable(8)


def test_a_crash_loop_on_a_sick_gpu_ends_if_that_is_wanted(node: Node, machine: Machine) -> None:
    node.kubelet.start()
    machine.start(node, "--health-check-before-start")
    node.wait_allocatable(8)
    looping = pod("looping", 1)
    assert node.kubelet.admit(looping).admitted
    node.kubelet.restart_container(looping, looping.containers[0])
    machine.gpus.xid(0, 79)
    node.wait_allocatable(7)
    with pytest.raises(Exception, match=r"unhealthy: .* \(xid-79\)"):
        node.kubelet.restart_container(looping, looping.containers[0])


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("set", "99", "healthy"), 1, "99 is no GPU's id"),
        (("set", "1", "sick"), 2, "invalid choice"),
        (("set", "1", "unhealthy", "--for", "soon"), 2, "'soon' is no time; write 90s"),
        (("set", "1", "unhealthy", "--for", "0s"), 2, "'0s' is no time"),
        (("clear", "all", "1"), 1, "'all' stands alone"),
    ],
)
def test_a_wrong_word_does_nothing_and_says_why(
    arguments: tuple[str, ...], code: int, text: str, node: Node, well: Daemon
) -> None:
    done = command("health", *arguments, *state(node))
    assert done.returncode == code
    assert text in done.stderr
    assert node.kubelet.allocatable(RESOURCE) == 8


def test_a_code_is_explained_with_todays_verdict(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("version: v1\nhealth: {xids: {94: unhealthy}}\n")
    assert "the GPU stays healthy" in command("xid", "94").stdout
    changed = command("xid", "94", "--config", str(file)).stdout
    assert "effect: the GPU is withdrawn" in changed
    assert "because of a setting; else: report" in changed
    assert "not in the catalog" in command("xid", "999").stdout
    assert command("xid", "many").returncode == 2

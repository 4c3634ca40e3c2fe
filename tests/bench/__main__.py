"""``make bench``: one JSON object with the daemon's figures.

Everything is measured from outside: the daemon is a process, the kubelet the
embedded one, the GPUs simulated (h100x8). Times are monotonic, taken by the
kubelet's side; where several samples are taken the median is given unless the
name says otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil

from api.v1beta1 import api_pb2 as pb
from api.v1beta1.api_pb2_grpc import DevicePluginStub
from deviceplugin.hardware.host import ProcessUsage, process_usage
from tests import fakenvml
from tests.daemon import RESOURCE, Daemon, Node, short_directory

PROFILE = "h100x8"
GPUS = 8


@contextlib.contextmanager
def running() -> Iterator[tuple[Node, Daemon]]:
    """A node with a registered daemon."""
    with short_directory() as directory, contextlib.ExitStack() as stack:
        node = Node(directory, stack)
        node.kubelet.start()
        fifo = directory / "control"
        daemon = node.start(
            "--simulate", PROFILE, "--simulate-control", str(fifo), "--log-level", "info"
        )
        node.wait_allocatable(GPUS)
        daemon.event("metrics served")
        yield node, daemon


def ms(seconds: float) -> float:
    return round(seconds * 1000, 2)


def median_ms(seconds: list[float]) -> float:
    return ms(statistics.median(seconds))


def percentile_ms(seconds: list[float], percent: float) -> float:
    ordered = sorted(seconds)
    return ms(ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))])


def starts(times: int) -> dict[str, float]:
    """From starting the process to Register, to the first list, and from SIGTERM to the exit."""
    register, first_list, stop = [], [], []
    for _ in range(times):
        with running() as (node, daemon):
            register.append(node.kubelet.happened("register")[0].at_s - daemon.started_s)
            first_list.append(node.kubelet.happened("list")[0].at_s - daemon.started_s)
            asked_s = time.monotonic()
            if daemon.stop(signal.SIGTERM) != 0:
                raise RuntimeError("the daemon did not stop with exit code 0")
            stop.append(time.monotonic() - asked_s)
    return {
        "start_to_register_ms": median_ms(register),
        "start_to_first_list_ms": median_ms(first_list),
        "sigterm_to_exit_ms": median_ms(stop),
    }


def xids(node: Node, times: int) -> dict[str, float]:
    """From writing an Xid into the control FIFO to the list at the kubelet."""
    took = []
    with (node.directory / "control").open("w", encoding="utf-8", buffering=1) as fifo:
        for number in range(times):
            asked_s = time.monotonic()
            fifo.write(f"xid {number % GPUS} 79\n")
            node.wait_allocatable(GPUS - 1)
            took.append(node.kubelet.happened("list")[-1].at_s - asked_s)
            fifo.write(f"reset {number % GPUS}\n")
            node.wait_allocatable(GPUS)
    return {
        "xid_to_list_p50_ms": median_ms(took),
        "xid_to_list_p99_ms": percentile_ms(took, 99),
    }


def storm(node: Node, daemon: Daemon, times: int) -> dict[str, float]:
    """What so many Xids on one GPU cost: CPU of the daemon, lists sent, lines logged."""
    lists, lines, before = len(node.kubelet.happened("list")), len(daemon.events), usage(daemon)
    with (node.directory / "control").open("w", encoding="utf-8", buffering=1) as fifo:
        for _ in range(times):
            fifo.write("xid 5 31\n")
        fifo.write("xid 5 79\n")
        node.wait_allocatable(GPUS - 1)
        after = usage(daemon)
        fifo.write("reset 5\n")
        node.wait_allocatable(GPUS)
    named = [event for event in daemon.events[lines:] if event["part"] != "simulation"]
    return {
        f"xid_storm_{times}_cpu_ms": ms(after.cpu_s - before.cpu_s),
        "xid_storm_lists": len(node.kubelet.happened("list")) - lists - 1,
        "xid_storm_log_lines": len(named),
    }


def restarts(node: Node, times: int) -> dict[str, float]:
    """From kubelet.sock being there again to Register, and to the list."""
    register, listed = [], []
    kubelet = node.kubelet
    for _ in range(times):
        lists = len(kubelet.happened("list"))
        kubelet.restart(downtime_s=0.05)
        node.wait_for(lambda seen=lists: len(kubelet.happened("list")) > seen)  # type: ignore[misc] # bound at once
        back_s = kubelet.happened("started")[-1].at_s
        register.append(kubelet.happened("register")[-1].at_s - back_s)
        listed.append(kubelet.happened("list")[-1].at_s - back_s)
    return {
        "kubelet_restart_to_register_p50_ms": median_ms(register),
        "kubelet_restart_to_register_p99_ms": percentile_ms(register, 99),
        "kubelet_restart_to_list_p50_ms": median_ms(listed),
    }


def calls(node: Node, times: int) -> dict[str, float]:
    """Allocate of two GPUs, GetPreferredAllocation of four of eight; the client's time included."""
    (name,) = node.sockets()
    ids = sorted(node.kubelet.devices(RESOURCE))
    allocate = pb.AllocateRequest()
    allocate.container_requests.add(devices_ids=ids[:2])
    prefer = pb.PreferredAllocationRequest()
    prefer.container_requests.add(available_deviceIDs=ids, allocation_size=4)
    figures: dict[str, float] = {}
    with grpc.insecure_channel(f"unix:{node.kubelet.directory / name}") as channel:
        stub = DevicePluginStub(channel)
        one: dict[str, Callable[[], object]] = {
            "allocate": lambda: stub.Allocate(allocate),
            "preferred_allocation": lambda: stub.GetPreferredAllocation(prefer),
        }
        for call, act in one.items():
            took = []
            for _ in range(times):
                asked_s = time.perf_counter()
                act()
                took.append(time.perf_counter() - asked_s)
            took = took[times // 10 :]  # the first ones warm up
            figures |= {
                f"{call}_p50_ms": median_ms(took),
                f"{call}_p99_ms": percentile_ms(took, 99),
            }
    return figures


def usage(daemon: Daemon) -> ProcessUsage:
    found = process_usage(daemon.process.pid)
    if found is None:
        raise RuntimeError("the daemon is gone")
    return found


def costs(daemon: Daemon, idle_s: float) -> dict[str, float]:
    """Memory after the first seconds, and CPU while nothing happens."""
    time.sleep(1)
    before, began_s = usage(daemon), time.monotonic()
    time.sleep(idle_s)
    after, took_s = usage(daemon), time.monotonic() - began_s
    return {
        "resident_mib": round(after.resident_bytes / 2**20, 1),
        "idle_cpu_share": round((after.cpu_s - before.cpu_s) / took_s, 5),
        "threads": after.threads,
        "open_files": after.open_files,
    }


def with_driver(times: int) -> dict[str, float]:
    """The same start with the driver's child and the fake library; {} without cc."""
    register, xid, resident = [], [], []
    with contextlib.ExitStack() as stack:
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            library = fakenvml.build(cache)
        except fakenvml.NoCompiler:
            return {}
        for _ in range(times):
            with short_directory() as directory, contextlib.ExitStack() as inner:
                node = Node(directory, inner)
                gpus = fakenvml.h100x8(directory / "nvml")
                node.kubelet.start()
                daemon = node.start("--driver-root", str(library.parent), env=gpus.env())
                node.wait_allocatable(GPUS)
                register.append(node.kubelet.happened("register")[0].at_s - daemon.started_s)
                daemon.event("metrics served")
                time.sleep(0.5)
                asked_s = time.monotonic()
                gpus.xid(0, 79)
                node.wait_allocatable(GPUS - 1)
                xid.append(node.kubelet.happened("list")[-1].at_s - asked_s)
                children = [child.pid for child in psutil.Process(daemon.process.pid).children()]
                found = [process_usage(pid) for pid in (daemon.process.pid, *children)]
                resident.append(sum(one.resident_bytes for one in found if one is not None))
                daemon.stop()
    return {
        "driver_start_to_register_ms": median_ms(register),
        "driver_xid_to_list_ms": median_ms(xid),
        "driver_resident_with_child_mib": round(statistics.median(resident) / 2**20, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few samples, to try the benchmark")
    quick = parser.parse_args().quick
    figures: dict[str, float] = starts(2 if quick else 9)
    figures |= with_driver(1 if quick else 5)
    with running() as (node, daemon):
        figures |= costs(daemon, 1 if quick else 10)
        figures |= calls(node, 100 if quick else 2000)
        figures |= xids(node, 5 if quick else 200)
        figures |= storm(node, daemon, 100 if quick else 10_000)
        figures |= restarts(node, 3 if quick else 120)
        figures["resident_mib_after_restarts"] = round(usage(daemon).resident_bytes / 2**20, 1)
    result = {
        "python": platform.python_version(),
        "cores": os.cpu_count() or 0,
        "profile": PROFILE,
        **figures,
    }
    json.dump(result, sys.stdout, indent=2)
    print()  # noqa: T201  # the figures are the output
    return 0


if __name__ == "__main__":
    sys.exit(main())

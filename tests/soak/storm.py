"""One daemon process lives through kubelet restarts, dropped streams, wiped
sockets, killed driver children, Xids and lost GPUs, in random order.

At the end all devices have to be offered again, threads and open files be back
to where they were, and memory may have grown by less than 2 MiB.
"""

from __future__ import annotations

import collections
import contextlib
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from deviceplugin.hardware.host import ProcessUsage, process_usage
from tests import fakenvml
from tests.daemon import RESOURCE, Daemon, Node, short_directory
from tests.soak import Failed

GPUS = 8
SETTLE_S = 90.0
"""Longer than the monitor's longest back-off, which killed children lead to."""
MEMORY_MAX_BYTES = 2 * 2**20


class Soak:
    """The node and what can happen to it."""

    def __init__(self, node: Node, library: Path, dice: random.Random) -> None:
        self.node = node
        self.dice = dice
        self.gpus = fakenvml.h100x8(node.directory / "nvml")
        node.kubelet.start()
        self.daemon: Daemon = node.start(
            *("--driver-root", str(library.parent), "--poll-interval", "0.2"),
            *("--log-level", "warning"),
            env=self.gpus.env(),
        )
        self.lost: set[int] = set()
        self.sick: set[int] = set()
        self.done: collections.Counter[str] = collections.Counter()

    def restart_kubelet(self) -> None:
        self.node.kubelet.restart(downtime_s=self.dice.choice([0, 0, 0, 0.02, 0.3]))

    def drop_stream(self) -> None:
        self.node.kubelet.drop_stream(RESOURCE)

    def wipe_our_socket(self) -> None:
        for name in self.node.sockets():
            (self.node.kubelet.directory / name).unlink(missing_ok=True)

    def kill_driver_child(self) -> None:
        for child in psutil.Process(self.daemon.process.pid).children():
            with contextlib.suppress(psutil.Error):
                child.kill()

    def lose_gpu(self) -> None:
        if len(self.lost) < GPUS // 2:
            number = self.dice.choice([n for n in range(GPUS) if n not in self.lost])
            self.lost.add(number)
            self.gpus.lose(number)

    def bring_gpu_back(self) -> None:
        if self.lost:
            number = self.dice.choice(sorted(self.lost))
            self.lost.discard(number)
            self.gpus.restore(number)

    def application_xid(self) -> None:
        self.gpus.xid(self.dice.randrange(GPUS), self.dice.choice([13, 31, 43, 94]))

    def fatal_xid(self) -> None:
        number = self.dice.randrange(GPUS)
        self.gpus.xid(number, self.dice.choice([48, 79, 119]))
        self.sick.add(number)

    def step(self) -> None:
        """One thing, and a short while."""
        things: list[tuple[Callable[[], None], int]] = [
            (self.restart_kubelet, 12),
            (self.drop_stream, 2),
            (self.wipe_our_socket, 1),
            (self.kill_driver_child, 1),
            (self.lose_gpu, 2),
            (self.bring_gpu_back, 3),
            (self.application_xid, 6),
            (self.fatal_xid, 1),
        ]
        acts, weights = zip(*things, strict=True)
        act = self.dice.choices(acts, weights)[0]
        act()
        self.done[act.__name__] += 1
        time.sleep(self.dice.choice([0, 0, 0.01, 0.02, 0.1]))
        if self.daemon.process.poll() is not None:
            raise Failed(f"the daemon ended with exit code {self.daemon.process.returncode}")

    def reset_sick(self) -> None:
        """A GPU that is reset does not answer for a while."""
        if not self.sick:
            return
        for number in sorted(self.sick):
            self.gpus.lose(number)
        time.sleep(1)
        for number in sorted(self.sick):
            self.gpus.restore(number)

    def settle(self) -> ProcessUsage:
        """Leave it alone until everything is well; what it costs then."""
        deadline_s = time.monotonic() + SETTLE_S
        for number in sorted(self.lost):
            self.gpus.restore(number)
        self.lost.clear()
        self.reset_sick()
        while not self.node.kubelet.wait_allocatable(RESOURCE, GPUS, 5):
            if time.monotonic() > deadline_s:
                seen = self.node.kubelet.allocatable(RESOURCE)
                raise Failed(f"allocatable is {seen} and not {GPUS}; {self.daemon.events[-5:]}")
            self.reset_sick()
        self.sick.clear()
        time.sleep(2)
        usage = process_usage(self.daemon.process.pid)
        if usage is None:
            raise Failed("the daemon is gone")
        return usage


def soak(seconds: float, seed: int) -> dict[str, object]:
    """Run it; what was done and what came of it.

    Raises:
        Failed: a promise did not hold.
    """
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(short_directory())
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        node = Node(directory, stack)
        run = Soak(node, fakenvml.build(cache), random.Random(seed))  # noqa: S311  # repeatable
        run.settle()
        for _ in range(20):  # the first of everything loads and allocates once
            run.step()
        run.done.clear()
        before = run.settle()
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            run.step()
        after = run.settle()
        if node.kubelet.crashes:
            raise Failed(f"the kubelet would have crashed: {node.kubelet.crashes}")
        grown = after.resident_bytes - before.resident_bytes
        if grown > MEMORY_MAX_BYTES:
            raise Failed(f"memory grew by {grown / 2**20:.1f} MiB")
        if after.threads > before.threads + 2 or after.open_files > before.open_files + 2:
            raise Failed(f"threads or files were left: {before} -> {after}")
        if len(node.sockets()) != 1:
            raise Failed(f"sockets were left: {node.sockets()}")
        if run.daemon.stop() != 0:
            raise Failed("the daemon did not stop with exit code 0")
        return {
            **dict(run.done),
            "memory_grown_mib": round(grown / 2**20, 2),
            "threads": f"{before.threads} -> {after.threads}",
            "open_files": f"{before.open_files} -> {after.open_files}",
        }

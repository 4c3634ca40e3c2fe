"""The daemon itself is killed at random, at work and while it starts, while pods hold GPUs.

Each time the next one has to offer all GPUs, keep what a pod holds in the list,
and leave neither sockets, nor processes, nor a damaged memory behind.
"""

from __future__ import annotations

import collections
import contextlib
import random
import signal
import tempfile
import time
from pathlib import Path

import psutil

from tests import fakenvml
from tests.daemon import RESOURCE, Daemon, Node, pod, short_directory
from tests.soak import Failed

GPUS = 8
BACK_WITHIN_S = 30.0


class Kills:
    """The node and the daemon that lives on it just now."""

    def __init__(self, node: Node, library: Path, dice: random.Random) -> None:
        self.node = node
        self.dice = dice
        self.gpus = fakenvml.h100x8(node.directory / "nvml")
        self.library = library
        self.done: collections.Counter[str] = collections.Counter()
        node.kubelet.start()
        self.daemon = self.start()
        self.family: set[int] = set()

    def start(self) -> Daemon:
        return self.node.start(
            *("--driver-root", str(self.library.parent), "--poll-interval", "0.2"),
            *("--log-level", "warning"),
            env=self.gpus.env(),
        )

    def kill(self) -> None:
        """At any moment of its life, the first included."""
        time.sleep(self.dice.choice([0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.6]))
        process = psutil.Process(self.daemon.process.pid)
        with contextlib.suppress(psutil.Error):
            self.family |= {child.pid for child in process.children(recursive=True)}
        if self.daemon.stop(signal.SIGKILL) != -signal.SIGKILL:
            raise Failed(f"it ended by itself: {self.daemon.events[-5:]} {self.daemon.garbage}")
        self.done["kills"] += 1

    def begin(self) -> None:
        self.daemon = self.start()

    def check(self) -> None:
        """All GPUs are back, and nothing of the killed ones is left."""
        kubelet = self.node.kubelet
        if not kubelet.wait_allocatable(RESOURCE, GPUS, BACK_WITHIN_S):
            raise Failed(f"{kubelet.allocatable(RESOURCE)} GPUs; {self.daemon.events[-5:]}")
        if damaged := list((self.node.directory / "state").glob("*.damaged")):
            raise Failed(f"its memory was damaged: {damaged}")
        if len(self.node.sockets()) != 1:
            raise Failed(f"sockets were left: {self.node.sockets()}")
        if left := _still_running(self.family):
            raise Failed(f"driver processes were left: {left}")
        if kubelet.crashes:
            raise Failed(f"the kubelet would have crashed: {kubelet.crashes}")
        self.done["recoveries"] += 1


def _still_running(pids: set[int]) -> set[int]:
    """Those that are left after a moment: the kernel ends them with their parent."""
    deadline_s = time.monotonic() + 2
    while left := {pid for pid in pids if _runs_the_driver(pid)}:
        if time.monotonic() > deadline_s:
            return left
        time.sleep(0.02)
    return set()


def _runs_the_driver(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        command = " ".join(process.cmdline())  # empty for a zombie
        return "deviceplugin.hardware.worker" in command
    return False


def kills(seconds: float, seed: int) -> dict[str, object]:
    """Run it; what was done and what came of it.

    Raises:
        Failed: a promise did not hold.
    """
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(short_directory())
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        dice = random.Random(seed)  # noqa: S311  # repeatable
        run = Kills(Node(directory, stack), fakenvml.build(cache), dice)
        run.check()
        held = run.node.kubelet.admit(pod("holder", 2))
        if not held.admitted:
            raise Failed(f"no pod can be admitted: {held}")
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            for _ in range(dice.choice([1, 1, 2, 4])):
                run.kill()
                if dice.random() < 0.2:
                    run.node.kubelet.restart()
                    run.done["kubelet restarts"] += 1
                run.begin()
            run.check()
        if run.daemon.stop() != 0:
            raise Failed("the last one did not stop with exit code 0")
        return dict(run.done)

"""A kubelet that is there and refuses, one that never opens the stream, and none at
all, each for long: tried again and again, never too often, and served soon after."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

from deviceplugin.lifecycle import BACK_OFF_MAX_S, STREAM_WITHIN_S
from deviceplugin.sim.kubelet import Fault
from tests.daemon import RESOURCE, Daemon, Node, short_directory
from tests.soak import Failed

GPUS = 8
AGAIN_WITHIN_S = 1.2 * BACK_OFF_MAX_S + STREAM_WITHIN_S
SLACK_S = 5.0
"""For a busy machine."""


def outages(seconds: float, seed: int) -> dict[str, object]:
    """Run all at once; how often each tried in so many seconds, and how soon it was back.

    Raises:
        Failed: a promise did not hold.
    """
    del seed  # nothing is left to chance
    faults = (Fault.REFUSE, Fault.NO_STREAM, None)
    with ThreadPoolExecutor(len(faults)) as pool:
        texts = pool.map(lambda fault: _outage(fault, seconds), faults)
        return {
            "no kubelet" if f is None else f.value: t for f, t in zip(faults, texts, strict=True)
        }


def _outage(fault: Fault | None, seconds: float) -> str:
    with contextlib.ExitStack() as stack:
        node = Node(stack.enter_context(short_directory()), stack)
        node.kubelet.start()
        daemon = node.start("--simulate", "h100x8", "--log-level", "warning")
        _await(node, daemon, 30)
        before = node.kubelet.register_calls
        if fault is None:
            node.kubelet.stop()
            node.kubelet.remove_directory()
            time.sleep(seconds)
            node.kubelet.start()
            text, within_s = "", SLACK_S
        else:
            with node.kubelet.misbehaving(fault):
                node.kubelet.restart()
                time.sleep(seconds)
            tries = node.kubelet.register_calls - before
            most = 8 + seconds / (0.8 * BACK_OFF_MAX_S)
            if not seconds / (AGAIN_WITHIN_S + SLACK_S) - 1 <= tries <= most:
                raise Failed(f"{fault.value}: {tries} tries in {seconds:.0f} s")
            text, within_s = f"{tries} tries, ", AGAIN_WITHIN_S + SLACK_S
        took_s = _await(node, daemon, within_s)
        if daemon.stop() != 0:
            raise Failed("the daemon did not stop with exit code 0")
        return f"{text}back after {took_s:.2f} s"


def _await(node: Node, daemon: Daemon, within_s: float) -> float:
    """Seconds until all GPUs are offered."""
    asked_s = time.monotonic()
    if not node.kubelet.wait_allocatable(RESOURCE, GPUS, within_s):
        seen = node.kubelet.allocatable(RESOURCE)
        raise Failed(f"{seen} GPUs after {within_s:.0f} s; {daemon.events[-5:]}")
    return time.monotonic() - asked_s

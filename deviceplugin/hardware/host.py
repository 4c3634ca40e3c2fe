"""What a process costs. Only this module says ``psutil``, and the daemon never loads it."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """One process at one moment.

    Attributes:
        resident_bytes: resident memory, shared pages included.
        cpu_s: user and system time so far.
    """

    resident_bytes: int
    cpu_s: float
    threads: int
    open_files: int


def process_usage(pid: int) -> ProcessUsage | None:
    """What the process costs; None when it is gone or may not be asked."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return ProcessUsage(
                resident_bytes=process.memory_info().rss,
                cpu_s=times.user + times.system,
                threads=process.num_threads(),
                open_files=process.num_fds(),
            )
    except psutil.Error:
        return None

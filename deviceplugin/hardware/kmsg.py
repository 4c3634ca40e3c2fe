"""The kernel's log (``/dev/kmsg``): Xid errors as the driver's kernel module writes them.

An opt-in second source, for what happens while no NVML session listens. What was
logged before this process began is read, too: who uses it compares the times.

Facts of the kernel: each read gives one record, "priority,sequence,microseconds,
flags;text"; the time is that of CLOCK_MONOTONIC, which stands still in a suspend;
EPIPE means that records were overwritten before they were read.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from deviceplugin import logs
from deviceplugin.model import LoggedXid

RECORD_MAX_BYTES: Final = 8192
RECORDS_AT_ONCE: Final = 1000

_log = logs.get("kernel log")

_RECORD: Final = re.compile(r"^\d+,\d+,(\d+),[^;]*;(.*)$")
_XID: Final = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.0)?\): (\d+)",
    re.IGNORECASE,
)
_OFF_THE_BUS: Final = re.compile(
    r"NVRM: GPU (?:at )?(?:PCI:)?([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.0)?:"
    r" GPU has fallen off the bus",
    re.IGNORECASE,
)


def parse(line: str) -> tuple[float, str, int] | None:
    """Seconds, PCI bus id as sysfs has it, and Xid of a record; None for any other record."""
    record = _RECORD.match(line)
    if record is None:
        return None
    if (found := _XID.search(record[2])) is not None:
        code = int(found[4])
    elif (found := _OFF_THE_BUS.search(record[2])) is not None:
        code = 79
    else:
        return None
    domain, bus, device = (int(part, 16) for part in found.groups()[:3])
    return int(record[1]) / 1e6, f"{domain:04x}:{bus:02x}:{device:02x}.0", code


class KernelLog:
    """Read by one thread, without ever waiting."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            OSError: it cannot be read.
        """
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._live = False
        """All that was there at the beginning has been read."""

    def close(self) -> None:
        """Let go of it."""
        os.close(self._descriptor)

    def read(self) -> tuple[LoggedXid, ...]:
        """What was logged since the last call. Never raises."""
        # A suspend makes the two clocks differ. Of what was logged before this process
        # nobody knows how many suspends came after it: the earliest time is the safe one.
        ahead_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic() if self._live else 0.0
        found = []
        for line in self._lines():
            if (parsed := parse(line)) is not None:
                at_s, pci_bus_id, code = parsed
                found.append(LoggedXid(pci_bus_id, code, at_s + max(0.0, ahead_s)))
        return tuple(found)

    def _lines(self) -> Iterator[str]:
        for _ in range(RECORDS_AT_ONCE):
            try:
                data = os.read(self._descriptor, RECORD_MAX_BYTES)
            except OSError as error:
                if error.errno == errno.EPIPE:
                    continue  # overwritten: the next read goes on with what is there
                self._live = True
                return
            if not data:
                self._live = True
                return
            yield from data.decode("utf-8", "replace").splitlines()


def open_log(path: Path) -> KernelLog | None:
    """The kernel's log, if it can be had; else that is said."""
    try:
        return KernelLog(path)
    except OSError as error:
        _log.error(
            "no kernel log: mount the host's /dev/kmsg and give the capability SYSLOG,"
            " or set health.kernelLog to off",
            file=path,
            why=error.strerror,
        )
        return None

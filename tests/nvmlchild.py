"""The NVML door in a process of its own: pynvml loads the driver library once for each.

``Door`` is the parent's side. It sends the operations to a child that has an
``Nvml`` and gives back what that answers, or raises what it raised.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deviceplugin.errors import HardwareError
from deviceplugin.hardware.nvml import Nvml
from deviceplugin.model import Address, Alarm, CallError, Reading, Scan, XidEvent


class Door:
    """``Hardware`` on the ``Nvml`` of a child process."""

    def __init__(self, driver_root: Path, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(driver_root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env},
        )

    def scan(self, only: tuple[Address, ...] | None = None) -> Scan:
        scan = self._do("scan", only)
        assert isinstance(scan, Scan)
        return scan

    def read(self) -> tuple[Reading, ...]:
        readings = tuple(self._do("read"))
        assert all(isinstance(reading, Reading) for reading in readings)
        return readings

    def wait(self, timeout_s: float) -> tuple[XidEvent | Alarm, ...]:
        events = tuple(self._do("wait", timeout_s))
        assert all(isinstance(event, XidEvent | Alarm) for event in events)
        return events

    def errors(self) -> tuple[CallError, ...]:
        errors = tuple(self._do("errors"))
        assert all(isinstance(error, CallError) for error in errors)
        return errors

    def close(self) -> bool:
        closed = self._do("close")
        assert isinstance(closed, bool)
        return closed

    def end(self) -> None:
        """End the child; it ends by itself when it is asked no more, if nothing hangs."""
        try:
            self._process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _do(self, method: str, *args: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((method, args), self._process.stdin)
        self._process.stdin.flush()
        answer = pickle.load(self._process.stdout)  # noqa: S301  # from our own child
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve() -> None:
    nvml = Nvml(Path(sys.argv[1]))
    while True:
        try:
            method, args = pickle.load(sys.stdin.buffer)  # noqa: S301  # from our own parent
        except EOFError:
            return
        try:
            answer = getattr(nvml, method)(*args)
        except HardwareError as error:
            answer = error
        except Exception:  # noqa: BLE001  # all but a HardwareError is a fault of the door
            answer = AssertionError(traceback.format_exc())
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()

"""``Hardware`` in a child process that can be abandoned.

The driver library hangs in calls that nothing can interrupt, crashes, stays
broken in the one process that loaded it, and its open handles block a GPU
reset or a driver unload. So it lives in a small child (``worker``); this side
waits for its answers with deadlines. A child that is hung or crashed is a
``HardwareError`` like any other: ``close`` kills it, the next ``scan`` starts a
new one. One that not even SIGKILL ends (it hangs in the kernel) is left behind
and reaped whenever it goes.
"""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from deviceplugin import errors
from deviceplugin.errors import HardwareError
from deviceplugin.hardware import messages
from deviceplugin.model import Address, Alarm, CallError, Reading, Scan, XidEvent

SCAN_TIMEOUT_S = 60.0
"""Opening the driver takes seconds for each GPU where no persistence daemon runs."""
READ_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 0.4
"""How long a child gets to let go of the driver before it is killed."""


class ChildHardware:
    """Used by one thread; ``wake`` and ``interrupt`` may come from any."""

    def __init__(
        self,
        driver_root: Path = Path("/"),
        *,
        scan_timeout_s: float = SCAN_TIMEOUT_S,
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        self._driver_root = driver_root
        self._scan_timeout_s = scan_timeout_s
        self._read_timeout_s = read_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._frames = messages.Frames()
        self._inbox: collections.deque[messages.Message] = collections.deque()
        self._errors: list[CallError] = []
        self._abandoned: list[subprocess.Popen[bytes]] = []
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # as long as we live
        self._hung = False
        self._woken = False
        self._interrupted = threading.Event()

    # --- Hardware -------------------------------------------------------------------

    def scan(self, only: tuple[Address, ...] | None = None) -> Scan:
        if self._process is None:
            self.start()
        answer = self._ask(messages.DoScan(only), self._scan_timeout_s)
        if not isinstance(answer, messages.Scanned):
            raise self._nonsense(answer)
        return answer.scan

    def read(self) -> tuple[Reading, ...]:
        answer = self._ask(messages.DoRead(), self._read_timeout_s)
        if not isinstance(answer, messages.Read):
            raise self._nonsense(answer)
        return answer.readings

    def wait(self, timeout_s: float) -> tuple[XidEvent | Alarm, ...]:
        if self._woken:
            self._woken = False  # while something else was asked
            return ()
        message = self._receive(timeout_s)
        if message is None:
            return ()
        if isinstance(message, messages.Failed):
            raise _error(message)
        if not isinstance(message, messages.News):
            raise self._nonsense(message)
        return (*message.events, *message.alarms)

    def errors(self) -> tuple[CallError, ...]:
        found, self._errors = tuple(self._errors), []
        return found

    def wake(self) -> None:
        os.eventfd_write(self._wake, 1)

    def interrupt(self) -> None:
        self._interrupted.set()
        self.wake()

    def close(self) -> bool:
        self._interrupted.clear()
        self._woken = False
        process, connection = self._process, self._connection
        self._process = self._connection = None
        self._inbox.clear()
        self._frames = messages.Frames()
        self._abandoned = [left for left in self._abandoned if left.poll() is None]
        if connection is not None:
            connection.close()  # tells the child to end
        if process is not None and (self._hung or not _ended(process, CLOSE_TIMEOUT_S)):
            process.kill()
            if not _ended(process, 0.1):
                self._abandoned.append(process)
        self._hung = False
        return not self._abandoned

    # --- the child --------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """The child's process id; None when there is none."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the child, which takes a while to load; ``scan`` does it otherwise.

        Raises:
            HardwareError: no process can be started.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-m", "deviceplugin.hardware.worker"),
                        *(str(theirs.fileno()), str(self._driver_root)),
                    ],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                )
            except OSError as error:
                ours.close()
                raise HardwareError(f"no process for the driver can be started: {error}") from error
        ours.setblocking(False)
        self._connection = ours

    def _ask(self, request: messages.Request, timeout_s: float) -> messages.Message:
        """The answer to a request; news that come before it are kept for ``wait``."""
        if self._connection is None:
            raise HardwareError("the driver is closed")
        news: list[messages.Message] = []
        deadline_s = time.monotonic() + timeout_s
        try:
            messages.send(self._connection, request)
            while True:
                message = self._receive(deadline_s - time.monotonic())
                if message is None:
                    if time.monotonic() < deadline_s:
                        self._woken = True
                        continue
                    self._hung = True
                    raise errors.DriverHung(
                        f"the driver has not answered for {timeout_s:.0f} s: a new process tries"
                    )
                if isinstance(message, messages.News):
                    news.append(message)
                elif isinstance(message, messages.Failed):
                    raise _error(message)
                else:
                    return message
        except OSError as error:
            raise self._gone() from error
        finally:
            self._inbox.extendleft(reversed(news))  # before what came after them

    def _receive(self, timeout_s: float) -> messages.Message | None:
        """The next message; None when there is none in time, or after ``wake``."""
        self._check()
        if self._inbox:
            return self._inbox.popleft()
        if self._connection is None:
            raise HardwareError("the driver is closed")
        deadline_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for source in (self._connection, self._wake):
                selector.register(source, selectors.EVENT_READ)
            while not self._inbox:
                ready = selector.select(max(0.0, deadline_s - time.monotonic()))
                sources = {key.fileobj for key, _ in ready}
                if self._wake in sources:
                    os.eventfd_read(self._wake)
                    self._check()
                    return None
                if not sources:
                    return None
                self._take(self._connection)
        return self._inbox.popleft()

    def _check(self) -> None:
        if self._interrupted.is_set():
            raise errors.Interrupted("given up")

    def _take(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 20)
            bodies = list(self._frames.feed(data))
            arrived = [messages.message(body) for body in bodies]
        except OSError as error:
            raise self._gone() from error
        except ValueError as error:
            raise HardwareError(f"the driver's process talks nonsense: {error}") from error
        if not data:
            raise self._gone()
        for message in arrived:
            self._errors.extend(message.errors)
        self._inbox.extend(arrived)

    def _gone(self) -> HardwareError:
        """The child ended by itself: say how."""
        code = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(0.5)
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return errors.DriverCrashed(
                    f"the driver's process was killed by {signal.Signals(-code).name}"
                )
        return errors.DriverCrashed(f"the driver's process ended with exit code {code}")

    @staticmethod
    def _nonsense(message: messages.Message) -> HardwareError:
        return HardwareError(f"the driver's process answers with {type(message).__name__}")


def _error(failed: messages.Failed) -> HardwareError:
    """The exception that the child raised."""
    kinds: dict[str, Callable[..., HardwareError]] = {
        kind.code: kind for kind in (errors.DriverMissing, errors.DriverMismatch)
    }
    make = kinds.get(failed.code, HardwareError)
    return make(failed.text, call=failed.call, driver_code=failed.driver_code)


def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True

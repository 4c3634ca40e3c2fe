"""Lines that change simulated GPUs while they run, and the FIFO that takes them.

    xid GPU CODE    the driver reports an Xid error
    lost GPU        the GPU stops answering
    back GPU        it answers again
    reset GPU       it was reset, and answers

GPU is an index or a UUID; blank lines and those that start with # are passed
over. A line that is none of these is reported and ignored.
"""

from __future__ import annotations

import os
import select
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deviceplugin.errors import ConfigError, DevicePluginError
from deviceplugin.sim.gpus import SimulatedHardware

LINE_MAX_BYTES = 4096
FORMS = "xid GPU CODE, lost GPU, back GPU, reset GPU"


class BadLine(DevicePluginError):
    """A control line that says nothing that can be done."""

    code = "bad_control_line"


@dataclass(frozen=True, slots=True)
class Command:
    """One control line. ``xid`` is set for the verb "xid" alone."""

    verb: str
    gpu: str
    xid: int | None = None

    def __str__(self) -> str:
        return " ".join([self.verb, self.gpu, *([] if self.xid is None else [str(self.xid)])])


def parse(line: str) -> Command | None:
    """The command in a line; None for a blank one or a comment.

    Raises:
        BadLine: the text names the bad word and shows the forms.
    """
    words = line.split()
    if not words or words[0].startswith("#"):
        return None
    match words:
        case [("lost" | "back" | "reset") as verb, gpu]:
            return Command(verb, gpu)
        case ["xid", gpu, code]:
            if not code.isascii() or not code.isdigit() or len(code) > 6:
                raise BadLine(f"{code!r} is no Xid code; the forms are: {FORMS}")
            return Command("xid", gpu, int(code))
        case [("lost" | "back" | "reset" | "xid") as verb, *rest]:
            raise BadLine(f"{verb!r} does not take {len(rest)} words; the forms are: {FORMS}")
        case _:
            raise BadLine(f"{words[0]!r} is no command; the forms are: {FORMS}")


def perform(command: Command, hardware: SimulatedHardware) -> None:
    """Do what a command says.

    Raises:
        ProfileError: there is no such GPU.
    """
    match command:
        case Command("xid", gpu, int(code)):
            hardware.xid(gpu, code)
        case Command("lost", gpu):
            hardware.lose(gpu)
        case Command("back", gpu):
            hardware.restore(gpu)
        case Command("reset", gpu):
            hardware.reset(gpu)


class ControlFifo:
    """Reads control lines from a FIFO, in a thread of its own, until ``stop``.

    The FIFO is opened for reading and writing, so that the end of one writer
    is no end of file and the next one can come.
    """

    def __init__(
        self,
        path: Path,
        hardware: SimulatedHardware,
        on_bad_line: Callable[[str, str], None],
        on_command: Callable[[Command], None],
    ) -> None:
        """
        Args:
            on_bad_line: told the line and what is wrong with it.
            on_command: told what was done.
        """
        self._path = path
        self._hardware = hardware
        self._on_bad_line = on_bad_line
        self._on_command = on_command
        self._made = False
        self._fifo = self._wake_read = self._wake_write = -1
        self._thread = threading.Thread(target=self._run, name="simulate-control", daemon=True)

    def start(self) -> None:
        """Make the FIFO if it is not there, and begin.

        Raises:
            ConfigError: there is something else at the path, or it cannot be made.
        """
        try:
            try:
                os.mkfifo(self._path, 0o600)
                self._made = True
            except FileExistsError:
                if not stat.S_ISFIFO(self._path.stat().st_mode):
                    raise ConfigError(
                        [f"simulateControl: {self._path} is there already and is no FIFO"]
                    ) from None
            self._fifo = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                [f"simulateControl: {self._path} cannot be made or opened: {error.strerror}"]
            ) from error
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; removes the FIFO if ``start`` made it."""
        if self._thread.ident is None:
            return
        os.write(self._wake_write, b"x")
        self._thread.join()
        for descriptor in (self._fifo, self._wake_read, self._wake_write):
            os.close(descriptor)
        if self._made:
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        pending = b""
        too_long = False
        poll = select.poll()
        for descriptor in (self._fifo, self._wake_read):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if self._wake_read in ready:
                return
            try:
                pending += os.read(self._fifo, 65536)
            except BlockingIOError:
                continue
            *lines, pending = pending.split(b"\n")
            for line in lines:
                if too_long or len(line) > LINE_MAX_BYTES:
                    self._on_bad_line(_show(line), f"longer than {LINE_MAX_BYTES} bytes")
                else:
                    self._line(line)
                too_long = False
            if len(pending) > LINE_MAX_BYTES:
                pending, too_long = pending[:80], True

    def _line(self, line: bytes) -> None:
        try:
            command = parse(line.decode("utf-8"))
            if command is not None:
                perform(command, self._hardware)
                self._on_command(command)
        except UnicodeDecodeError:
            self._on_bad_line(_show(line), "is no UTF-8")
        except DevicePluginError as error:
            self._on_bad_line(_show(line), str(error))


def _show(line: bytes) -> str:
    """A bad line for a log: cut, and readable whatever it holds."""
    text = line[:80].decode("utf-8", "backslashreplace")
    return text if len(line) <= 80 else text + "…"

"""Lines that change simulated GPUs while they run, and the FIFO that takes them.

    xid GPU CODE    the driver reports an Xid error
    lost GPU        the GPU stops answering
    back GPU        it answers again
    reset GPU       it was reset, and answers

GPU is an index or a UUID; blank lines and those that start with # are passed
over. ``parse`` is pure; ``ControlFifo`` owns the FIFO and the thread that reads
it. A line that cannot be understood or done is reported and ignored; nothing
that comes through the FIFO ends the thread. A line counts when its line break
has arrived: what a writer left unfinished is continued by the next one.

    echo 'xid 0 79' > /path/of/the/fifo
"""

from __future__ import annotations

import os
import re
import select
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deviceplugin.errors import ConfigError, DevicePluginError
from deviceplugin.sim.gpus import SimulatedHardware

LINE_MAX_BYTES = 4096
SHOWN_MAX = 80
"""How much of a bad line is reported."""
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
        case ["xid", gpu, code] if re.fullmatch("[0-9]{1,6}", code):
            return Command("xid", gpu, int(code))
        case ["xid", _, code]:
            trouble = f"{_show(code)} is no Xid code"
        case [("xid" | "lost" | "back" | "reset") as verb]:
            trouble = f"{verb!r} needs a GPU"
        case ["xid", gpu]:
            trouble = f"'xid' needs a code after {_show(gpu)}"
        case ["xid", _, _, extra, *_] | ["lost" | "back" | "reset", _, extra, *_]:
            trouble = f"{_show(extra)} is one word too many"
        case _:
            trouble = f"{_show(words[0])} is no command"
    raise BadLine(f"{trouble}; the forms are: {FORMS}")


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
    is no end of file: the next one can come, and the thread sleeps meanwhile.
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
            on_bad_line: told the line, shortened and printable, and what is wrong
                with it. Like the next one called in the thread; must not raise.
            on_command: told what was done.
        """
        self._path = path
        self._hardware = hardware
        self._on_bad_line = on_bad_line
        self._on_command = on_command
        self._made = False
        self._fifo = self._stop = -1
        self._thread = threading.Thread(target=self._run, name="simulate-control", daemon=True)

    def start(self) -> None:
        """Make the FIFO if it is not there, and begin.

        Raises:
            ConfigError: there is something else at the path, or it cannot be made.
        """
        try:
            self._open()
        except OSError as error:
            self._close()
            raise ConfigError(
                [f"simulateControl: {self._path} cannot be made or opened: {error.strerror}"]
            ) from error
        self._thread.start()

    def stop(self) -> None:
        """End the thread; removes the FIFO if ``start`` made it. Twice is once."""
        if self._thread.is_alive():
            os.eventfd_write(self._stop, 1)
            self._thread.join()
        self._close()

    def _open(self) -> None:
        try:
            os.mkfifo(self._path, 0o600)
            self._made = True
        except FileExistsError:
            if not stat.S_ISFIFO(self._path.stat().st_mode):
                raise ConfigError(
                    [f"simulateControl: {self._path} is there already and is no FIFO"]
                ) from None
        self._fifo = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)

    def _close(self) -> None:
        for descriptor in (self._fifo, self._stop):
            if descriptor >= 0:
                os.close(descriptor)
        self._fifo = self._stop = -1
        if self._made:
            self._made = False
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in (self._fifo, self._stop):
            poll.register(descriptor, select.POLLIN)
        rest, too_long = b"", False
        while self._stop not in dict(poll.poll()):
            try:
                chunk = os.read(self._fifo, 65536)
            except BlockingIOError:  # somebody else read it
                continue
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if too_long or len(line) > LINE_MAX_BYTES:
                    why = f"is longer than {LINE_MAX_BYTES} bytes"
                    self._on_bad_line(_printable(line), why)
                else:
                    self._line(line)
                too_long = False
            if len(rest) > LINE_MAX_BYTES:  # keep what the report needs, one byte to show a cut
                rest, too_long = rest[: SHOWN_MAX + 1], True

    def _line(self, line: bytes) -> None:
        try:
            command = parse(line.decode("utf-8"))
            if command is not None:
                perform(command, self._hardware)
                self._on_command(command)
        except UnicodeDecodeError:
            self._on_bad_line(_printable(line), "is not UTF-8")
        except DevicePluginError as error:
            self._on_bad_line(_printable(line), str(error))


def _show(word: str) -> str:
    """A word in a sentence: quoted, and no longer than a sentence bears."""
    return repr(word) if len(word) <= SHOWN_MAX else f"{word[:SHOWN_MAX]!r}…"


def _printable(line: bytes) -> str:
    """A bad line for a log: cut, and harmless to a terminal whatever it holds."""
    text = line[:SHOWN_MAX].decode("utf-8", "backslashreplace")
    shown = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii")
        for each in text
    )
    return shown if len(line) <= SHOWN_MAX else f"{shown}…"

"""Control lines, and the FIFO that takes them from whoever writes."""

from __future__ import annotations

import os
import queue
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deviceplugin.errors import ConfigError, ProfileError
from deviceplugin.model import Reading, XidEvent
from deviceplugin.sim import profile
from deviceplugin.sim.gpus import LOST, SimulatedHardware
from deviceplugin.sim.scenario import (
    FORMS,
    LINE_MAX_BYTES,
    BadLine,
    Command,
    ControlFifo,
    parse,
    perform,
)

L4X1 = profile.load("l4x1")
ID = L4X1.gpus[0].id
FOREVER_S = 3600.0


# --- lines ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("xid 0 79", Command("xid", "0", 79)),
        ("lost 0", Command("lost", "0")),
        ("back 0", Command("back", "0")),
        (f"reset {ID}", Command("reset", ID)),
        ("  xid\t7  0\r", Command("xid", "7", 0)),
    ],
)
def test_a_line_is_a_command(line: str, command: Command) -> None:
    assert parse(line) == command


@pytest.mark.parametrize("line", ["", "   ", "\r", "# xid 0 79", "  #", "#lost"])
def test_blank_lines_and_comments_say_nothing(line: str) -> None:
    assert parse(line) is None


@pytest.mark.parametrize(
    ("line", "trouble"),
    [
        ("xdi 0 79", "'xdi' is no command"),
        ("XID 0 79", "'XID' is no command"),
        ("xid", "'xid' needs a GPU"),
        ("xid 0", "'xid' needs a code after '0'"),
        ("xid 0 seventy", "'seventy' is no Xid code"),
        ("xid 0 -1", "'-1' is no Xid code"),
        ("xid 0 ٧٩", "'٧٩' is no Xid code"),
        ("xid 0 1234567", "'1234567' is no Xid code"),
        ("xid 0 79 now", "'now' is one word too many"),
        ("lost", "'lost' needs a GPU"),
        ("back 0 1", "'1' is one word too many"),
        ("reset 0 # soon", "'#' is one word too many"),
        ("x" * 200, f"{'x' * 80!r}… is no command"),
    ],
)
def test_a_bad_line_is_told_by_its_bad_word_and_the_forms(line: str, trouble: str) -> None:
    with pytest.raises(BadLine) as caught:
        parse(line)
    assert str(caught.value) == f"{trouble}; the forms are: {FORMS}"


def test_the_forms_are_all_there_are() -> None:
    assert FORMS == "xid GPU CODE, lost GPU, back GPU, reset GPU"


@given(
    st.builds(Command, st.sampled_from(["lost", "back", "reset"]), st.sampled_from(["0", ID]))
    | st.builds(Command, st.just("xid"), st.sampled_from(["0", ID]), st.integers(0, 999_999))
)
def test_a_command_written_out_is_that_command(command: Command) -> None:
    assert parse(str(command)) == command


@given(st.text())
def test_any_line_is_a_command_or_nothing_or_bad(line: str) -> None:
    try:
        command = parse(line)
    except BadLine:
        return
    assert command is None or command.verb in ("xid", "lost", "back", "reset")


def test_each_command_does_what_it_says() -> None:
    hardware = SimulatedHardware(L4X1)
    hardware.scan()
    perform(Command("xid", "0", 79), hardware)
    assert hardware.wait(FOREVER_S) == (XidEvent(ID, 79),)
    perform(Command("lost", "0"), hardware)
    assert hardware.read() == (Reading(ID, LOST),)
    perform(Command("back", "0"), hardware)
    assert hardware.read() == (Reading(ID),)
    perform(Command("reset", ID), hardware)
    assert hardware.read() == (Reading(ID, was_reset=True),)
    with pytest.raises(ProfileError, match="there is no GPU '1'"):
        perform(Command("lost", "1"), hardware)


# --- the FIFO ---------------------------------------------------------------------------


class Control:
    """A running ControlFifo and what it reported, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hardware = SimulatedHardware(L4X1)
        self.hardware.scan()
        self._heard: queue.Queue[str] = queue.Queue()
        self.fifo = ControlFifo(
            path,
            self.hardware,
            on_bad_line=lambda line, why: self._heard.put(f"bad: {line}: {why}"),
            on_command=lambda command: self._heard.put(str(command)),
        )

    def heard(self) -> str:
        """The next report."""
        return self._heard.get(timeout=10)

    def write(self, data: bytes) -> None:
        """As a writer that comes, writes and goes."""
        with self.path.open("wb") as fifo:
            fifo.write(data)


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    running = Control(tmp_path / "control")
    running.fifo.start()
    yield running
    running.fifo.stop()


def test_a_line_reaches_the_hardware_before_it_is_reported(control: Control) -> None:
    control.write(b"xid 0 79\n")
    assert control.heard() == "xid 0 79"
    assert control.hardware.wait(0) == (XidEvent(ID, 79),)


def test_writers_come_one_after_the_other(control: Control) -> None:
    for code in range(20):
        control.write(f"xid 0 {code}\n".encode())
        assert control.heard() == f"xid 0 {code}"


def test_one_writer_may_write_many_lines(control: Control) -> None:
    control.write(b"# a scenario\n\nxid 0 79\r\nlost 0\nreset 0\n")
    assert [control.heard() for _ in range(3)] == ["xid 0 79", "lost 0", "reset 0"]


def test_a_line_may_come_in_pieces(control: Control) -> None:
    with control.path.open("wb", buffering=0) as fifo:
        fifo.write(b"lost 0\nxid")
        assert control.heard() == "lost 0"
        fifo.write(b" 0 ")
        fifo.write(b"79\n")
        assert control.heard() == "xid 0 79"


def test_a_bad_line_is_reported_and_the_next_one_done(control: Control) -> None:
    control.write(b"explode 0\nlost 9\nlost 0\n")
    assert control.heard() == f"bad: explode 0: 'explode' is no command; the forms are: {FORMS}"
    assert control.heard() == (
        "bad: lost 9: there is no GPU '9': give an index from 0 to 0, or a UUID of this profile"
    )
    assert control.heard() == "lost 0"


def test_bytes_that_are_no_text_are_reported_readable(control: Control) -> None:
    control.write(b"lost \xff\x1b[2J\nlost 0\n")
    assert control.heard() == r"bad: lost \xff\x1b[2J: is not UTF-8"
    assert control.heard() == "lost 0"


@pytest.mark.parametrize("length", [LINE_MAX_BYTES + 1, 3 * 65536])
def test_a_line_that_is_too_long_is_dropped_with_one_report(control: Control, length: int) -> None:
    control.write(b"x" * length + b"\nlost 0\n")
    assert control.heard() == f"bad: {'x' * 80}…: is longer than {LINE_MAX_BYTES} bytes"
    assert control.heard() == "lost 0"


def test_a_line_of_the_greatest_length_is_read(control: Control) -> None:
    control.write(b"lost 0".ljust(LINE_MAX_BYTES) + b"\n")
    assert control.heard() == "lost 0"


def test_the_thread_sleeps_after_a_writer_has_gone(control: Control) -> None:
    """An end of file that is not handled keeps ``poll`` returning at once."""
    control.write(b"lost 0\n")
    assert control.heard() == "lost 0"
    (thread,) = (each for each in threading.enumerate() if each.name == "simulate-control")
    assert thread.ident is not None
    cpu_clock = time.pthread_getcpuclockid(thread.ident)
    before_s = time.clock_gettime(cpu_clock)
    time.sleep(0.2)
    assert time.clock_gettime(cpu_clock) - before_s < 0.05


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.binary(max_size=200) | st.sampled_from([b"lost 0\n", b"xid 0 "]), max_size=8))
def test_no_bytes_end_the_thread(control: Control, writes: list[bytes]) -> None:
    for data in writes:
        control.write(data)
    control.write(b"\nback 0\n")
    while control.heard() != "back 0":
        pass


# --- start and stop ---------------------------------------------------------------------


def test_the_fifo_is_its_owners_alone_and_gone_after_the_stop(tmp_path: Path) -> None:
    control = Control(tmp_path / "control")
    control.fifo.start()
    mode = control.path.stat().st_mode
    assert stat.S_ISFIFO(mode)
    assert stat.S_IMODE(mode) == 0o600
    control.fifo.stop()
    control.fifo.stop()
    assert not control.path.exists()


def test_a_fifo_that_was_there_is_used_and_stays(tmp_path: Path) -> None:
    control = Control(tmp_path / "control")
    os.mkfifo(control.path)
    control.fifo.start()
    control.write(b"lost 0\n")
    assert control.heard() == "lost 0"
    control.fifo.stop()
    assert stat.S_ISFIFO(control.path.stat().st_mode)


def test_a_file_in_its_place_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    control = Control(tmp_path / "control")
    control.path.write_text("precious", encoding="utf-8")
    with pytest.raises(ConfigError, match="control is there already and is no FIFO"):
        control.fifo.start()
    control.fifo.stop()
    assert control.path.read_text(encoding="utf-8") == "precious"


def test_a_directory_in_its_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is there already and is no FIFO"):
        Control(tmp_path).fifo.start()
    assert tmp_path.is_dir()


def test_a_place_where_no_fifo_can_be_made_is_named(tmp_path: Path) -> None:
    control = Control(tmp_path / "absent" / "control")
    with pytest.raises(ConfigError, match="cannot be made or opened: No such file or directory"):
        control.fifo.start()
    control.fifo.stop()


def test_stop_without_start_does_nothing(tmp_path: Path) -> None:
    Control(tmp_path / "control").fifo.stop()
    assert list(tmp_path.iterdir()) == []


def test_stop_ends_the_thread_in_the_middle_of_a_line(control: Control) -> None:
    with control.path.open("wb", buffering=0) as fifo:
        fifo.write(b"lost 0\nlost")
        assert control.heard() == "lost 0"
        control.fifo.stop()
    assert "simulate-control" not in {each.name for each in threading.enumerate()}


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208  # names are what is compared
    control = Control(tmp_path / "control")
    control.fifo.start()
    control.write(b"lost 0\n")
    assert control.heard() == "lost 0"
    control.fifo.stop()
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208  # as above

"""deviceplugin.sim.scenario"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deviceplugin.errors import ConfigError
from deviceplugin.model import XidEvent
from deviceplugin.sim import profile, scenario
from deviceplugin.sim.gpus import SimulatedHardware
from deviceplugin.sim.scenario import BadLine, Command, ControlFifo

PROFILE = profile.load("h100x8")


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("xid 3 79", Command("xid", "3", 79)),
        ("  lost   GPU-1  ", Command("lost", "GPU-1")),
        ("back 0", Command("back", "0")),
        ("reset 0", Command("reset", "0")),
        ("", None),
        ("# xid 3 79", None),
    ],
)
def test_lines_that_mean_something(line: str, command: Command | None) -> None:
    assert scenario.parse(line) == command


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("explode 3", "'explode' is no command"),
        ("xid 3", "'xid' does not take 1 words"),
        ("lost", "'lost' does not take 0 words"),
        ("xid 3 bad", "'bad' is no Xid code"),
        ("xid 3 -1", "'-1' is no Xid code"),
        ("xid 3 ²", "'²' is no Xid code"),
        ("xid 3 79 1", "'xid' does not take 3 words"),
    ],
)
def test_lines_that_mean_nothing_name_the_word_and_show_the_forms(line: str, text: str) -> None:
    with pytest.raises(BadLine) as caught:
        scenario.parse(line)
    assert str(caught.value) == f"{text}; the forms are: {scenario.FORMS}"


class Fifo:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.hardware = SimulatedHardware(PROFILE)
        self.bad: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.done: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.control = ControlFifo(
            path, self.hardware, lambda line, why: self.bad.put((line, why)), self.done.put
        )

    def write(self, data: bytes) -> None:
        with self.path.open("wb", buffering=0) as fifo:
            fifo.write(data)


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Fifo]:
    made = Fifo(tmp_path / "control")
    made.control.start()
    yield made
    made.control.stop()


def test_lines_of_one_writer_after_another_are_obeyed(fifo: Fifo) -> None:
    fifo.write(b"xid 3 79\nlost 0\n")
    assert fifo.done.get(timeout=5) == Command("xid", "3", 79)
    assert fifo.done.get(timeout=5) == Command("lost", "0")
    fifo.write(b"reset 0\n")
    assert fifo.done.get(timeout=5) == Command("reset", "0")
    assert fifo.hardware.wait(1) == (XidEvent(PROFILE.gpus[3].id, 79),)


def test_a_line_may_come_in_pieces(fifo: Fifo) -> None:
    with fifo.path.open("wb", buffering=0) as writer:
        writer.write(b"lo")
        writer.write(b"st 0")
        writer.write(b"\n")
    assert fifo.done.get(timeout=5) == Command("lost", "0")


@pytest.mark.parametrize(
    ("data", "line", "why"),
    [
        (b"explode 3\n", "explode 3", "'explode' is no command"),
        (b"lost 9\n", "lost 9", "there is no GPU '9'"),
        (b"\xff\n", "\\xff", "is no UTF-8"),
        (b"x" * 5000 + b"\n", "x" * 80, "longer than 4096 bytes"),
    ],
)
def test_a_bad_line_is_reported_and_ignored(fifo: Fifo, data: bytes, line: str, why: str) -> None:
    fifo.write(data)
    seen, reason = fifo.bad.get(timeout=5)
    assert seen.startswith(line)
    assert reason.startswith(why)
    fifo.write(b"lost 0\n")
    assert fifo.done.get(timeout=5) == Command("lost", "0")


def test_the_fifo_is_for_its_owner_and_goes_with_its_maker(tmp_path: Path) -> None:
    made = Fifo(tmp_path / "control")
    made.control.start()
    assert made.path.is_fifo()
    assert made.path.stat().st_mode & 0o777 == 0o600
    made.control.stop()
    assert not made.path.exists()


def test_a_fifo_that_was_there_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "control")
    made = Fifo(tmp_path / "control")
    made.control.start()
    made.control.stop()
    assert made.path.is_fifo()


def _plain_file(path: Path) -> None:
    path.write_text("precious")


@pytest.mark.parametrize("prepare", [_plain_file, Path.mkdir])
def test_something_else_at_the_path_is_not_touched(
    tmp_path: Path, prepare: Callable[[Path], None]
) -> None:
    path = tmp_path / "control"
    prepare(path)
    with pytest.raises(ConfigError, match="is there already and is no FIFO"):
        Fifo(path).control.start()
    assert path.is_dir() or path.read_text() == "precious"


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be made or opened: No such file"):
        Fifo(tmp_path / "no/control").control.start()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(data=st.binary(max_size=200))
def test_no_bytes_end_the_reader(fifo: Fifo, data: bytes) -> None:
    fifo.write(data + b"\n")
    fifo.write(b"back 7\n")
    while fifo.done.get(timeout=5) != Command("back", "7"):
        pass

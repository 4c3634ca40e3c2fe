"""deviceplugin.hardware.kmsg"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.hardware.kmsg import KernelLog, open_log, parse
from deviceplugin.model import LoggedXid


@pytest.mark.parametrize(
    ("text", "place", "code"),
    [
        ("NVRM: Xid (PCI:0000:1b:00): 79, pid=7, GPU has fallen off the bus.", "0000:1b:00.0", 79),
        ("NVRM: Xid (0000:03:00): 31, Ch 00000008", "0000:03:00.0", 31),
        ("NVRM: Xid (PCI:0001:E4:00): 145, RLW_REMAP Nonfatal", "0001:e4:00.0", 145),
        ("NVRM: GPU 0000:9d:00.0: GPU has fallen off the bus.", "0000:9d:00.0", 79),
        ("NVRM: GPU at PCI:0000:9d:00: GPU-12345678-0000", None, None),
        ("usb 1-1: new device", None, None),
        ("NVRM: Xid (PCI:zzzz:00:00): 79", None, None),
    ],
)
def test_a_record_is_an_xid_or_nothing(text: str, place: str | None, code: int | None) -> None:
    found = parse(f"3,1234,5000000,-;{text}")
    assert found == (None if place is None else (5.0, place, code))


def test_what_is_no_record_is_nothing() -> None:
    assert parse(" SUBSYSTEM=pci") is None
    assert parse("NVRM: Xid (PCI:0000:1b:00): 79") is None


@given(st.text(max_size=200))
def test_any_text_is_survived(text: str) -> None:
    parse(text)
    parse(f"3,1,1,-;NVRM: Xid {text}")


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[tuple[KernelLog, int]]:
    """A log, and where to write its records."""
    os.mkfifo(tmp_path / "kmsg")
    with contextlib.closing(KernelLog(tmp_path / "kmsg")) as log:
        writer = os.open(tmp_path / "kmsg", os.O_WRONLY)
        yield log, writer
        os.close(writer)


def test_records_are_read_once_and_without_waiting(pipe: tuple[KernelLog, int]) -> None:
    log, writer = pipe
    assert log.read() == ()
    os.write(
        writer,
        b"6,1,4000000,-;something\n"
        b"3,2,5000000,-;NVRM: Xid (PCI:0000:1b:00): 48, pid=1\n KEY=value\n",
    )
    (entry,) = log.read()
    assert (entry.pci_bus_id, entry.xid) == ("0000:1b:00.0", 48)
    assert entry.at_s >= 5.0
    assert log.read() == ()


def test_of_what_was_there_before_the_earliest_time_is_taken(tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_bytes(b"3,2,5000000,-;NVRM: Xid (PCI:0000:1b:00): 48, pid=1\n")
    with contextlib.closing(KernelLog(tmp_path / "kmsg")) as log:
        assert log.read() == (LoggedXid("0000:1b:00.0", 48, 5.0),)


def test_a_log_that_cannot_be_had_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert open_log(tmp_path / "kmsg") is None
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "health.kernelLog" in record.getMessage()

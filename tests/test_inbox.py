"""deviceplugin.inbox"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deviceplugin import inbox
from deviceplugin.inbox import Advice, Inbox
from deviceplugin.stats import Stats
from tests.builders import SetClock

GOOD = {
    "gpu": "GPU-1",
    "verdict": "unhealthy",
    "reason": "diag failed",
    "source": "dcgm",
    "ttl_s": 60,
}


class Place:
    def __init__(self, directory: Path) -> None:
        self.clock, self.stats = SetClock(), Stats()
        self.inbox = Inbox(directory, self.stats, self.clock)
        self.folder = directory / "verdicts.d"
        self.folder.mkdir()

    def write(self, name: str, content: object, written_s: float | None = None) -> Path:
        path = self.folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        time_s = self.clock.time_s if written_s is None else written_s
        os.utime(path, (time_s, time_s))
        return path

    @property
    def bad(self) -> float:
        return self.stats.gauges("inbox_bad_files")[()]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_verdict_counts_from_when_it_was_written_until_its_time_is_over(place: Place) -> None:
    place.write("a.json", GOOD, written_s=place.clock.time_s - 20)
    advice = Advice("a.json", "GPU-1", "dcgm", "diag failed", until_s=140.0)
    assert place.inbox.look() == (advice,)
    place.clock.time_s += 1_000_000
    assert place.inbox.look() == (advice,), "a clock that is set changes nothing"
    place.clock.boottime_s = 139.9
    assert place.inbox.look() == (advice,)
    place.clock.boottime_s = 140.0
    assert place.inbox.look() == ()
    assert place.bad == 0


def test_a_verdict_that_is_written_anew_counts_anew_and_one_that_is_removed_does_not(
    place: Place,
) -> None:
    place.write("a.json", GOOD)
    place.clock.time_s += 50
    place.clock.boottime_s += 50
    path = place.write("a.json", GOOD)
    assert [advice.until_s for advice in place.inbox.look()] == [210.0]
    place.write("a.json", {**GOOD, "verdict": "healthy"})
    assert place.inbox.look() == ()
    path.unlink()
    assert place.inbox.look() == ()


def test_a_file_from_the_future_counts_from_now(place: Place) -> None:
    place.write("a.json", GOOD, written_s=place.clock.time_s + 3600)
    assert [advice.until_s for advice in place.inbox.look()] == [160.0]


def test_without_a_folder_there_is_nothing(tmp_path: Path) -> None:
    assert Inbox(tmp_path / "no", Stats(), SetClock()).look() == ()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "Input data was truncated"),
        ("[]", "Expected `object`"),
        ({**GOOD, "verdict": "sick"}, "Invalid enum value 'sick'"),
        ({**GOOD, "ttl_s": 0}, "ttl_s"),
        ({**GOOD, "ttl_s": 10**9}, "ttl_s"),
        ({**GOOD, "source": "DCGM!"}, "source"),
        ({**GOOD, "pod": "x"}, "unknown field `pod`"),
        ({k: v for k, v in GOOD.items() if k != "gpu"}, "missing required field `gpu`"),
        (" " * (inbox.FILE_MAX_BYTES + 1), "too large"),
    ],
)
def test_a_bad_file_is_said_once_and_ignored(
    content: Any, why: str, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.write("bad.json", content)
    place.write("good.json", GOOD)
    for _ in range(3):
        assert [advice.file for advice in place.inbox.look()] == ["good.json"]
    (record,) = caplog.records
    assert why in str(record.__dict__)
    assert place.bad == 1
    place.write("bad.json", GOOD)
    assert len(place.inbox.look()) == 2
    assert place.bad == 0


def test_only_plain_files_of_ours_are_read(place: Place, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text(json.dumps(GOOD))
    (place.folder / "link.json").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(place.folder / "pipe.json")
    (place.folder / "folder.json").mkdir()
    place.write(".hidden.json", GOOD)
    place.write("a.json.tmp", GOOD)
    assert place.inbox.look() == ()
    assert place.bad == 3


def test_a_file_of_somebody_else_is_not_believed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = place.write("a.json", GOOD)
    if os.geteuid() == 0:
        os.chown(path, 1234, 1234)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert place.inbox.look() == ()
    assert place.bad == 1


def test_too_many_files_are_said_and_the_first_ones_count(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(inbox.FILES_MAX + 5):
        place.write(f"{number:04d}.json", GOOD)
    assert len(place.inbox.look()) == inbox.FILES_MAX
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_what_makes_no_sense_here_is_said_once(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.write("a.json", GOOD)
    for _ in range(3):
        (advice,) = place.inbox.look()
        place.inbox.refuse(advice, "no such GPU")
    assert len(caplog.records) == 1
    place.inbox.look()
    assert place.bad == 1


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300))
def test_any_bytes_are_survived(data: bytes, place: Place) -> None:
    (place.folder / "a.json").write_bytes(data)
    assert place.inbox.look() == ()

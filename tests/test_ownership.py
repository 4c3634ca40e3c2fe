"""deviceplugin.ownership"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deviceplugin.ownership import Ownership

STEM = "vendor.example_gpu"
Claim = Callable[[str], Ownership]


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[Claim]:
    made: list[Ownership] = []
    (tmp_path / "dp").mkdir()

    def make(pod: str) -> Ownership:
        made.append(Ownership(tmp_path / "dp", STEM, pod))
        return made[-1]

    yield make
    for ownership in made:
        ownership.release()


def test_the_first_serves_and_the_second_learns_who(plugin: Claim) -> None:
    first, second = plugin("a"), plugin("b")
    assert first.claim() is None
    assert second.claim() == f"pod a, pid {os.getpid()}"
    assert first.claim() is None, "asking again changes nothing"


def test_the_second_takes_over_when_the_first_lets_go(plugin: Claim) -> None:
    first, second = plugin("a"), plugin("b")
    first.claim()
    second.claim()
    first.release()
    assert second.claim() is None
    assert first.claim() == f"pod b, pid {os.getpid()}"


def test_the_lock_is_for_its_owner_alone_and_stays_a_plain_file(
    plugin: Claim, tmp_path: Path
) -> None:
    plugin("a").claim()
    path = tmp_path / f"dp/{STEM}.lock"
    assert path.is_file()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_directory_made_anew_is_claimed_anew(plugin: Claim, tmp_path: Path) -> None:
    first, second = plugin("a"), plugin("b")
    first.claim()
    shutil.rmtree(tmp_path / "dp")
    assert first.claim() is None, "nothing to be seen by"
    (tmp_path / "dp").mkdir()
    assert second.claim() is None
    assert first.claim() == f"pod b, pid {os.getpid()}"


def test_a_lock_that_cannot_be_looked_at_is_held(plugin: Claim, tmp_path: Path) -> None:
    first, second = plugin("a"), plugin("b")
    first.claim()
    (tmp_path / "dp").rename(tmp_path / "away")
    (tmp_path / "dp").symlink_to("dp")  # leads nowhere: ELOOP
    assert first.claim() is None
    (tmp_path / "dp").unlink()
    (tmp_path / "away").rename(tmp_path / "dp")
    assert second.claim() == f"pod a, pid {os.getpid()}"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', "\\xff"])
def test_whatever_the_file_says_the_lock_counts(
    plugin: Claim, tmp_path: Path, content: str
) -> None:
    first, second = plugin("a"), plugin("b")
    first.claim()
    (tmp_path / f"dp/{STEM}.lock").write_text(content)
    assert second.claim() == "another plugin"


def test_a_lock_that_cannot_be_made_does_not_keep_from_serving(
    plugin: Claim, tmp_path: Path
) -> None:
    (tmp_path / f"dp/{STEM}.lock").symlink_to("/etc/passwd")
    assert plugin("a").claim() is None

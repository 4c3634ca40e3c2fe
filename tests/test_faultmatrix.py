"""docs/fault-matrix.md says what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import faultmatrix
from tests.test_nvml import CODES, FUNCTIONS

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def written() -> str:
    return faultmatrix.FILE.read_text(encoding="utf-8")


@pytest.mark.timeout(240)
def test_every_fault_of_the_driver_leads_to_what_is_written(
    fake_library: Path, written: str
) -> None:
    _, mark, tables = written.partition(faultmatrix.MARK)
    assert faultmatrix.page(fake_library).splitlines() == (mark + tables).splitlines(), (
        "look whether that is better or worse; then: python -m tests.faultmatrix"
    )


def test_every_function_and_every_code_is_tried() -> None:
    assert {*faultmatrix.ABOUT_ALL, *faultmatrix.ABOUT_ONE} == FUNCTIONS.keys()
    assert faultmatrix.CODES.keys() == CODES.keys()


def test_no_fault_ends_without_a_child_that_serves_again(written: str) -> None:
    assert "NOT replaced" not in written
    assert written.count("| hang |") == written.count("| crash |") == len(FUNCTIONS)


def test_the_tests_that_the_page_names_exist(written: str) -> None:
    source = (ROOT / "tests/test_run.py").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", written))
    assert len(named) > 5
    assert [name for name in named if f"def {name}(" not in source] == []

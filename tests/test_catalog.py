"""deviceplugin.health.catalog"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from deviceplugin.health.catalog import CATALOG, ENDS, FOLLOWERS, Cure, Effect, lookup

with (Path(__file__).parent / "data/xid-actions.csv").open() as _file:
    VENDOR = {int(row["xid"]): row["immediate_action"] for row in csv.DictReader(_file)}

BY_ACTION = {
    "IGNORE": Effect.IGNORE,
    "RESTART_APP": Effect.REPORT,
    "RESET_GPU": Effect.UNHEALTHY,
    "RESTART_BM": Effect.UNHEALTHY,
    "RESTART_VM": Effect.UNHEALTHY,
    "CONTACT_SUPPORT": Effect.UNHEALTHY,
}
BY_HAND = {
    Effect.REPORT: {45, 54, 78, 159, 162, 163, 164, 165, 168, 171, 172},
    Effect.UNHEALTHY: {48, 74, 167, 169},
    Effect.ASK: {*range(144, 151), 154, 166, 170},
}


def test_every_code_of_the_vendors_catalog_is_there_with_its_action() -> None:
    assert {code: xid.action for code, xid in CATALOG.items()} == VENDOR


@pytest.mark.parametrize("code", VENDOR)
def test_a_code_does_what_its_action_says_or_says_why_not(code: int) -> None:
    xid = lookup(code)
    by_hand = [effect for effect, codes in BY_HAND.items() if code in codes]
    assert xid.effect is (by_hand[0] if by_hand else BY_ACTION[VENDOR[code]])
    assert bool(xid.why) == bool(by_hand)
    assert xid.text


def test_the_codes_that_make_a_gpu_unhealthy() -> None:
    first = [46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 142, 143]
    then = [151, 155, 156, 158, 167, 169]
    assert [c for c, xid in CATALOG.items() if xid.effect is Effect.UNHEALTHY] == [*first, *then]


def test_only_a_failed_remap_outlives_a_reset() -> None:
    assert [code for code, xid in CATALOG.items() if xid.cure is Cure.BOOT] == [64]


def test_an_unknown_code_is_only_reported() -> None:
    assert lookup(999).effect is Effect.REPORT
    assert lookup(999).kind == "unknown"


def test_what_follows_or_ends_another_code_is_in_the_catalog() -> None:
    assert {*FOLLOWERS, *ENDS, *ENDS.values()} <= CATALOG.keys()
    kinds = {"application", "memory", "link", "firmware", "bus", "informational"}
    assert {xid.kind for xid in CATALOG.values()} == kinds

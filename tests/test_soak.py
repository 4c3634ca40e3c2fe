"""Short soaks; ``make soak`` runs longer ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.kills import kills
from tests.soak.outages import outages
from tests.soak.storm import soak


@pytest.mark.timeout(180)
def test_a_daemon_lives_through_everything_at_random(fake_library: Path) -> None:
    assert fake_library.exists()  # skips where there is no compiler
    result = soak(seconds=4, seed=7)
    assert result["threads"]


@pytest.mark.timeout(180)
def test_a_daemon_that_is_killed_at_random_is_followed_by_one_that_serves_all(
    fake_library: Path,
) -> None:
    assert fake_library.exists()
    assert kills(seconds=4, seed=7)["kills"]


@pytest.mark.timeout(180)
def test_a_kubelet_that_is_away_for_long_is_served_when_it_is_back() -> None:
    assert len(outages(seconds=2, seed=0)) == 3

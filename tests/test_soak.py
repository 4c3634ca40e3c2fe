"""A short soak; ``make soak`` runs longer ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.__main__ import soak


@pytest.mark.timeout(180)
def test_a_daemon_lives_through_everything_at_random(fake_library: Path) -> None:
    assert fake_library.exists()  # skips where there is no compiler
    result = soak(seconds=4, seed=7)
    assert result["threads"]

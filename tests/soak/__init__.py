"""Long runs against one node: everything at random, plugin kills, long outages."""

from __future__ import annotations


class Failed(Exception):
    """A promise that did not hold."""

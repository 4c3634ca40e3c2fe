"""What an operator can decide about health. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deviceplugin.config import Settings
from deviceplugin.health.catalog import Effect, lookup
from deviceplugin.health.record import OBSERVABLE, Source

BUS_XID = "xid-79"
"""The GPU is off the bus: withdrawing it is no judgement."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings of health.

    Attributes:
        observe: sources whose cases are shown, logged and counted, and withdraw nothing.
        xids: effects of single codes, instead of the catalog's.
        unknown_xid: effect of a code that is not in the catalog.
        hold_down_s: how long a GPU has to be well before it is offered again.
        max_unhealthy: GPUs that may be withdrawn within the limit's window;
            None: half of the node's.
    """

    observe: frozenset[Source] = frozenset()
    xids: Mapping[int, Effect] = field(default_factory=dict)
    unknown_xid: Effect = Effect.REPORT
    hold_down_s: float = 60.0
    max_unhealthy: int | None = None

    @staticmethod
    def of(settings: Settings) -> Policy:
        """What the settings say."""
        observed = OBSERVABLE
        if settings.health_mode == "enforce":
            observed = tuple(Source(name) for name in settings.health_observe)
        return Policy(
            observe=frozenset(observed),
            xids={int(code): Effect(what) for code, what in settings.health_xids.items()},
            unknown_xid=Effect(settings.health_unknown_xids),
            hold_down_s=settings.health_hold_down_s,
            max_unhealthy=settings.health_max_unhealthy,
        )

    def effect(self, code: int) -> Effect:
        """What an Xid does."""
        if code in self.xids:
            return self.xids[code]
        known = lookup(code)
        return known.effect if known.kind != "unknown" else self.unknown_xid

    def limit(self, gpus: int) -> int:
        """How many of a node's GPUs may be withdrawn within the limit's window."""
        return max(1, gpus // 2) if self.max_unhealthy is None else self.max_unhealthy

"""What the running daemon answers to ``deviceplugin status``, ``health``, ``forget`` and
``maintenance``, over the control socket. Called in that socket's thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from deviceplugin import __version__
from deviceplugin.casebook import Casebook, of_gpus
from deviceplugin.clock import Clock, date
from deviceplugin.monitor import Monitor

Request = Mapping[str, Any]


class Commands:
    """The answers of one agent."""

    def __init__(
        self,
        monitor: Monitor,
        casebook: Casebook,
        clock: Clock,
        status: Callable[[], dict[str, Any]],
    ) -> None:
        """
        Args:
            status: ``standing.status`` of now.
        """
        self._monitor = monitor
        self._casebook = casebook
        self._clock = clock
        self._status = status
        self._started_s = clock.monotonic()

    def handlers(self) -> Mapping[str, Callable[[Request], Any]]:
        """By the name of the command."""
        return {
            "status": lambda _: self.status(),
            "forget": lambda request: self._monitor.forget(str(request.get("device"))),
            "maintenance": self._maintain,
            "say": self._say,
            "history": self._history,
        }

    def status(self) -> dict[str, Any]:
        """Everything that is known, as JSON can say it."""
        answer = self._status()
        for device in answer["devices"]:
            device["since"] = date(self._clock, device.pop("since_s"))
            until_s = device.pop("until_s")
            device["until"] = None if until_s is None else date(self._clock, until_s)
        return {
            "version": __version__,
            "pid": os.getpid(),
            "uptime_s": round(self._clock.monotonic() - self._started_s, 3),
            **answer,
        }

    def _maintain(self, request: Request) -> dict[str, Any]:
        names = [str(name) for name in request["gpus"]]
        reason = str(request.get("reason") or "") if request["action"] == "start" else None
        return self._monitor.maintain(names, reason)

    def _say(self, request: Request) -> dict[str, Any]:
        names = [str(name) for name in request["gpus"]]
        healthy = {"healthy": True, "unhealthy": False, "clear": None}[request["verdict"]]
        for_s = request.get("for_s")
        return self._monitor.say(
            names,
            healthy,
            str(request.get("reason") or ""),
            None if for_s is None else float(for_s),
        )

    def _history(self, request: Request) -> list[dict[str, Any]]:
        gpus = frozenset(str(gpu) for gpu in request.get("gpus") or ())
        return [asdict(entry) for entry in of_gpus(self._casebook.ledger, gpus)]

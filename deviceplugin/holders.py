"""Who holds a device, by both of the kubelet's tellings.

The checkpoint is the kubelet's own book: what stands there must stay in the
device list. It is a file, though, and may be unreadable just now; pod-resources
knows the active pods, by name. "Not known" is never "nobody".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deviceplugin import podresources
from deviceplugin.checkpoint import Checkpoint


class Holders:
    """The holders of one resource's devices. Asks anew each time."""

    def __init__(self, checkpoint: Checkpoint, socket: Path, resource: str) -> None:
        """
        Args:
            socket: of pod-resources.
        """
        self._checkpoint = checkpoint
        self._socket = socket
        self._resource = resource

    def held(self, *, named: bool = False) -> Mapping[str, str] | None:
        """The devices that pods hold, and by whom in words.

        Args:
            named: ask for the names of the pods, too; takes up to a second
                where the kubelet does not answer.

        Returns:
            None when neither source can be understood.
        """
        booked = self._checkpoint.holders()
        if booked is not None and not named:
            return _words(booked)
        active = podresources.active_holders(self._socket, self._resource)
        if active is None:
            return None if booked is None else _words(booked)
        return _words(booked or {}) | {name: f"pod {pod}" for name, pod in active.items()}

    def registered(self) -> set[str] | None:
        """The healthy devices that the kubelet last knew; None as for ``held``."""
        return self._checkpoint.registered()


def _words(booked: Mapping[str, str]) -> dict[str, str]:
    return {name: f"the pod with uid {uid}" for name, uid in booked.items()}

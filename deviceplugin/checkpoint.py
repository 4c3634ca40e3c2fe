"""The kubelet's own memory of who holds what: ``kubelet_internal_checkpoint``.

It is the kubelet's file: it may be half-written at any moment, and its layout
may change. Whatever cannot be understood is "not known", never "nobody".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = "kubelet_internal_checkpoint"


class Checkpoint:
    """What the kubelet's file says about one resource. Read anew each time."""

    def __init__(self, directory: Path, resource: str) -> None:
        self._path = directory / FILE
        self._resource = resource

    def holders(self) -> dict[str, str] | None:
        """Which device is held by which pod.

        Returns:
            Device id to pod UID; None when the file cannot be understood. A file
            that is not there means that the kubelet gave nothing out.
        """
        content = self._read()
        if content is None:
            return None
        held: dict[str, str] = {}
        try:
            for entry in content.get("PodDeviceEntries") or ():
                if entry["ResourceName"] == self._resource:
                    for ids in entry["DeviceIDs"].values():
                        held.update(dict.fromkeys(map(str, ids), str(entry["PodUID"])))
        except (AttributeError, KeyError, TypeError):
            return None
        return held

    def registered(self) -> set[str] | None:
        """The healthy devices that the kubelet last knew; None as for ``holders``."""
        content = self._read()
        if content is None:
            return None
        try:
            devices = (content.get("RegisteredDevices") or {}).get(self._resource) or ()
            return set(map(str, devices))
        except (AttributeError, TypeError):
            return None

    def _read(self) -> dict[str, Any] | None:
        try:
            content = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError):
            return None
        data = content.get("Data") if isinstance(content, dict) else None
        return data if isinstance(data, dict) else None

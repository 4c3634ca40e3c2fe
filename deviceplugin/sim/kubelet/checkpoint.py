"""``kubelet_internal_checkpoint``: who holds what, across restarts of the kubelet.

The real file's layout. Its checksum is a hash over Go's own dump of the
structure, which nobody but the kubelet checks; here it is a CRC-32 of the data
as JSON. A file that is damaged counts as none.
"""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

from api.v1beta1 import api_pb2 as pb
from deviceplugin.sim.kubelet.devices import Devices, numa_nodes

NAME = "kubelet_internal_checkpoint"
NO_NUMA_NODE = "-1"


def write(directory: Path, devices: Devices) -> None:
    """Replace the file in one step; a directory that is gone is no error."""
    responses = devices.responses()
    entries = []
    for pod, containers in devices.holders().items():
        for container, resources in containers.items():
            for resource, ids in resources.items():
                response = responses.get((pod, container, resource))
                entries.append(
                    {
                        "PodUID": pod,
                        "ContainerName": container,
                        "ResourceName": resource,
                        "DeviceIDs": _by_node(ids, devices.listed(resource)),
                        "AllocResp": _encode(response),
                    }
                )
    data = {
        "PodDeviceEntries": entries,
        "RegisteredDevices": {
            resource: [device.ID for device in listed]
            for resource, listed in devices.healthy().items()
        },
    }
    new = directory / f".{NAME}.new"
    try:
        new.write_text(json.dumps({"Data": data, "Checksum": _checksum(data)}), encoding="utf-8")
        new.replace(directory / NAME)
    except FileNotFoundError:
        return


def read(directory: Path, devices: Devices) -> None:
    """Take over what the file says about who holds what."""
    try:
        content = json.loads((directory / NAME).read_text(encoding="utf-8"))
        data = content["Data"]
        if content["Checksum"] != _checksum(data):
            return
        entries = [_entry(entry) for entry in data["PodDeviceEntries"] or ()]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return
    for pod, container, resource, ids, response in entries:
        devices.hold(pod, container, resource, ids)
        if response is not None:
            devices.answered(pod, container, resource, response)


_Entry = tuple[str, str, str, set[str], pb.ContainerAllocateResponse | None]


def _entry(entry: dict[str, Any]) -> _Entry:
    encoded = entry["AllocResp"]
    response = (
        pb.ContainerAllocateResponse.FromString(base64.b64decode(encoded)) if encoded else None
    )
    ids = {device for listed in entry["DeviceIDs"].values() for device in listed}
    return entry["PodUID"], entry["ContainerName"], entry["ResourceName"], ids, response


def _by_node(ids: set[str], listed: Any) -> dict[str, list[str]]:
    by_node: dict[str, list[str]] = {}
    for device in sorted(ids):
        known = listed.get(device)
        nodes = numa_nodes(known) if known is not None else ()
        for node in map(str, nodes or (NO_NUMA_NODE,)):
            by_node.setdefault(node, []).append(device)
    return by_node


def _encode(response: pb.ContainerAllocateResponse | None) -> str:
    if response is None:
        return ""
    return base64.b64encode(response.SerializeToString(deterministic=True)).decode("ascii")


def _checksum(data: object) -> int:
    return zlib.crc32(json.dumps(data, sort_keys=True).encode())

"""Between the model and the kubelet's messages. No decisions are made here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from api.v1beta1 import api_pb2 as pb
from deviceplugin.model import AllocationPlan, Device, Health

API_VERSION = "v1beta1"

MESSAGE_MAX_BYTES = 4 * 1024 * 1024
"""The kubelet refuses a larger message and then counts no devices at all."""


def options(*, pre_start: bool = False) -> pb.DevicePluginOptions:
    """What this plugin offers beyond the obligatory.

    Args:
        pre_start: it wants to be asked before each start of a container.
    """
    return pb.DevicePluginOptions(
        pre_start_required=pre_start, get_preferred_allocation_available=True
    )


def device_list(devices: Iterable[Device]) -> pb.ListAndWatchResponse:
    """The list for ListAndWatch.

    A device without NUMA nodes gets no topology field at all: a present but
    empty one would hide it from the kubelet's allocatable devices.
    """
    message = pb.ListAndWatchResponse()
    for device in devices:
        entry = message.devices.add(ID=device.id, health=device.health.value)
        for node in device.numa_nodes:
            entry.topology.nodes.add(ID=node)
    return message


def longest_list_bytes(devices: Iterable[Device]) -> int:
    """The size of the list when every device in it is unhealthy, the longer word."""
    return device_list(replace(each, health=Health.UNHEALTHY) for each in devices).ByteSize()


def container_response(plan: AllocationPlan) -> pb.ContainerAllocateResponse:
    """One container's share of the answer to Allocate."""
    return pb.ContainerAllocateResponse(
        envs=plan.envs,
        devices=[
            pb.DeviceSpec(container_path=path, host_path=path, permissions="rw")
            for path in plan.nodes
        ],
    )


def register_request(endpoint: str, resource: str) -> pb.RegisterRequest:
    """The call to the kubelet. ``endpoint`` is a file name, not a path."""
    return pb.RegisterRequest(
        version=API_VERSION, endpoint=endpoint, resource_name=resource, options=options()
    )

"""The pod-resources service, version v1: which pod holds what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import grpc

from api.podresources.v1 import api_pb2 as pr
from api.podresources.v1.api_pb2_grpc import PodResourcesListerServicer
from api.v1beta1 import api_pb2 as pb
from deviceplugin.sim.kubelet.devices import Devices, numa_nodes
from deviceplugin.sim.kubelet.values import Pod


class PodResources(PodResourcesListerServicer):
    """Answers from the books and the admitted pods."""

    def __init__(self, devices: Devices, pods: Callable[[], Iterable[Pod]]) -> None:
        self._devices = devices
        self._pods = pods

    def List(
        self, request: pr.ListPodResourcesRequest, context: grpc.ServicerContext
    ) -> pr.ListPodResourcesResponse:
        return pr.ListPodResourcesResponse(pod_resources=[self._pod(pod) for pod in self._pods()])

    def Get(
        self, request: pr.GetPodResourcesRequest, context: grpc.ServicerContext
    ) -> pr.GetPodResourcesResponse:
        wanted = request.pod_namespace, request.pod_name
        found = [pod for pod in self._pods() if (pod.namespace, pod.name) == wanted]
        if not found:
            context.abort(grpc.StatusCode.UNKNOWN, f"pod {'/'.join(wanted)} not found")
        return pr.GetPodResourcesResponse(pod_resources=self._pod(found[0]))

    def GetAllocatableResources(
        self, request: pr.AllocatableResourcesRequest, context: grpc.ServicerContext
    ) -> pr.AllocatableResourcesResponse:
        response = pr.AllocatableResourcesResponse()
        for resource, devices in self._devices.healthy().items():
            for device in devices:
                response.devices.extend(_entries(resource, device.ID, device))
        return response

    def _pod(self, pod: Pod) -> pr.PodResources:
        held = self._devices.holders().get(pod.uid, {})
        message = pr.PodResources(name=pod.name, namespace=pod.namespace)
        for container in pod.containers:
            entry = message.containers.add(name=container.name)
            for resource, ids in held.get(container.name, {}).items():
                listed: Mapping[str, pb.Device] = self._devices.listed(resource)
                for device in sorted(ids):
                    entry.devices.extend(_entries(resource, device, listed.get(device)))
        return message


def _entries(resource: str, name: str, device: pb.Device | None) -> list[pr.ContainerDevices]:
    """One entry, or one for each NUMA node of a device that is on several."""
    nodes = numa_nodes(device) if device is not None else ()
    if not nodes:
        return [pr.ContainerDevices(resource_name=resource, device_ids=[name])]
    return [
        pr.ContainerDevices(
            resource_name=resource,
            device_ids=[name],
            topology=pr.TopologyInfo(nodes=[pr.NUMANode(ID=node)]),
        )
        for node in nodes
    ]

"""Admission of a pod: which devices, and the calls to the plugin. One pod at a time.

The order of things, the offers made to GetPreferredAllocation and the texts
of refusals are the kubelet's. Which NUMA nodes to keep to is asked of an
``Aligner``; the one here knows no topology, as under the policy "none".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import grpc

from api.v1beta1 import api_pb2 as pb
from deviceplugin.sim.kubelet.devices import Devices, numa_nodes
from deviceplugin.sim.kubelet.plugin import PRE_START_TIMEOUT_S, Plugin, describe
from deviceplugin.sim.kubelet.values import Admission, Container, Grant, Pod

UNEXPECTED = "UnexpectedAdmissionError"

Aligner = Callable[[Pod, Container, str], frozenset[int] | None]
"""The NUMA nodes to which a container's devices of a resource should keep;
None: no preference."""


def no_alignment(_pod: Pod, _container: Container, _resource: str) -> frozenset[int] | None:
    """The policy "none"."""
    return None


class _Refused(Exception):
    pass


class Admitter:
    """Admits pods against the books and the plugins registered now."""

    def __init__(
        self,
        devices: Devices,
        plugin_of: Callable[[str], Plugin | None],
        align: Aligner = no_alignment,
    ) -> None:
        self._devices = devices
        self._plugin_of = plugin_of
        self._align = align
        self._leaked: set[str] = set()

    def admit(self, pod: Pod) -> Admission:
        """Allocate for every container, ordinary init containers first."""
        grants: list[Grant] = []
        reusable: dict[str, set[str]] = {}
        try:
            for container in pod.init_containers:
                for grant in self._container(pod, container, reusable):
                    grants.append(grant)
                    reusable.setdefault(grant.resource, set()).update(grant.devices)
            for container in pod.containers:
                for grant in self._container(pod, container, reusable):
                    grants.append(grant)
                    reusable.get(grant.resource, set()).difference_update(grant.devices)
        except _Refused as refusal:
            if pod.uid not in self._leaked:
                self._devices.release(pod.uid)
            message = f"Allocate failed due to {refusal}, which is unexpected"
            return Admission(False, reason=UNEXPECTED, message=message)
        return Admission(True, tuple(grants))

    def forget(self, pod_uid: str) -> None:
        """A pod went away: its devices are free, and so are leaked ones."""
        for uid in {pod_uid, *self._leaked}:
            self._devices.release(uid)
        self._leaked.clear()

    def restart(self, pod: Pod, container: Container) -> tuple[Grant, ...]:
        """Restart a container in place: nothing is asked but PreStartContainer."""
        grants = []
        for resource in container.limits:
            held = self._devices.holders()[pod.uid][container.name][resource]
            self._pre_start(self._plugin(resource), held)
            response = self._devices.response(pod.uid, container.name, resource)
            if response is not None:
                grants.append(self._grant(container, resource, held, response))
        return tuple(grants)

    # --- one container --------------------------------------------------------------

    def _container(
        self, pod: Pod, container: Container, reusable: dict[str, set[str]]
    ) -> Iterable[Grant]:
        for resource, count in container.limits.items():
            if count == 0:
                continue
            plugin = self._plugin(resource)
            chosen = self._choose(pod, container, resource, count, reusable.get(resource, set()))
            self._devices.hold(pod.uid, container.name, resource, chosen)
            response = self._allocate(plugin, pod, chosen)
            self._devices.answered(pod.uid, container.name, resource, response)
            self._pre_start(plugin, chosen)
            yield self._grant(container, resource, chosen, response)

    def _plugin(self, resource: str) -> Plugin:
        plugin = self._plugin_of(resource)
        if plugin is None:
            raise _Refused(f"can't allocate unregistered device {resource}")
        return plugin

    def _grant(
        self,
        container: Container,
        resource: str,
        chosen: set[str],
        response: pb.ContainerAllocateResponse,
    ) -> Grant:
        listed = self._devices.listed(resource)
        nodes = {
            node for device in chosen if device in listed for node in numa_nodes(listed[device])
        }
        devices = tuple(sorted(chosen))
        return Grant(container.name, resource, devices, tuple(sorted(nodes)), response)

    def _choose(
        self, pod: Pod, container: Container, resource: str, count: int, reusable: set[str]
    ) -> set[str]:
        taken = set(sorted(reusable)[:count])
        need = count - len(taken)
        if need == 0:
            return taken
        available = self._devices.free(resource)
        if len(available) < need:
            raise _Refused(
                f"requested number of devices unavailable for {resource}."
                f" Requested: {need}, Available: {len(available)}"
            )
        aligned = self._aligned(pod, container, resource, available)
        if need < len(aligned):
            preferred = self._prefer(resource, aligned | taken, taken, count)
            return _fill(taken, count, preferred & aligned, aligned)
        taken = _fill(taken, count, aligned)
        if len(taken) == count:
            return taken
        preferred = self._prefer(resource, available | taken, taken, count)
        return _fill(taken, count, preferred & available, available)

    def _aligned(
        self, pod: Pod, container: Container, resource: str, available: set[str]
    ) -> set[str]:
        affinity = self._align(pod, container, resource)
        if affinity is None:
            return set()
        listed = self._devices.listed(resource)
        return {device for device in available if affinity & set(numa_nodes(listed[device]))}

    # --- calls ------------------------------------------------------------------------

    def _prefer(self, resource: str, offered: set[str], taken: set[str], size: int) -> set[str]:
        plugin = self._plugin(resource)
        if not plugin.options.get_preferred_allocation_available:
            return set()
        request = pb.PreferredAllocationRequest()
        request.container_requests.add(
            available_deviceIDs=sorted(offered),
            must_include_deviceIDs=sorted(taken),
            allocation_size=size,
        )
        try:
            response = plugin.stub.GetPreferredAllocation(request)
        except grpc.RpcError as error:
            raise _Refused(describe(error)) from error
        if not response.container_responses:
            return set()
        return set(response.container_responses[0].deviceIDs)

    def _allocate(self, plugin: Plugin, pod: Pod, chosen: set[str]) -> pb.ContainerAllocateResponse:
        request = pb.AllocateRequest()
        request.container_requests.add(devices_ids=sorted(chosen))
        try:
            response = plugin.stub.Allocate(request)
        except grpc.RpcError as error:
            raise _Refused(describe(error)) from error
        if not response.container_responses:
            self._leaked.add(pod.uid)
            raise _Refused("no containers return in allocation response")
        return response.container_responses[0]

    @staticmethod
    def _pre_start(plugin: Plugin, devices: set[str]) -> None:
        if not plugin.options.pre_start_required:
            return
        request = pb.PreStartContainerRequest(devices_ids=sorted(devices))
        try:
            plugin.stub.PreStartContainer(request, timeout=PRE_START_TIMEOUT_S)
        except grpc.RpcError as error:
            raise _Refused(
                f"device plugin PreStartContainer rpc failed with err: {describe(error)}"
            ) from error


def _fill(taken: set[str], count: int, *pools: set[str]) -> set[str]:
    """Add from the pools in turn, each in sorted order, until there are ``count``."""
    filled = set(taken)
    for pool in pools:
        filled |= set(sorted(pool - filled)[: count - len(filled)])
    return filled

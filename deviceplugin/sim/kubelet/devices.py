"""Which devices there are, how they are, and who holds them: the device manager's books.

Owns the state and its lock; never calls out. Kept as the kubelet keeps it,
oddities included: a device listed twice with two healths is counted twice; a
resource whose stream ended keeps its capacity at zero allocatable, for five
minutes; an allocated device that vanishes from the list makes the real
kubelet dereference nil, which is recorded here as a crash.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from api.v1beta1 import api_pb2 as pb

ENDPOINT_GRACE_S = 300.0
HEALTHY = "Healthy"

Held = dict[str, dict[str, dict[str, set[str]]]]
"""pod uid -> container -> resource -> device ids"""


@dataclass
class Resource:
    """One resource's list as last received.

    Attributes:
        devices: by id; of several entries the last.
        stopped_at_s: when its stream ended; None while it is open.
    """

    devices: dict[str, pb.Device] = field(default_factory=dict)
    healthy: set[str] = field(default_factory=set)
    unhealthy: set[str] = field(default_factory=set)
    stopped_at_s: float | None = None


class Devices:
    """The books. Methods take ``lock`` themselves."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self._resources: dict[str, Resource] = {}
        self._held: Held = {}
        self._responses: dict[tuple[str, str, str], pb.ContainerAllocateResponse] = {}
        self.crashes: list[str] = []

    # --- lists --------------------------------------------------------------------

    def add(self, resource: str) -> None:
        """A plugin registered: the resource is known, without devices yet."""
        with self.lock:
            known = self._resources.setdefault(resource, Resource())
            known.stopped_at_s = None

    def update(self, resource: str, devices: list[pb.Device]) -> None:
        """A list came."""
        with self.lock:
            new = Resource({device.ID: device for device in devices})
            for device in devices:
                (new.healthy if device.health == HEALTHY else new.unhealthy).add(device.ID)
            self._resources[resource] = new
            lost = self._in_use(resource) - new.devices.keys()
            if lost:
                self.crashes.append(f"{resource}: allocated but no longer listed: {sorted(lost)}")
            self.lock.notify_all()

    def stop(self, resource: str, now_s: float) -> None:
        """The resource's plugin is disconnected: nothing of it can be allocated."""
        with self.lock:
            known = self._resources.get(resource)
            if known is None:
                return
            known.unhealthy |= known.healthy
            known.healthy = set()
            known.stopped_at_s = now_s
            self.lock.notify_all()

    def clear(self) -> None:
        """The kubelet restarts: who holds what comes from the checkpoint."""
        with self.lock:
            self._resources.clear()
            self._held.clear()
            self._responses.clear()
            self.lock.notify_all()

    def capacity(self, resource: str, now_s: float) -> int:
        with self.lock:
            known = self._resources.get(resource, Resource())
            stopped = known.stopped_at_s
            if stopped is not None and now_s - stopped >= ENDPOINT_GRACE_S:
                return 0
            return len(known.healthy) + len(known.unhealthy)

    def allocatable(self, resource: str) -> int:
        with self.lock:
            return len(self._resources.get(resource, Resource()).healthy)

    def listed(self, resource: str) -> Mapping[str, pb.Device]:
        with self.lock:
            return dict(self._resources.get(resource, Resource()).devices)

    def healthy(self) -> dict[str, list[pb.Device]]:
        """Per resource, the devices that GetAllocatableResources shows. One with
        a present but empty topology is on no NUMA node at all, and not shown."""
        with self.lock:
            return {
                name: [
                    known.devices[device]
                    for device in sorted(known.healthy)
                    if not known.devices[device].HasField("topology")
                    or known.devices[device].topology.nodes
                ]
                for name, known in self._resources.items()
            }

    # --- who holds what -------------------------------------------------------------

    def free(self, resource: str) -> set[str]:
        """Healthy devices that nobody holds."""
        with self.lock:
            known = self._resources.get(resource, Resource())
            return known.healthy - self._in_use(resource)

    def hold(self, pod: str, container: str, resource: str, devices: set[str]) -> None:
        with self.lock:
            self._held.setdefault(pod, {}).setdefault(container, {})[resource] = set(devices)

    def answered(
        self, pod: str, container: str, resource: str, response: pb.ContainerAllocateResponse
    ) -> None:
        """Keep Allocate's answer: a container that restarts in place gets it again."""
        with self.lock:
            self._responses[pod, container, resource] = response

    def response(
        self, pod: str, container: str, resource: str
    ) -> pb.ContainerAllocateResponse | None:
        with self.lock:
            return self._responses.get((pod, container, resource))

    def release(self, pod: str) -> bool:
        """Free all that a pod holds. Whether it held anything."""
        with self.lock:
            for key in [key for key in self._responses if key[0] == pod]:
                del self._responses[key]
            found = self._held.pop(pod, None) is not None
            self.lock.notify_all()
            return found

    def holders(self) -> Held:
        """A copy."""
        with self.lock:
            return {
                pod: {
                    container: {resource: set(ids) for resource, ids in resources.items()}
                    for container, resources in containers.items()
                }
                for pod, containers in self._held.items()
            }

    def responses(self) -> Mapping[tuple[str, str, str], pb.ContainerAllocateResponse]:
        with self.lock:
            return dict(self._responses)

    def _in_use(self, resource: str) -> set[str]:
        return {
            device
            for containers in self._held.values()
            for resources in containers.values()
            for device in resources.get(resource, ())
        }


def numa_nodes(device: pb.Device) -> tuple[int, ...]:
    """The NUMA nodes in a device's topology; () without one."""
    return tuple(node.ID for node in device.topology.nodes)

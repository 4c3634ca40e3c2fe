"""What goes into the embedded kubelet and comes out of it: plain values."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from api.v1beta1 import api_pb2 as pb

_numbers = itertools.count(1)


def _next_uid() -> str:
    return f"00000000-0000-4000-9000-{next(_numbers):012d}"


@dataclass(frozen=True, slots=True)
class Container:
    """A container and its limits: resource name to count."""

    name: str
    limits: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that is to be admitted. ``init_containers`` are ordinary ones: they
    run before the others, and what they held is used again."""

    name: str
    containers: tuple[Container, ...]
    init_containers: tuple[Container, ...] = ()
    namespace: str = "default"
    uid: str = field(default_factory=_next_uid)


@dataclass(frozen=True, slots=True)
class Grant:
    """What one container got of one resource.

    Attributes:
        devices: sorted ids.
        numa_nodes: of these devices, sorted; devices without a node count for none.
        response: the plugin's answer to Allocate.
    """

    container: str
    resource: str
    devices: tuple[str, ...]
    numa_nodes: tuple[int, ...]
    response: pb.ContainerAllocateResponse


@dataclass(frozen=True, slots=True)
class Admission:
    """The kubelet's word on a pod. ``reason`` and ``message`` are those of the
    refused pod's status."""

    admitted: bool
    grants: tuple[Grant, ...] = ()
    reason: str = ""
    message: str = ""


class Fault(enum.Enum):
    """How Register misbehaves."""

    NONE = "none"
    REFUSE = "answers with an error"
    HANG = "never answers"
    DIE = "the kubelet is killed while it answers"
    NO_DIAL_BACK = "agrees without dialling back"
    NO_STREAM = "registers and never opens ListAndWatch"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, for tests and figures.

    Attributes:
        kind: "started", "stopped", "register", "registered", "refused", "list",
            "stream ended" or "crash".
        at_s: monotonic time.
    """

    kind: str
    at_s: float
    resource: str = ""
    detail: str = ""

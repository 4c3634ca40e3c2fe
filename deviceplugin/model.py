"""What the plugin knows, as frozen values. No behaviour beyond looking things up.

Facts flow one way: the driver's ``Scan`` and the host's ``HostFacts`` merge
into an ``Inventory``; events and readings turn into a ``Verdict`` for each
GPU; both together are a ``Snapshot``, and whatever the plugin sends, answers
or exports is read from one.

``None`` always means "not known" or "the card cannot tell", never zero.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

GpuId = NewType("GpuId", str)
"""A physical GPU: its UUID as the driver spells it, "GPU-…"."""

DeviceId = NewType("DeviceId", str)
"""What the kubelet hands around. For a whole GPU this is the GpuId."""


class PcieLevel(enum.Enum):
    """How far apart two GPUs sit on PCIe; the value is the link score.

    The names follow ``nvidia-smi topo -m``; the scores are those of the
    reference allocator, so that results can be compared.
    """

    UNKNOWN = 0
    SYS = 10
    """Across the interconnect between NUMA nodes."""
    NODE = 20
    """Across host bridges of one NUMA node."""
    PHB = 30
    """Across one host bridge."""
    PXB = 40
    """Across several PCIe switches."""
    PIX = 50
    """Across one PCIe switch."""
    PSB = 60
    """On one board."""


@dataclass(frozen=True, slots=True)
class Link:
    """What connects two GPUs of one node. Symmetric: one Link per pair.

    Attributes:
        nvlinks: NVLink connections between the two, directly or through
            NVSwitch; None when a driver call for them failed.
    """

    a: GpuId
    b: GpuId
    pcie: PcieLevel
    nvlinks: int | None


@dataclass(frozen=True, slots=True)
class Fault:
    """Why something is not well: a stable code, and a sentence for a person."""

    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class DriverGpu:
    """One GPU as the driver describes it.

    Attributes:
        index: position in the driver's enumeration; may change at a reboot.
        minor: number of the device node ``/dev/nvidia<minor>``.
        pci_bus_id: as sysfs writes it, "0000:1b:00.0".
        mig_enabled: current MIG mode; None where the card has no MIG.
        events: whether the driver reports this GPU's Xid errors to us.
        fault: set when the driver names the GPU but says that it is lost
            or otherwise not to be used.
    """

    id: GpuId
    index: int
    minor: int | None = None
    model: str | None = None
    pci_bus_id: str | None = None
    memory_bytes: int | None = None
    mig_enabled: bool | None = None
    events: bool = False
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class UnreadableGpu:
    """A GPU that the driver counts but cannot identify: it has no id to publish."""

    index: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class DriverInfo:
    """Versions as the driver reports them, "550.54.15"; CUDA as "12.4"."""

    driver_version: str | None = None
    library_version: str | None = None
    cuda_version: str | None = None


@dataclass(frozen=True, slots=True)
class Scan:
    """Everything that the driver tells at one look."""

    driver: DriverInfo
    gpus: tuple[DriverGpu, ...]
    unreadable: tuple[UnreadableGpu, ...] = ()
    links: tuple[Link, ...] = ()


@dataclass(frozen=True, slots=True)
class XidEvent:
    """The driver reported an Xid error.

    Attributes:
        gpu: None when the driver did not say which GPU, or one we don't know.
        gpu_instance, compute_instance: set when only a MIG slice is meant.
    """

    gpu: GpuId | None
    xid: int
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True, slots=True)
class Alarm:
    """The driver reported something other than an Xid.

    Attributes:
        gpu: as for ``XidEvent``.
        fault: what it says; None: that the GPU has to be asked how it is.
    """

    gpu: GpuId | None
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class LoggedXid:
    """An Xid error that stands in the kernel's log.

    Attributes:
        at_s: when, in seconds since the machine started; at the earliest.
    """

    pci_bus_id: str
    xid: int
    at_s: float


class RecoveryAction(enum.Enum):
    """What the driver says has to be done about a GPU; the values are part of reasons."""

    NONE = "none"
    GPU_RESET = "gpu-reset"
    NODE_REBOOT = "node-reboot"
    DRAIN_P2P = "drain-p2p"
    DRAIN_AND_RESET = "drain-and-reset"
    RECOVER_IMEX_DOMAIN = "recover-imex-domain"
    BUS_RESET = "bus-reset"
    SYSTEM_REBOOT = "system-reboot"


class Fabric(enum.Enum):
    """How far a GPU's joining of the NVSwitch fabric is."""

    NOT_STARTED = "not started"
    IN_PROGRESS = "in progress"
    COMPLETED = "completed"
    FAILED = "failed"
    """Completed with an error."""


@dataclass(frozen=True, slots=True)
class RowRemap:
    """What became of memory rows that went bad, as the driver counts it.

    Attributes:
        pending: rows are remapped at the next reset; work may go on until then.
        failed: a row could not be remapped: no spare ones are left.
    """

    pending: bool
    failed: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """One GPU's state as polled. None: the card or the library does not tell.

    Attributes:
        fault: None when the GPU answers.
        was_reset: there is a sign that the GPU was reset since the last reading.
        fabric: None also for a card that belongs to no fabric.
        uncorrected_errors: uncorrected memory errors since the last reset.
        throttled_by: why the clocks are lower than they could be; () when they are not.
    """

    gpu: GpuId
    fault: Fault | None = None
    was_reset: bool = False
    action: RecoveryAction | None = None
    remap: RowRemap | None = None
    fabric: Fabric | None = None
    uncorrected_errors: int | None = None
    throttled_by: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class CallError:
    """A driver call that failed. ``code`` is the driver's name for it, "gpu_is_lost"."""

    call: str
    code: str


class NumaSource(enum.Enum):
    """Where a NUMA node comes from, or why there is none."""

    DEVICE = "device"
    """The device's own ``numa_node`` file."""
    PARENT = "parent"
    """The nearest PCI parent that names one."""
    PROFILE = "profile"
    """A simulation profile."""
    NOT_TOLD = "not told"
    """Neither the device nor a parent names a node."""
    NO_CPUS = "node without CPUs"
    """A node is named, but the kubelet would not know it: it has no CPUs."""
    UNREADABLE = "unreadable"
    """The files are missing or hold garbage."""
    NO_BUS_ID = "no PCI bus id"
    """The driver did not tell where to look."""


@dataclass(frozen=True, slots=True)
class NumaPlace:
    """A GPU's NUMA node and where that is from. ``node`` None: publish no hint."""

    node: int | None
    source: NumaSource


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What the host's files say about the GPUs of one scan.

    Attributes:
        numa: per GPU; a GPU may be missing.
        minors: per GPU, for those whose minor number the driver did not tell.
        nodes: per GPU, its device nodes that exist, as host paths.
        control_nodes: device nodes that every GPU container needs, as host
            paths; only those that exist.
        bindings: per GPU, a number that changes when a driver is bound to it anew;
            a GPU may be missing.
    """

    numa: Mapping[GpuId, NumaPlace] = field(default_factory=dict)
    minors: Mapping[GpuId, int] = field(default_factory=dict)
    nodes: Mapping[GpuId, tuple[str, ...]] = field(default_factory=dict)
    control_nodes: tuple[str, ...] = ()
    bindings: Mapping[GpuId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Maintenance:
    """An operator has withdrawn a GPU; it is left alone until he gives it back.

    Attributes:
        reason: his words; may be empty.
        since_s: seconds since the machine started.
    """

    reason: str
    since_s: float


@dataclass(frozen=True, slots=True)
class Address:
    """Where the driver finds a GPU without touching another one.

    Attributes:
        index: as the driver counted at the last look at all GPUs.
    """

    index: int
    pci_bus_id: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU with all its facts merged.

    Attributes:
        nodes: its device nodes, as paths on the host.
        gone_since_s: for one that the driver does not list any more, or not yet
            in this process: since when, in seconds since the machine started.
    """

    id: GpuId
    index: int
    minor: int | None
    model: str | None
    pci_bus_id: str | None
    memory_bytes: int | None
    mig_enabled: bool | None
    events: bool
    fault: Fault | None
    numa: NumaPlace
    nodes: tuple[str, ...]
    gone_since_s: float | None = None
    maintenance: Maintenance | None = None

    @property
    def present(self) -> bool:
        """The driver lists it."""
        return self.gone_since_s is None


@dataclass(frozen=True, slots=True)
class Inventory:
    """The node's GPUs in PCI order, and what connects them."""

    driver: DriverInfo
    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...] = ()
    unreadable: tuple[UnreadableGpu, ...] = ()
    control_nodes: tuple[str, ...] = ()


class Health(enum.Enum):
    """The two words that the kubelet knows; the values go over the wire."""

    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"


class Held(enum.Enum):
    """Why a GPU is offered although something is wrong with it."""

    OBSERVED = "observed only"
    LIMIT = "held by the blast limit"
    EXCUSED = "an operator wants it offered"


class Stage(enum.Enum):
    """Where a GPU stands on its way out and back; the values are for people."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    RECOVERING = "recovering"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One GPU's health, with the reason and since when.

    Attributes:
        health: what the kubelet is told.
        reason: a stable code ("xid-79", "lost", "absent", …); "" when nothing is wrong.
        since_s: of the last change, in seconds since the machine started; negative
            for what was so in an earlier boot.
        stage: recovering is still unhealthy to the kubelet.
        ends_with: what ends it, in words; "" when nothing is wrong.
        until_s: when it ends by itself, if it does and nothing comes between.
        held: set when it is offered in spite of the reason.
    """

    health: Health
    reason: str
    detail: str
    since_s: float
    stage: Stage = Stage.HEALTHY
    ends_with: str = ""
    until_s: float | None = None
    held: Held | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """One entry of the list that the kubelet gets.

    Attributes:
        numa_nodes: empty means that no topology is sent at all.
    """

    id: DeviceId
    gpu: GpuId
    health: Health
    numa_nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is known at one moment; never changed, only replaced.

    Attributes:
        generation: grows by one with each snapshot; 0 is the empty one.
        inventory: None until the driver was read for the first time.
        verdicts: for every GPU of the inventory.
        devices: what is published, in PCI order.
        trouble: why the driver cannot be read now; None when it can.
        conditions: the last reading of each GPU that was read.
    """

    generation: int = 0
    inventory: Inventory | None = None
    verdicts: Mapping[GpuId, Verdict] = field(default_factory=dict)
    devices: tuple[Device, ...] = ()
    trouble: Fault | None = None
    conditions: Mapping[GpuId, Reading] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AllocationPlan:
    """What one container is to get, whatever the wire calls it.

    Attributes:
        devices: distinct, in the order of the inventory.
        nodes: device nodes as host paths, each once.
    """

    devices: tuple[Device, ...]
    envs: Mapping[str, str]
    nodes: tuple[str, ...]

"""Short ways to say what a test starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deviceplugin import inventory
from deviceplugin.model import (
    DriverGpu,
    DriverInfo,
    GpuId,
    Health,
    HostFacts,
    NumaPlace,
    NumaSource,
    Scan,
    Snapshot,
    Stage,
    Verdict,
)


class SetClock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.monotonic_s = 50.0
        self.time_s = 1_000_000.0
        self.boottime_s = 100.0
        self.boot = "boot-1"

    def monotonic(self) -> float:
        return self.monotonic_s

    def time(self) -> float:
        return self.time_s

    def boottime(self) -> float:
        return self.boottime_s

    def boot_id(self) -> str:
        return self.boot


def gpu_id(number: int) -> GpuId:
    """GPU-00000000-…-00000000000N."""
    return GpuId(f"GPU-00000000-0000-4000-8000-{number:012d}")


def driver_gpu(number: int) -> DriverGpu:
    """A healthy GPU on a PCI bus of its own, in the order of the numbers."""
    return DriverGpu(
        id=gpu_id(number),
        index=number,
        minor=number,
        model="NVIDIA L4",
        pci_bus_id=f"0000:{0x10 + number:02x}:00.0",
        memory_bytes=24 << 30,
        events=True,
    )


def healthy(since_s: float) -> Verdict:
    """Nothing is wrong."""
    return Verdict(Health.HEALTHY, "", "", since_s)


def snapshot(
    numa: Sequence[int | None], sick: Mapping[int, str] | None = None, generation: int = 1
) -> Snapshot:
    """A node with one GPU for each NUMA node of ``numa``; ``sick`` gives reasons."""
    gpus = tuple(driver_gpu(number) for number in range(len(numa)))
    facts = HostFacts(
        numa={
            gpu.id: NumaPlace(node, NumaSource.DEVICE if node is not None else NumaSource.NOT_TOLD)
            for gpu, node in zip(gpus, numa, strict=True)
        },
        nodes={gpu.id: (f"/dev/nvidia{gpu.minor}",) for gpu in gpus},
        control_nodes=("/dev/nvidiactl", "/dev/nvidia-uvm"),
    )
    merged = inventory.merge(None, Scan(DriverInfo("550.54.15"), gpus), facts, 0.0)
    verdicts: dict[GpuId, Verdict] = {gpu.id: healthy(100.0) for gpu in gpus}
    for number, reason in (sick or {}).items():
        verdicts[gpu_id(number)] = Verdict(
            Health.UNHEALTHY,
            reason,
            f"because of {reason}",
            100.0,
            Stage.UNHEALTHY,
            "a reset",
        )
    return Snapshot(generation, merged, verdicts, inventory.devices(merged, verdicts))

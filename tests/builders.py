"""Short ways to say what a test starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deviceplugin import health, inventory
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
    Verdict,
)


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
    merged = inventory.merge(None, Scan(DriverInfo("550.54.15"), gpus), facts)
    verdicts: dict[GpuId, Verdict] = {gpu.id: health.healthy(100.0) for gpu in gpus}
    for number, reason in (sick or {}).items():
        verdicts[gpu_id(number)] = Verdict(Health.UNHEALTHY, reason, f"because of {reason}", 100.0)
    return Snapshot(generation, merged, verdicts, inventory.devices(merged, verdicts))

"""The host's files: NUMA nodes, minor numbers and device nodes of the GPUs.

Reads only, and never raises: a file that is missing or holds garbage costs
the one fact it would have told. The roots are handed in, since a container
sees the host's files under other paths; paths in the answers are the host's
own, since the kubelet and the container runtime work there.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path

from deviceplugin.model import DriverGpu, GpuId, HostFacts, NumaPlace, NumaSource, Scan

CONTROL_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
"""Device nodes that are not of one GPU; handed in where present."""

_READ_MAX_BYTES = 64 * 1024
_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_MINOR = re.compile(r"^Device Minor:[ \t]*([0-9]{1,6})[ \t]*$", re.MULTILINE)


class HostFiles:
    """``Host`` on the real files, or on a tree of the same shape."""

    def __init__(
        self,
        sysfs_root: Path = Path("/sys"),
        dev_root: Path = Path("/dev"),
        proc_root: Path = Path("/proc"),
    ) -> None:
        self._sysfs = sysfs_root
        self._dev = dev_root
        self._proc = proc_root

    def facts(self, scan: Scan) -> HostFacts:
        numa: dict[GpuId, NumaPlace] = {}
        minors: dict[GpuId, int] = {}
        nodes: dict[GpuId, tuple[str, ...]] = {}
        for gpu in scan.gpus:
            numa[gpu.id] = self._numa(gpu.pci_bus_id)
            minor = gpu.minor
            if minor is None:
                minor = self._minor(gpu)
                if minor is not None:
                    minors[gpu.id] = minor
            if minor is not None and self._is_device(f"nvidia{minor}"):
                nodes[gpu.id] = (f"/dev/nvidia{minor}",)
        control = tuple(f"/dev/{name}" for name in CONTROL_NODES if self._is_device(name))
        bindings = {gpu.id: self._binding(gpu.pci_bus_id) for gpu in scan.gpus}
        known = {gpu: number for gpu, number in bindings.items() if number is not None}
        return HostFacts(numa, minors, nodes, control, known)

    def _binding(self, bus_id: str | None) -> int | None:
        """The inode of the link from the device to its driver: the kernel makes the link
        anew, under a new number, each time that a driver is bound."""
        if bus_id is None or not _BUS_ID.fullmatch(bus_id):
            return None
        try:
            return (self._sysfs / "bus/pci/devices" / bus_id / "driver").lstat().st_ino
        except OSError:
            return None

    # --- NUMA ---------------------------------------------------------------------

    def _numa(self, bus_id: str | None) -> NumaPlace:
        """The device's own node, else that of the nearest PCI parent that names one."""
        if bus_id is None or not _BUS_ID.fullmatch(bus_id):
            return NumaPlace(None, NumaSource.NO_BUS_ID)
        try:
            devices = (self._sysfs / "devices").resolve()
            device = (self._sysfs / "bus/pci/devices" / bus_id).resolve(strict=True)
        except (OSError, RuntimeError):  # RuntimeError: a loop of links
            return NumaPlace(None, NumaSource.UNREADABLE)
        missed: NumaSource | None = None
        directory, source = device, NumaSource.DEVICE
        while directory != devices and devices in directory.parents:
            node = _numa_node(directory)
            if node is None:
                missed = missed or NumaSource.UNREADABLE
            elif node < 0:
                missed = missed or NumaSource.NOT_TOLD
            elif self._has_cpus(node):
                return NumaPlace(node, source)
            else:
                missed = NumaSource.NO_CPUS
            directory, source = directory.parent, NumaSource.PARENT
        return NumaPlace(None, missed or NumaSource.UNREADABLE)

    def _has_cpus(self, node: int) -> bool:
        """The kubelet knows only nodes with CPUs, and refuses pods for hints to others."""
        text = _read(self._sysfs / f"devices/system/node/node{node}/cpulist")
        return text is not None and any(character.isdigit() for character in text)

    # --- device nodes ---------------------------------------------------------------

    def _minor(self, gpu: DriverGpu) -> int | None:
        if gpu.pci_bus_id is None or not _BUS_ID.fullmatch(gpu.pci_bus_id):
            return None
        text = _read(self._proc / "driver/nvidia/gpus" / gpu.pci_bus_id / "information")
        match = _MINOR.search(text) if text is not None else None
        return int(match[1]) if match else None

    def _is_device(self, name: str) -> bool:
        """A container runtime refuses to start a container with anything else."""
        try:
            return stat.S_ISCHR((self._dev / name).stat().st_mode)
        except OSError:
            return False


def _numa_node(directory: Path) -> int | None:
    """The number in ``numa_node``, -1 included; None when there is none to be had."""
    text = _read(directory / "numa_node")
    if text is None or not re.fullmatch(r"-?[0-9]{1,6}", text.strip()):
        return None
    return int(text)


def _read(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(_READ_MAX_BYTES).decode("ascii", "replace")
    except OSError:
        return None

"""What connects the GPUs: PCIe distance and NVLinks, direct or through NVSwitch.

What cannot be read costs no more than the pairs it is about: NVLinks are
unknown for all pairs of a GPU that doesn't tell where its links go, or has no
bus id by which others could tell that theirs go to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import pynvml

from deviceplugin.hardware.nvml.calls import (
    EXPECTED,
    Calls,
    GpuTrouble,
    Handle,
    bus_id,
)
from deviceplugin.model import DriverGpu, GpuId, Link, PcieLevel

_PCIE_LEVELS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: PcieLevel.PSB,
    pynvml.NVML_TOPOLOGY_SINGLE: PcieLevel.PIX,
    pynvml.NVML_TOPOLOGY_MULTIPLE: PcieLevel.PXB,
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: PcieLevel.PHB,
    pynvml.NVML_TOPOLOGY_NODE: PcieLevel.NODE,
    pynvml.NVML_TOPOLOGY_SYSTEM: PcieLevel.SYS,
}

_NO_SUCH_LINK = frozenset({pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_NOT_SUPPORTED})
"""What the driver says behind the last link, and of a GPU without any."""


class Links:
    """Reads the links of one session's GPUs."""

    def __init__(self, calls: Calls, handles: Mapping[GpuId, Handle]) -> None:
        self._calls = calls
        self._handles = handles

    def between(self, gpus: Iterable[DriverGpu]) -> tuple[Link, ...]:
        buses = {gpu.pci_bus_id: gpu.id for gpu in gpus if gpu.pci_bus_id is not None}
        nvlinks = {
            gpu.id: None if gpu.pci_bus_id is None else self._nvlinks(self._handles[gpu.id], buses)
            for gpu in gpus
        }
        links = []
        for a, b in itertools.combinations(nvlinks, 2):
            links.append(Link(a, b, self._pcie(a, b), _between(a, b, nvlinks)))
        return tuple(links)

    def _pcie(self, a: GpuId, b: GpuId) -> PcieLevel:
        level = self._calls.ask(
            pynvml.nvmlDeviceGetTopologyCommonAncestor, self._handles[a], self._handles[b]
        )
        return _PCIE_LEVELS.get(level, PcieLevel.UNKNOWN)

    def _nvlinks(self, handle: Handle, buses: dict[str, GpuId]) -> _NvLinks | None:
        """Where this GPU's NVLinks go; None when that cannot be told."""
        found = _NvLinks()
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            try:
                if not self._link_active(handle, link):
                    continue
                kind = self._calls.ask(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
                if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                    found.to_switch += 1
                    continue
                remote = self._calls.ask(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
            except _LinksEnd:
                return found
            except (pynvml.NVMLError, GpuTrouble):
                return None
            peer = buses.get(bus_id(remote) or "") if remote is not None else None
            if peer is not None:
                found.to_gpu[peer] = found.to_gpu.get(peer, 0) + 1
            elif kind is None or remote is None:
                return None  # an older library cannot tell a switch from a CPU
        return found

    def _link_active(self, handle: Handle, link: int) -> bool:
        """Raises _LinksEnd behind the last link, and for a GPU without any."""
        call = pynvml.nvmlDeviceGetNvLinkState
        try:
            state = self._calls.call(call, handle, link, expected=EXPECTED | _NO_SUCH_LINK)
        except pynvml.NVMLError as error:
            if error.value in _NO_SUCH_LINK:
                raise _LinksEnd from error
            raise
        return bool(state == pynvml.NVML_FEATURE_ENABLED)


class _LinksEnd(Exception):
    """There is no link of this number."""


class _NvLinks:
    """Where one GPU's active NVLinks go."""

    def __init__(self) -> None:
        self.to_gpu: dict[GpuId, int] = {}
        self.to_switch = 0


def _between(a: GpuId, b: GpuId, nvlinks: dict[GpuId, _NvLinks | None]) -> int | None:
    """NVLinks between two GPUs: direct ones, and through the switches as many as
    the lesser of the two has. Sides that differ count as the smaller."""
    one, other = nvlinks[a], nvlinks[b]
    if one is None or other is None:
        return None
    direct = min(one.to_gpu.get(b, 0), other.to_gpu.get(a, 0))
    return direct + min(one.to_switch, other.to_switch)

"""What NVML tells of a GPU's condition beyond its answering at all.

Each of these is newer than some drivers and missing on some cards: what cannot
be told is None.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pynvml

from deviceplugin.hardware.nvml.calls import Calls, Handle
from deviceplugin.model import Fabric, GpuId, Reading, RecoveryAction, RowRemap

_ACTIONS = {
    pynvml.NVML_GPU_RECOVERY_ACTION_NONE: RecoveryAction.NONE,
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: RecoveryAction.GPU_RESET,
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: RecoveryAction.NODE_REBOOT,
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: RecoveryAction.DRAIN_P2P,
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: RecoveryAction.DRAIN_AND_RESET,
}
_ACTIONS |= {
    value: action
    for name, action in (
        # of newer releases of the bindings
        ("RECOVER_IMEX_DOMAIN", RecoveryAction.RECOVER_IMEX_DOMAIN),
        ("BUS_RESET", RecoveryAction.BUS_RESET),
        ("SYSTEM_REBOOT", RecoveryAction.SYSTEM_REBOOT),
    )
    if (value := getattr(pynvml, f"NVML_GPU_RECOVERY_ACTION_{name}", None)) is not None
}

_FABRIC = {
    pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED: Fabric.NOT_STARTED,
    pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS: Fabric.IN_PROGRESS,
    pynvml.NVML_GPU_FABRIC_STATE_COMPLETED: Fabric.COMPLETED,
}


_THROTTLING = {
    pynvml.nvmlClocksEventReasonSwPowerCap: "power cap",
    pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync boost",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "temperature",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "temperature, by hardware",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
}
"""Reasons for lower clocks that are worth a word: idleness and settings are not."""


class Conditions:
    """Reads them; remembers the error counts, which start again at a reset."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._errors: dict[GpuId, int] = {}

    def read(self, gpu: GpuId, handle: Handle) -> Reading:
        """The condition of a GPU that answers.

        Raises:
            GpuTrouble: it does not any more.
            HardwareError: the driver as a whole does not.
        """
        errors = self._calls.ask_gpu(
            pynvml.nvmlDeviceGetTotalEccErrors,
            handle,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        )
        was_reset = errors is not None and errors < self._errors.get(gpu, 0)
        if errors is not None:
            self._errors[gpu] = errors
        return Reading(
            gpu,
            was_reset=was_reset,
            action=self._action(handle),
            remap=self._remap(handle),
            fabric=self._fabric(handle),
            uncorrected_errors=errors,
            throttled_by=self._throttling(handle),
        )

    def _action(self, handle: Handle) -> RecoveryAction | None:
        field = pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
        values = self._calls.ask_gpu(pynvml.nvmlDeviceGetFieldValues, handle, [field])
        if values is None or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
            return None
        return _ACTIONS.get(values[0].value.uiVal)

    def _throttling(self, handle: Handle) -> tuple[str, ...] | None:
        mask = self._calls.ask_gpu(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if mask is None:
            return None
        return tuple(text for bit, text in _THROTTLING.items() if mask & bit)

    def _remap(self, handle: Handle) -> RowRemap | None:
        rows = self._calls.ask_gpu(pynvml.nvmlDeviceGetRemappedRows, handle)
        return None if rows is None else RowRemap(pending=bool(rows[2]), failed=bool(rows[3]))

    def _fabric(self, handle: Handle) -> Fabric | None:
        info: Any = pynvml.c_nvmlGpuFabricInfoV_t()
        told = self._calls.ask_gpu(pynvml.nvmlDeviceGetGpuFabricInfoV, handle, ctypes.byref(info))
        if told is None:
            return None
        fabric = _FABRIC.get(info.state)
        if fabric is Fabric.COMPLETED and info.status != pynvml.NVML_SUCCESS:
            return Fabric.FAILED
        return fabric

"""The real driver: NVML through ``pynvml`` (from ``nvidia-ml-py``).

Owns the library: loading, one session, its event set, handles. Nothing of it
leaves: callers get values. What NVML answers means three things here.

- A fact that the card or the library cannot tell (not supported, function
  missing in an older library, no permission, garbage) is ``None``, and all
  else goes on.
- A GPU that is lost or wants a reset costs only itself: a ``Fault``.
- A driver that is absent, closed or of another version than the library is a
  ``HardwareError``: close, and come back later.

Surprising facts: a session that saw a GPU lost goes on saying so until the
library is shut down and initialised again; the list of GPUs is made at
initialisation, too. Event data may carry a handle of a GPU without events.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pynvml

from deviceplugin.errors import HardwareError
from deviceplugin.hardware.nvml.calls import (
    EXPECTED,
    GPU_FAULTS,
    Calls,
    GpuTrouble,
    Handle,
    bus_id,
    driver_error,
    error_name,
    load_library,
)
from deviceplugin.hardware.nvml.condition import Conditions
from deviceplugin.hardware.nvml.links import Links
from deviceplugin.model import (
    Address,
    Alarm,
    CallError,
    DriverGpu,
    DriverInfo,
    Fault,
    GpuId,
    Reading,
    Scan,
    UnreadableGpu,
    XidEvent,
)

_EVENTS_AT_ONCE = 64
"""A storm is handed on in pieces of this size, so that the caller stays responsive."""

_NOT_FOUND = frozenset({pynvml.NVML_ERROR_NOT_FOUND})

_NO_INSTANCE = 0xFFFFFFFF

_ALARMS: dict[int, Fault | None] = {
    number: fault
    for name, fault in (
        # of newer releases of the bindings, too
        ("FatalPoisonError", Fault("fatal-poison", "poisoned data spread beyond one program")),
        ("GpuUnavailableError", Fault("unavailable", "the driver says that it cannot be used")),
        ("GpuRecoveryAction", None),
    )
    if (number := getattr(pynvml, f"nvmlEventType{name}", None)) is not None
}
"""Events other than Xids that are heard, where a GPU can report them."""


class Nvml:
    """``Hardware`` on NVML. Used by one thread at a time."""

    def __init__(self, driver_root: Path = Path("/")) -> None:
        """
        Args:
            driver_root: where the library is looked for before the loader's own places.
        """
        self._driver_root = driver_root
        self._open = False
        self._handles: dict[GpuId, Handle] = {}
        self._by_address: dict[int, GpuId] = {}
        self._event_set: Handle | None = None
        self._listening: set[GpuId] = set()
        self._deaf = False
        """Waiting for events turned out to be impossible."""
        self._calls = Calls()
        self._conditions = Conditions(self._calls)
        self._stumbled = False

    # --- Hardware -----------------------------------------------------------------

    def scan(self, only: tuple[Address, ...] | None = None) -> Scan:
        if not self._open:
            self._initialise()
        if self._event_set is None:
            self._event_set = self._calls.ask(pynvml.nvmlEventSetCreate)
        info = DriverInfo(
            driver_version=self._calls.ask(pynvml.nvmlSystemGetDriverVersion),
            library_version=self._calls.ask(pynvml.nvmlSystemGetNVMLVersion),
            cuda_version=_cuda(self._calls.ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)),
        )
        gpus: dict[GpuId, DriverGpu] = {}
        unreadable = []
        self._handles.clear()
        self._by_address.clear()
        places: Iterable[tuple[int, str | None]]
        if only is None:
            places = ((index, None) for index in range(self._calls.must(pynvml.nvmlDeviceGetCount)))
        else:
            places = ((address.index, address.pci_bus_id) for address in only)
        for index, pci_bus_id in places:
            found = self._gpu(index, pci_bus_id)
            if found is None:
                continue
            if isinstance(found, UnreadableGpu):
                unreadable.append(found)
            else:
                gpus[found.id] = found
        links = Links(self._calls, self._handles)
        return Scan(info, tuple(gpus.values()), tuple(unreadable), links.between(gpus.values()))

    def read(self) -> tuple[Reading, ...]:
        return tuple(self._read(gpu, handle) for gpu, handle in self._handles.items())

    def wait(self, timeout_s: float) -> tuple[XidEvent | Alarm, ...]:
        if not self._listening:
            time.sleep(timeout_s)
            return ()
        events: list[XidEvent | Alarm] = []
        timeout_ms = max(1, round(timeout_s * 1000))
        for _ in range(_EVENTS_AT_ONCE):
            try:
                data = pynvml.nvmlEventSetWait_v2(self._event_set, timeout_ms)
            except pynvml.NVMLError as error:
                self._after_wait(error, timeout_s, heard=bool(events))
                break
            self._stumbled = False
            if data.eventType == pynvml.nvmlEventTypeXidCriticalError:
                events.append(self._xid_event(data))
            elif data.eventType in _ALARMS:
                events.append(Alarm(self._gpu_of(data.device), _ALARMS[data.eventType]))
            timeout_ms = 0  # take what is there already
        return tuple(events)

    def wake(self) -> None:
        """Nothing ends a wait of NVML: callers keep theirs short."""

    def interrupt(self) -> None:
        """Nothing ends a call of NVML but the end of its process."""

    def errors(self) -> tuple[CallError, ...]:
        return self._calls.errors()

    def close(self) -> bool:
        if self._event_set is not None:
            with contextlib.suppress(HardwareError):
                self._calls.ask(pynvml.nvmlEventSetFree, self._event_set)
        self._open = self._open and not self._shut_down()
        self._event_set = None
        self._deaf = False
        self._listening.clear()
        self._handles.clear()
        self._by_address.clear()
        self._stumbled = False
        return not self._open

    # --- the session --------------------------------------------------------------

    def _initialise(self) -> None:
        load_library(self._driver_root)
        self._calls.must(pynvml.nvmlInit)
        self._open = True

    def _shut_down(self) -> bool:
        """Whether the session has ended. One that cannot be ended is used again:
        NVML counts initialisations, and with two of them no shutdown would be the last."""
        try:
            self._calls.call(pynvml.nvmlShutdown)
        except HardwareError:
            return True  # ended already
        except (pynvml.NVMLError, GpuTrouble):
            return False
        return True

    # --- one GPU ------------------------------------------------------------------

    def _handle(self, index: int, pci_bus_id: str | None) -> Handle | None:
        """A GPU's handle, which opens that GPU and no other; None: no longer there."""
        if pci_bus_id is None:
            return self._calls.call(pynvml.nvmlDeviceGetHandleByIndex, index)
        try:
            return self._calls.call(
                pynvml.nvmlDeviceGetHandleByPciBusId,
                pci_bus_id.encode(),
                expected=EXPECTED | _NOT_FOUND,
            )
        except pynvml.NVMLError as error:
            if error.value not in _NOT_FOUND:
                raise
            return None

    def _gpu(self, index: int, pci_bus_id: str | None) -> DriverGpu | UnreadableGpu | None:
        try:
            handle = self._handle(index, pci_bus_id)
            if handle is None:
                return None
            uuid = self._calls.call(pynvml.nvmlDeviceGetUUID, handle)
        except GpuTrouble as trouble:
            return UnreadableGpu(index, trouble.fault)
        except pynvml.NVMLError as error:
            name = error_name(error.value)
            return UnreadableGpu(index, Fault("unreadable", f"the driver answers {name}"))
        except UnicodeDecodeError:
            return UnreadableGpu(index, Fault("unreadable", "its UUID is no text"))
        if not uuid:
            return UnreadableGpu(index, Fault("unreadable", "its UUID is empty"))
        gpu = GpuId(uuid)
        if gpu in self._handles:
            return UnreadableGpu(index, Fault("unreadable", f"another GPU has its UUID, {uuid}"))
        self._handles[gpu] = handle
        self._by_address[_address(handle)] = gpu
        faults: list[Fault] = []

        def tell(call: Callable[..., Any]) -> Any:
            """A lost GPU tells nothing more: the rest is not asked."""
            if faults:
                return None
            try:
                return self._calls.ask_gpu(call, handle)
            except GpuTrouble as trouble:
                faults.append(trouble.fault)
                return None

        minor = tell(pynvml.nvmlDeviceGetMinorNumber)
        model = tell(pynvml.nvmlDeviceGetName)
        pci = tell(pynvml.nvmlDeviceGetPciInfo)
        memory = tell(pynvml.nvmlDeviceGetMemoryInfo)
        mig = tell(pynvml.nvmlDeviceGetMigMode)
        listening = self._listen(gpu, handle)
        return DriverGpu(
            id=gpu,
            index=index,
            minor=minor,
            model=model or None,
            pci_bus_id=None if pci is None else bus_id(pci),
            memory_bytes=None if memory is None else memory.total,
            mig_enabled=None if mig is None else mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
            events=listening,
            fault=faults[0] if faults else None,
        )

    def _listen(self, gpu: GpuId, handle: Handle) -> bool:
        """Have this GPU's Xid errors reported; False when that is not possible."""
        if self._event_set is None or self._deaf or gpu in self._listening:
            return gpu in self._listening
        try:
            kinds = self._calls.ask(pynvml.nvmlDeviceGetSupportedEventTypes, handle)
            wanted = pynvml.nvmlEventTypeXidCriticalError
            if kinds is not None:
                if not kinds & wanted:
                    return False
                wanted |= kinds & sum(_ALARMS)
            self._calls.call(pynvml.nvmlDeviceRegisterEvents, handle, wanted, self._event_set)
        except (pynvml.NVMLError, GpuTrouble):
            return False
        self._listening.add(gpu)
        return True

    def _read(self, gpu: GpuId, handle: Handle) -> Reading:
        """Ask first something that only the GPU itself can answer."""
        try:
            if self._calls.ask_gpu(pynvml.nvmlDeviceGetMemoryInfo, handle) is None:
                self._calls.ask_gpu(
                    pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
                )
            return self._conditions.read(gpu, handle)
        except GpuTrouble as trouble:
            return Reading(gpu, trouble.fault)

    # --- events -------------------------------------------------------------------

    def _after_wait(self, error: Any, timeout_s: float, *, heard: bool) -> None:
        if error.value == pynvml.NVML_ERROR_TIMEOUT:
            self._stumbled = False
            return
        if error.value in EXPECTED:  # an older library, or no events on this platform
            self._deaf = True
            self._listening.clear()
            return
        self._calls.count(pynvml.nvmlEventSetWait_v2, error)
        if heard:
            return  # no event is lost; what lasts will be said again
        if error.value not in GPU_FAULTS:
            raise driver_error(pynvml.nvmlEventSetWait_v2, error) from error
        # One GPU's trouble: say at once that there is something to read, but
        # do not spin when it is said again and again.
        if self._stumbled:
            time.sleep(timeout_s)
        self._stumbled = True

    def _xid_event(self, data: Any) -> XidEvent:
        return XidEvent(
            gpu=self._gpu_of(data.device),
            xid=data.eventData,
            gpu_instance=_instance(data.gpuInstanceId),
            compute_instance=_instance(data.computeInstanceId),
        )

    def _gpu_of(self, handle: Handle) -> GpuId | None:
        """Whose handle this is; None for a GPU that we don't know."""
        known = self._by_address.get(_address(handle))
        if known is not None or not handle:
            return known
        try:
            uuid = self._calls.ask(pynvml.nvmlDeviceGetUUID, handle)
        except HardwareError:
            return None  # the next call will say so, too; raised here it would cost the event
        return GpuId(uuid) if uuid in self._handles else None


def _address(handle: Handle) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _instance(value: int) -> int | None:
    return None if value == _NO_INSTANCE else value


def _cuda(version: int | None) -> str | None:
    return None if version is None else f"{version // 1000}.{version % 1000 // 10}"

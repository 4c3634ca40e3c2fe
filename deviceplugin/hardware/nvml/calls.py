"""Calls into NVML: loading the library, and what its answers mean.

Every call goes through ``Calls``, which turns NVML's error codes into the few
cases that the door tells apart, and keeps count of the errors.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml

from deviceplugin.errors import DriverMismatch, DriverMissing, HardwareError
from deviceplugin.model import CallError, Fault

LIBRARY = "libnvidia-ml.so.1"

_LIBRARY_DIRS = (
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib",
    "lib64",
    "lib",
    "usr/local/nvidia/lib64",
    "home/kubernetes/bin/nvidia/lib64",  # Container-Optimized OS
    "",
)
"""Where distributions put the library, below the driver root."""

_ERROR_NAMES: dict[int, str] = {
    value: name.removeprefix("NVML_ERROR_").lower()
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_ERROR_") and isinstance(value, int)
}

DRIVER_GONE = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)

GPU_FAULTS = {
    pynvml.NVML_ERROR_GPU_IS_LOST: Fault("lost", "the driver says that the GPU is lost"),
    pynvml.NVML_ERROR_RESET_REQUIRED: Fault(
        "reset-required", "the driver says that the GPU has to be reset"
    ),
}

EXPECTED = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
"""What a healthy card or an older library may answer: no error to count."""

Handle = Any
"""pynvml is untyped; a handle is one of its ctypes pointers."""


class GpuTrouble(Exception):
    """A call failed in a way that says something about the GPU."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.detail)
        self.fault = fault


class Calls:
    """Makes calls, and remembers which failed."""

    def __init__(self) -> None:
        self._errors: list[CallError] = []

    def errors(self) -> tuple[CallError, ...]:
        """The failed calls since this was asked last."""
        errors, self._errors = self._errors, []
        return tuple(errors)

    def count(self, call: Callable[..., Any], error: Any) -> None:
        if len(self._errors) < 1000:
            self._errors.append(CallError(call.__name__, error_name(error.value)))

    def call(
        self, call: Callable[..., Any], *args: Any, expected: frozenset[int] = EXPECTED
    ) -> Any:
        """The answer. Raises NVMLError, GpuTrouble or HardwareError, having
        counted it unless it is expected, and UnicodeDecodeError."""
        try:
            return call(*args)
        except pynvml.NVMLError as error:
            if error.value not in expected:
                self.count(call, error)
            if error.value in DRIVER_GONE:
                raise driver_error(call, error) from error
            if error.value in GPU_FAULTS:
                raise GpuTrouble(GPU_FAULTS[error.value]) from error
            raise

    def ask_gpu(self, call: Callable[..., Any], *args: Any) -> Any:
        """The answer, or None when it cannot be had. Raises GpuTrouble: the GPU is at fault."""
        try:
            return self.call(call, *args)
        except (pynvml.NVMLError, UnicodeDecodeError):
            return None

    def ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """The answer, or None when it cannot be had, whatever is at fault."""
        try:
            return self.ask_gpu(call, *args)
        except GpuTrouble:
            return None

    def must(self, call: Callable[..., Any], *args: Any) -> Any:
        """The answer, or a HardwareError."""
        try:
            return self.call(call, *args)
        except pynvml.NVMLError as error:
            raise driver_error(call, error) from error
        except GpuTrouble as trouble:
            raise HardwareError(
                f"{call.__name__} failed: {trouble}", call=call.__name__
            ) from trouble


def load_library(driver_root: Path) -> None:
    """Load the library by path. pynvml then asks for it by name, and the
    loader answers with the one of that name that is loaded already.

    One that cannot be loaded does not end the search: directories for other
    architectures may stand beside the right one.
    """
    refused: tuple[Path, OSError] | None = None
    for directory in _LIBRARY_DIRS:
        path = driver_root / directory / LIBRARY
        try:
            if not path.exists():
                continue
            ctypes.CDLL(str(path))
        except OSError as error:
            refused = refused or (path, error)
        else:
            return
    if refused is not None:
        path, cause = refused
        raise DriverMissing(f"{path} cannot be loaded: {cause}") from cause
    if driver_root != Path("/"):
        raise DriverMissing(
            f"no {LIBRARY} below {driver_root}: point --driver-root at the driver's"
            " root as this process sees it"
        )


def driver_error(call: Callable[..., Any], error: Any) -> HardwareError:
    code, name = error.value, call.__name__
    if code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return DriverMissing(
            f"no {LIBRARY} on this machine or in this container: install the NVIDIA driver,"
            " run the pod with the nvidia RuntimeClass, or set --driver-root",
            call=name,
            driver_code=code,
        )
    if code == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return DriverMissing(
            "the NVIDIA kernel driver is not loaded or /dev/nvidiactl is not accessible",
            call=name,
            driver_code=code,
        )
    if code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return DriverMismatch(
            "driver library and kernel driver differ in version: an upgrade is under way,"
            " or the node has to be rebooted after one",
            call=name,
            driver_code=code,
        )
    return HardwareError(f"{name} failed: {error_name(code)} ({code})", call=name, driver_code=code)


def error_name(code: int) -> str:
    return _ERROR_NAMES.get(code, f"error_{code}")


_BUS_ID = re.compile(r"([0-9a-f]+):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)


def bus_id(info: Any) -> str | None:
    """The bus id as sysfs writes it: four digits of domain, or more where needed."""
    try:
        match = _BUS_ID.fullmatch(str(info.busId))
    except UnicodeDecodeError:
        return None
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus}:{device}.{function}".lower()

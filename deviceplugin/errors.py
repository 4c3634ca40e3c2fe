"""Every error of our own, named by what the caller can do about it.

Each class has a stable ``code``: the key that logs and metrics use. Doors to
the outside (driver, sysfs, kubelet, files) translate what they catch into one
of these and keep the cause (``raise ... from``). Nothing here is raised for
"this card cannot tell": that is ``None`` in the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class DevicePluginError(Exception):
    """The root. Catch it only where a thread or the process ends."""

    code: ClassVar[str] = "error"


class ConfigError(DevicePluginError):
    """The settings are wrong. Lists every mistake, not just the first.

    Attributes:
        mistakes: one sentence each, naming the key and where it was set.
    """

    code = "config"

    def __init__(self, mistakes: Iterable[str]) -> None:
        self.mistakes: tuple[str, ...] = tuple(mistakes)
        super().__init__("; ".join(self.mistakes))


class HardwareError(DevicePluginError):
    """The driver library cannot be used now; close it and try again later.

    Attributes:
        call: the driver function that failed, or "" when none did.
        driver_code: the driver's own error number, or None.
    """

    code = "driver_failed"

    def __init__(self, text: str, *, call: str = "", driver_code: int | None = None) -> None:
        super().__init__(text)
        self.call = call
        self.driver_code = driver_code


class DriverMissing(HardwareError):
    """No driver library, or a driver that is not loaded: the node may get one."""

    code = "driver_missing"


class DriverMismatch(HardwareError):
    """Library and kernel driver differ in version, as in the middle of an upgrade."""

    code = "driver_mismatch"


class NoGpu(HardwareError):
    """The driver works and lists no GPU."""

    code = "no_gpu"


class Interrupted(HardwareError):
    """The call was given up because we asked for it: nothing is wrong with the driver."""

    code = "interrupted"


class DriverHung(HardwareError):
    """The driver did not answer in time: its process is given up."""

    code = "driver_hung"


class DriverCrashed(HardwareError):
    """The driver's process ended by itself."""

    code = "driver_crashed"


class RequestError(DevicePluginError):
    """The kubelet asked for something that cannot be: INVALID_ARGUMENT."""

    code = "invalid_request"


class DeviceUnhealthy(DevicePluginError):
    """A device that the kubelet wants is not healthy: FAILED_PRECONDITION."""

    code = "device_unhealthy"


class ListTooLong(DevicePluginError):
    """The device list would pass what the kubelet takes: the settings ask for too much."""

    code = "list_too_long"


class ServeError(DevicePluginError):
    """Our own socket cannot be served; back off and try again."""

    code = "serve_failed"


class ProfileError(DevicePluginError):
    """A simulation profile is missing or wrong. Lists every mistake."""

    code = "profile"

    def __init__(self, mistakes: Iterable[str]) -> None:
        self.mistakes: tuple[str, ...] = tuple(mistakes)
        super().__init__("; ".join(self.mistakes))


class DaemonAbsent(DevicePluginError):
    """No daemon answers on the control socket of this state directory."""

    code = "daemon_absent"

"""The driver child: NVML in a process of its own, that can be abandoned.

``python -m deviceplugin.hardware.worker FD DRIVER_ROOT`` serves requests on the
socket FD and sends events unasked. It loads no gRPC and logs nothing. It ends
when its parent closes the socket, letting go of the driver where it can, and
is killed by the kernel when its parent dies while it hangs in a driver call.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
from pathlib import Path

from deviceplugin.errors import HardwareError
from deviceplugin.hardware import Hardware, messages
from deviceplugin.model import Alarm, XidEvent

WAIT_S = 0.1
"""The longest single wait for events; a request has to wait as long."""

_PR_SET_PDEATHSIG = 1


def serve(connection: socket.socket, hardware: Hardware) -> None:
    """Until the other side closes the connection."""
    frames = messages.Frames()
    opened = False
    try:
        while True:
            if opened and not select.select([connection], [], [], 0)[0]:
                opened = _wait(connection, hardware)
                continue
            data = connection.recv(65536)
            if not data:
                return
            for body in frames.feed(data):
                opened = _answer(connection, hardware, messages.request(body))
    except (OSError, ValueError):
        return  # the parent is gone
    finally:
        hardware.close()


def _answer(connection: socket.socket, hardware: Hardware, request: messages.Request) -> bool:
    """Answer a request. Whether the driver is open."""
    try:
        answer: messages.Message
        match request:
            case messages.DoScan(only=only):
                answer = messages.Scanned(hardware.scan(only), hardware.errors())
            case messages.DoRead():
                answer = messages.Read(hardware.read(), hardware.errors())
    except HardwareError as error:
        messages.send(connection, _failed(hardware, error))
        return False
    messages.send(connection, answer)
    return True


def _wait(connection: socket.socket, hardware: Hardware) -> bool:
    """Wait for events and pass them on. Whether the driver is still open."""
    try:
        events = hardware.wait(WAIT_S)
    except HardwareError as error:
        messages.send(connection, _failed(hardware, error))
        return False
    errors = hardware.errors()
    if events or errors:
        xids = tuple(event for event in events if isinstance(event, XidEvent))
        alarms = tuple(event for event in events if isinstance(event, Alarm))
        messages.send(connection, messages.News(xids, alarms, errors))
    return True


def _failed(hardware: Hardware, error: HardwareError) -> messages.Failed:
    errors = hardware.errors()
    hardware.close()
    return messages.Failed(error.code, str(error), error.call, error.driver_code, errors)


def main() -> int:
    """The child's whole life."""
    descriptor, driver_root = int(sys.argv[1]), Path(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A terminal sends Ctrl-C and hangups to the whole group; the parent decides.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    from deviceplugin.hardware.nvml import Nvml

    with socket.socket(fileno=descriptor) as connection:
        serve(connection, Nvml(driver_root))
    return 0


if __name__ == "__main__":
    # Everything is closed: taking the interpreter apart would only take time.
    os._exit(main())

"""The daemon's control socket: how ``deviceplugin status`` and later commands reach it.

A unix socket in the state directory, for root alone (or whoever the daemon
runs as): the file's mode says so, and the peer's user id is checked. One
request and one answer a connection, each one line of JSON:

    {"command": "status"}  ->  {"ok": true, "result": {...}}
                           or  {"ok": false, "error": "unknown command: ..."}

Without a usable state directory the daemon runs on without this socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deviceplugin import logs
from deviceplugin.config import CONTROL_SOCKET
from deviceplugin.errors import DaemonAbsent
from deviceplugin.sockets import answers

_REQUEST_MAX_BYTES = 64 * 1024
_TIMEOUT_S = 5.0

_log = logs.get("control")

Handlers = Mapping[str, Callable[[Mapping[str, Any]], Any]]
"""Per command, a function from the request to what JSON can say."""


class ControlServer:
    """Answers one request at a time, in a thread of its own."""

    def __init__(self, state_dir: Path, handlers: Handlers) -> None:
        self._path = state_dir / CONTROL_SOCKET
        self._handlers = handlers
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._stopping = False

    def start(self) -> bool:
        """Begin, if the directory and the socket can be made."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if answers(self._path):
                _log.warning(
                    "another daemon owns the control socket, this one has none",
                    socket=self._path,
                )
                return False
            self._path.unlink(missing_ok=True)
            self._listener = listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(self._path))
            self._path.chmod(0o600)
            listener.listen(8)
        except OSError as error:
            self._close()
            _log.warning(
                "no control socket: 'deviceplugin status' will not work",
                socket=self._path,
                why=error,
            )
            return False
        self._thread.start()
        return True

    def trouble(self) -> str | None:
        """What is wrong with this thread, for the liveness probe."""
        started = self._thread.ident is not None
        return "the control thread is dead" if started and not self._thread.is_alive() else None

    def stop(self) -> None:
        """Stop listening and remove the socket."""
        if self._listener is None:
            return
        self._stopping = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._thread.join(0.3)
        self._close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _run(self) -> None:
        listener = self._listener
        while listener is not None and not self._stopping:
            try:
                connection, _ = listener.accept()
            except OSError:
                if not self._stopping:
                    # out of file descriptors, say: do not spin, do not die
                    threading.Event().wait(0.2)
                continue
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_TIMEOUT_S)
                connection.sendall(self._answer(connection))

    def _answer(self, connection: socket.socket) -> bytes:
        if _peer_uid(connection) not in (0, os.geteuid()):
            answer: dict[str, Any] = {"ok": False, "error": "only for root"}
        else:
            answer = self._handle(_read_line(connection))
        return json.dumps(answer).encode() + b"\n"

    def _handle(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            command = request["command"]
            handler = self._handlers[command]
        except (ValueError, TypeError, KeyError, RecursionError):
            known = ", ".join(sorted(self._handlers))
            return {"ok": False, "error": f"not a request that this daemon knows; known: {known}"}
        try:
            return {"ok": True, "result": handler(request)}
        except Exception as error:  # noqa: BLE001  # the asker is owed an answer
            _log.error("command failed by a fault of ours", cause=error, command=command)
            return {"ok": False, "error": f"{type(error).__name__} in the daemon, see its log"}


def ask(state_dir: Path, command: str, **arguments: object) -> Any:
    """Send a command to the running daemon.

    Returns:
        What its handler returned.

    Raises:
        DaemonAbsent: nobody answers there, or the answer makes no sense.
    """
    path = state_dir / CONTROL_SOCKET
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(_TIMEOUT_S)
            client.connect(str(path))
            client.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
            answer = json.loads(_read_line(client, limit=1 << 26))
    except PermissionError as error:
        raise DaemonAbsent(f"{path} is for root: try again with sudo") from error
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise DaemonAbsent(
            f"no daemon answers on {path}: is it running, with the same --state-dir?"
        ) from error
    except (OSError, ValueError) as error:
        raise DaemonAbsent(f"the daemon on {path} gave no answer: {error}") from error
    if not answer.get("ok"):
        raise DaemonAbsent(f"the daemon refused: {answer.get('error')}")
    return answer.get("result")


def _peer_uid(connection: socket.socket) -> int:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", packed)[1]
    return uid


def _read_line(connection: socket.socket, limit: int = _REQUEST_MAX_BYTES) -> bytes:
    """Up to the first line break, the end of the stream, or the limit."""
    data = bytearray()
    while len(data) < limit and b"\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            break
        data += piece
    return bytes(data)

"""The daemon's control socket: how ``deviceplugin status`` and later commands reach it.

A unix socket in the state directory, for root alone (or whoever the daemon
runs as): the file's mode says so, and the peer's user id is checked. One
request and one answer a connection, each one line of JSON:

    {"command": "status"}  ->  {"ok": true, "result": {...}}
                           or  {"ok": false, "error": "unknown command: ..."}

Without a usable state directory, or while another daemon listens there, the
daemon runs on without this socket and tries again.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deviceplugin import logs
from deviceplugin.config import CONTROL_SOCKET
from deviceplugin.errors import DaemonAbsent
from deviceplugin.sockets import answers, directory_trouble

_REQUEST_MAX_BYTES = 64 * 1024
_TIMEOUT_S = 5.0
LISTEN_AGAIN_S = 2.0
"""How often a socket that could not be made is tried again, and one that was is looked at."""

_log = logs.get("control")

Handlers = Mapping[str, Callable[[Mapping[str, Any]], Any]]
"""Per command, a function from the request to what JSON can say."""


class ControlServer:
    """Answers one request at a time, in a thread of its own."""

    def __init__(self, state_dir: Path, handlers: Handlers) -> None:
        self._path = state_dir / CONTROL_SOCKET
        self._handlers = handlers
        self._listener: socket.socket | None = None
        self._made: tuple[int, int] | None = None
        """The identity of our socket's file."""
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._complained = ""

    def start(self) -> None:
        """Listen, or go on trying."""
        self._listen()
        self._thread.start()

    def trouble(self) -> str | None:
        """What is wrong with this thread, for the liveness probe."""
        return None if self._thread.is_alive() else "the control thread is dead"

    def stop(self) -> None:
        """Stop listening and remove the socket."""
        os.eventfd_write(self._stop, 1)
        self._thread.join(0.3)
        if not self._thread.is_alive():
            os.close(self._stop)

    def _run(self) -> None:
        while True:
            waiting_for: list[Any] = [self._stop]
            if self._listener is not None:
                waiting_for.append(self._listener)
            ready = select.select(waiting_for, [], [], LISTEN_AGAIN_S)[0]
            if self._stop in ready:
                break
            if self._listener is not None and self._listener in ready:
                self._serve(self._listener)
            elif self._listener is None or self._identity() != self._made:
                self._close()
                self._listen()
        self._close()

    def _listen(self) -> None:
        """Make the socket, and say if that is not possible or is again."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        trouble = None
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            trouble = directory_trouble(self._path.parent)
            if trouble is None and answers(self._path):
                trouble = "another daemon listens there"
            if trouble is None:
                self._path.unlink(missing_ok=True)
                listener.bind(str(self._path))
                self._path.chmod(0o600)
                listener.listen(8)
                listener.setblocking(False)
                self._made = self._identity()
        except OSError as error:
            trouble = str(error)
        if trouble is None:
            self._listener = listener
        else:
            listener.close()
        if trouble is not None and trouble != self._complained:
            _log.warning(
                "no control socket: 'deviceplugin status' will not work",
                socket=self._path,
                why=trouble,
                retry_every_s=LISTEN_AGAIN_S,
            )
        elif trouble is None and self._complained:
            _log.info("control socket is there now", socket=self._path)
        self._complained = trouble or ""

    def _serve(self, listener: socket.socket) -> None:
        """Answer one request."""
        try:
            connection, _ = listener.accept()
        except OSError:
            time.sleep(0.2)  # out of file descriptors, say: do not spin, do not die
            return
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_TIMEOUT_S)
            connection.sendall(self._answer(connection))

    def _close(self) -> None:
        """Stop listening, and remove the file if it is ours."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        if self._identity() == self._made:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

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

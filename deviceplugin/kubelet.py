"""The kubelet as seen from here: its socket, its directory, and the call to register.

Only this module says ``watchdog``. The watcher is for speed alone: it misses
a directory that is deleted and made again, and cannot always be had (inotify
limits), so whoever uses it looks for itself from time to time as well.
"""

from __future__ import annotations

import contextlib
import importlib
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from api.v1beta1 import api_pb2 as pb
from api.v1beta1.api_pb2_grpc import RegistrationStub
from deviceplugin import logs, wire
from deviceplugin.lifecycle import SocketId

if TYPE_CHECKING:
    from watchdog.observers.api import BaseObserver

SOCKET = "kubelet.sock"

REGISTER_TIMEOUT_S = 20.0
"""The kubelet dials back inside Register, for up to 10 s, and then asks for the
options under what is left of our deadline."""

_log = logs.get("kubelet")


def socket_id(directory: Path) -> SocketId | None:
    """What lies at kubelet.sock; None when nothing does, or no socket."""
    try:
        found = (directory / SOCKET).stat()
    except OSError:
        return None
    if not stat.S_ISSOCK(found.st_mode):
        return None
    return SocketId(found.st_dev, found.st_ino, found.st_mtime_ns)


class Registration:
    """One call of Register, under way from construction on."""

    def __init__(
        self,
        directory: Path,
        endpoint: str,
        resource: str,
        on_answer: Callable[[str | None], None],
    ) -> None:
        """
        Args:
            endpoint: file name of our socket in ``directory``.
            on_answer: told None when the kubelet agreed, else why not; from
                another thread. Not told of a call that was cancelled by ``close``.
        """
        self._channel = grpc.insecure_channel(
            f"unix:{directory / SOCKET}", options=(("grpc.enable_retries", 0),)
        )
        self._call = RegistrationStub(self._channel).Register.future(
            wire.register_request(endpoint, resource), timeout=REGISTER_TIMEOUT_S
        )

        def answered(call: grpc.Future[pb.Empty]) -> None:
            if call.cancelled():
                return
            error = call.exception()
            on_answer(None if error is None else _why(error))

        self._call.add_done_callback(answered)

    def close(self) -> None:
        """Give the call up if it is still under way, and let the connection go."""
        self._call.cancel()
        self._channel.close()


def _why(error: BaseException) -> str:
    if not isinstance(error, grpc.Call):
        return str(error)
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"the kubelet did not answer within {REGISTER_TIMEOUT_S:.0f} s"
    if code is grpc.StatusCode.UNAVAILABLE:
        return f"kubelet.sock does not answer ({details.rsplit(': ', 1)[-1]})"
    return f"the kubelet refused: {details}"


class DirectoryWatch:
    """Tells at once when something comes, goes or is renamed in a directory.

    Not safe from several threads; ``on_change`` comes from a thread of its own.
    """

    def __init__(self, directory: Path, on_change: Callable[[], None]) -> None:
        self._directory = directory
        self._on_change = on_change
        self._observer: BaseObserver | None = None
        self._watched: tuple[int, int] | None = None
        self._complained = ""

    @staticmethod
    def load() -> None:
        """Load what ``ensure`` needs, which takes tens of milliseconds."""
        importlib.import_module("watchdog.observers")

    def ensure(self) -> bool:
        """Watch the directory that lies at the path now, if that is possible.

        Returns:
            Whether the watch is new: what happened before it went unseen.
        """
        try:
            found = self._directory.stat()
        except OSError:
            self.stop()
            return False
        identity = (found.st_dev, found.st_ino)
        if self._watched == identity and self._alive():
            return False
        self.stop()
        from watchdog.events import (
            DirCreatedEvent,
            DirDeletedEvent,
            FileCreatedEvent,
            FileDeletedEvent,
            FileMovedEvent,
            FileSystemEvent,
            FileSystemEventHandler,
        )
        from watchdog.observers import Observer

        on_change = self._on_change

        class Handler(FileSystemEventHandler):
            def on_any_event(self, event: FileSystemEvent) -> None:
                on_change()

        observer = Observer()
        try:
            observer.schedule(
                Handler(),
                str(self._directory),
                event_filter=[
                    FileCreatedEvent,
                    FileDeletedEvent,
                    FileMovedEvent,
                    DirCreatedEvent,
                    DirDeletedEvent,
                ],
            )
            observer.start()
        except (OSError, RuntimeError) as error:
            # RuntimeError: no thread can be started
            with contextlib.suppress(RuntimeError):
                observer.stop()
            if str(error) != self._complained:
                _log.warning(
                    "directory cannot be watched, looking every second instead",
                    directory=self._directory,
                    why=error,
                )
            self._complained = str(error)
            return False
        self._observer, self._watched, self._complained = observer, identity, ""
        return True

    def _alive(self) -> bool:
        """Whether the threads of the watch still run: they end at an error of their own."""
        observer = self._observer
        return observer is not None and all(
            thread.is_alive() for thread in (observer, *observer.emitters)
        )

    def stop(self) -> None:
        """End the watch and its threads."""
        observer, self._observer, self._watched = self._observer, None, None
        if observer is not None:
            observer.stop()
            observer.join(0.5)

"""A gRPC server on a unix socket in the kubelet's directory: one incarnation.

Every incarnation gets a file name never used before: a gRPC server that stops
unlinks whatever lies at its path, a newer server's socket included. So that
names do not pile up, ``remove_stale`` clears what a killed plugin left, and
nothing that still answers.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from api.v1beta1.api_pb2_grpc import add_DevicePluginServicer_to_server
from deviceplugin.errors import ServeError
from deviceplugin.servicer import WORKERS, Servicer
from deviceplugin.sockets import answers, directory_trouble


def socket_name(stem: str) -> str:
    """A new file name for a resource's socket: "vendor.example_gpu.1b2c3d4e.sock"."""
    return f"{stem}.{secrets.token_hex(4)}.sock"


def remove_stale(directory: Path, stem: str) -> list[str]:
    """Remove sockets of earlier incarnations that nobody listens on any more.

    Returns:
        Names of those that are left because somebody answers there.
    """
    ours = re.compile(re.escape(stem) + r"\.[0-9a-f]{8}\.sock")
    live = []
    with contextlib.suppress(OSError):
        for path in sorted(directory.iterdir()):
            if not ours.fullmatch(path.name) or not path.is_socket():
                continue
            if answers(path):
                live.append(path.name)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()
    return live


_PING = "/deviceplugin.SelfCheck/Ping"
SELF_CHECK_TIMEOUT_S = 5.0


class _Ping(grpc.GenericRpcHandler):
    """Answers our own calls, beside the kubelet's."""

    def service(
        self, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        if details.method != _PING:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda request, _: request)


class PluginServer:
    """Serves from construction until ``stop``."""

    def __init__(self, path: Path, servicer: Servicer) -> None:
        """
        Raises:
            ServeError: the socket cannot be made; the text says why.
        """
        self.path = path
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="rpc")
        self._server = grpc.server(
            self._workers, options=(("grpc.so_reuseport", 0), ("grpc.max_concurrent_streams", 64))
        )
        add_DevicePluginServicer_to_server(servicer, self._server)
        self._server.add_generic_rpc_handlers((_Ping(),))
        self._channel: grpc.Channel | None = None
        self._unanswered = 0
        try:
            self._server.add_insecure_port(f"unix:{path}")
            path.chmod(0o600)  # the kubelet is root, and so are we
            self._server.start()
            self._id = self._identity()
        except (RuntimeError, OSError) as error:
            self.stop()
            raise ServeError(f"cannot serve on {path}: {_why(path) or error}") from error

    def check(self, on_dead: Callable[[str], None]) -> None:
        """Call ourselves, by the way that the kubelet comes: a new connection.

        One call without an answer says little, since the machine may have been
        asleep; two in a row say that nobody serves. A process that has no file left
        to open can neither call nor take a new call, and is best left alone: a
        stream that is open goes on.

        Args:
            on_dead: told why, from another thread, after the second one.
        """
        if self._channel is not None:
            return  # the call before is still waiting
        channel = self._channel = grpc.insecure_channel(
            f"unix:{self.path}", options=(("grpc.enable_retries", 0),)
        )
        ping: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_PING)
        call = ping.future(b"", timeout=SELF_CHECK_TIMEOUT_S)

        def answered(call: grpc.Future[bytes]) -> None:
            if call.cancelled():
                return  # by stop
            channel.close()
            self._channel = None
            if call.exception() is None or _starved():
                self._unanswered = 0
            else:
                self._unanswered += 1
            if self._unanswered >= 2:
                on_dead("our own server does not answer")

        call.add_done_callback(answered)

    def in_place(self) -> bool:
        """Whether the socket can still be found where the kubelet dials it."""
        return self._identity() == self._id

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self.path.lstat()
        except OSError:
            return None
        return (found.st_dev, found.st_ino) if stat.S_ISSOCK(found.st_mode) else None

    def stop(self, timeout_s: float = 0.5) -> None:
        """End every call and stream, stop listening and remove the socket."""
        if (channel := self._channel) is not None:
            channel.close()
        self._server.stop(grace=None).wait(timeout_s)
        self._workers.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(OSError):
            self.path.unlink()


def _starved() -> bool:
    """Whether no file can be opened."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return True
    return False


def _why(path: Path) -> str | None:
    """gRPC does not say why a socket could not be made: ask the kernel itself."""
    if trouble := directory_trouble(path.parent):
        return trouble
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path))
        path.unlink()
    except OSError as error:
        return error.strerror
    return None

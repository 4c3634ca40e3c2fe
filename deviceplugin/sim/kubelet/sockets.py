"""gRPC servers on unix sockets that can be killed as well as stopped.

A gRPC server removes its socket when it stops; a kubelet that is killed leaves
it, refusing connections. So the server binds in a private directory beside,
and the public path is a hard link to that socket: it stays until it is taken
away.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from deviceplugin.config.settings import UNIX_PATH_MAX_BYTES


class LinkedServer:
    """Serves at ``path`` from construction until ``close``."""

    def __init__(self, path: Path, add: Callable[[grpc.Server], None], workers: int = 8) -> None:
        """
        Args:
            add: adds the services.

        Raises:
            ValueError: the path is too long for a unix socket.
            OSError: the socket cannot be made.
        """
        if len(os.fsencode(path)) > UNIX_PATH_MAX_BYTES:
            raise ValueError(
                f"{path}: too long for a unix socket, {UNIX_PATH_MAX_BYTES} bytes are the most:"
                " use a shorter directory"
            )
        self.path = path
        self._private = Path(tempfile.mkdtemp(prefix=".k", dir=path.parent.parent))
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="kubelet")
        self._server = grpc.server(self._workers)
        add(self._server)
        try:
            self._server.add_insecure_port(f"unix:{self._private / 's'}")
            self._server.start()
            path.unlink(missing_ok=True)
            os.link(self._private / "s", path)
        except (OSError, RuntimeError) as error:
            self.close()
            raise OSError(f"cannot serve on {path}: {error}") from error

    def close(self) -> None:
        """End every call and stop; the file at ``path`` stays, and refuses."""
        self._server.stop(None).wait()
        self._workers.shutdown()
        shutil.rmtree(self._private, ignore_errors=True)

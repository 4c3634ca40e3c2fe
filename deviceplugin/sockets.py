"""Whether a unix socket can be made in a directory, and whether somebody listens
on one. A file alone does not tell: a process that was killed leaves its socket
behind."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def answers(path: Path, timeout_s: float = 0.5) -> bool:
    """Whether a connection can be made; in doubt yes, so that nothing live is removed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(timeout_s)
        try:
            client.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # its queue is full, or it is not ours to judge
        return True


def directory_trouble(directory: Path) -> str | None:
    """Why no socket can be found or made there, as far as that is plain to see."""
    try:
        directory.stat()
    except FileNotFoundError:
        return f"{directory} does not exist"
    except OSError as error:
        return f"{directory}: {error.strerror}"
    if not directory.is_dir():
        return f"{directory} is not a directory"
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return (
            f"no permission to use {directory}: run as root; with SELinux the process needs a"
            " type that may use container_file_t"
        )
    return None

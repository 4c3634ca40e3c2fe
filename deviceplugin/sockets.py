"""Whether somebody listens on a unix socket. A file alone does not tell: a
process that was killed leaves its socket behind."""

from __future__ import annotations

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

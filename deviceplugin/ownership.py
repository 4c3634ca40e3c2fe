"""Who serves a resource on this node: one plugin at a time, by a lock file.

Two live plugins of one resource disconnect each other at the kubelet. So the
one that holds the lock on ``<stem>.lock`` in the kubelet's directory serves,
and any other waits, says whose it is, and takes over when the first is gone.
The kernel releases the lock with the process that holds it, however it ends;
a starting kubelet wipes sockets and leaves plain files.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path

from deviceplugin import logs

_log = logs.get("ownership")


class Ownership:
    """One plugin's claim. Not safe from several threads."""

    def __init__(self, directory: Path, stem: str, pod: str) -> None:
        """
        Args:
            pod: who we are, for another plugin to read.
        """
        self._path = directory / f"{stem}.lock"
        self._pod = pod
        self._file = -1
        self._complained = ""

    def claim(self) -> str | None:
        """Take the lock, or make sure that it is still ours.

        Returns:
            None when it is ours; else whose it is, in words.
        """
        if self._file >= 0 and self._in_place():
            return None
        self.release()
        try:
            self._file = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = self._read_owner()
            self.release()
            return owner
        except FileNotFoundError:
            return None  # no directory, and so no kubelet to be seen by
        except OSError as error:
            # Serving without a lock is better than not serving at all.
            if str(error) != self._complained:
                self._complained = str(error)
                _log.warning(
                    "no lock file, serving without: never run two plugins of one resource here",
                    file=self._path,
                    why=error,
                )
            return None
        if not self._in_place():
            self.release()  # it was replaced between open and lock
            return "another plugin that is just starting"
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps({"pid": os.getpid(), "pod": self._pod}).encode(), 0)
        return None

    def release(self) -> None:
        """Let go of the lock, if it is ours."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _in_place(self) -> bool:
        """Whether the file that is locked is the one that others would find; in doubt it is,
        since a lock that is let go of may be somebody else's a moment later."""
        try:
            ours, found = os.fstat(self._file), self._path.stat()
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return (ours.st_dev, ours.st_ino) == (found.st_dev, found.st_ino)

    def _read_owner(self) -> str:
        try:
            said = json.loads(os.pread(self._file, 4096, 0))
            return f"pod {said['pod']}, pid {said['pid']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another plugin"

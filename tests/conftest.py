"""What every test has to leave as it found it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import fakenvml
from tests.daemon import Node, short_directory
from tests.machine import Machine


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.is_alive()}


def _sockets() -> set[str]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:"):
            found.add(target)
    return found


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a thread, an open socket or a child process.

    What is ending gets two seconds: a thread that was told to stop needs a moment.
    """
    threads, sockets, children = _threads(), _sockets(), _children()
    yield
    deadline = time.monotonic() + 2
    while True:
        left = [
            *(f"thread {thread.name}" for thread in _threads() - threads),
            *(f"socket {name}" for name in _sockets() - sockets),
            *(f"process {pid}" for pid in _children() - children),
        ]
        if not left:
            return
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + ", ".join(left))
        time.sleep(0.01)


@pytest.fixture
def node() -> Iterator[Node]:
    """A node with a kubelet that is not started yet."""
    with short_directory() as directory, contextlib.ExitStack() as stack:
        yield Node(directory, stack)


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver library, whole."""
    try:
        return fakenvml.build(tmp_path_factory.mktemp("nvml"))
    except fakenvml.NoCompiler as error:
        if "CI" in os.environ:
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture
def machine(node: Node, fake_library: Path) -> Machine:
    return Machine(node.directory, fake_library, fakenvml.h100x8(node.directory / "nvml"))

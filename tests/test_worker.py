"""deviceplugin.hardware.worker, with simulated GPUs and in this process"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from deviceplugin.errors import DriverMismatch
from deviceplugin.hardware import messages, worker
from deviceplugin.model import XidEvent
from deviceplugin.sim import profile
from deviceplugin.sim.gpus import LOST, SimulatedHardware

PROFILE = profile.load("dgx1v")


class Parent:
    """The other side of a worker that runs in a thread."""

    def __init__(self) -> None:
        self.hardware = SimulatedHardware(PROFILE)
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(10)
        self._frames = messages.Frames()
        self._theirs = theirs
        self._thread = threading.Thread(target=worker.serve, args=(theirs, self.hardware))
        self._thread.start()

    def next(self) -> messages.Message:
        while True:
            for body in self._frames.feed(self.connection.recv(1 << 20)):
                return messages.message(body)

    def ask(self, request: messages.Request) -> messages.Message:
        messages.send(self.connection, request)
        return self.next()

    def wait(self) -> None:
        """Until the worker has ended."""
        self._thread.join(10)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.connection.close()
        self.wait()
        self._theirs.close()


@pytest.fixture
def parent() -> Iterator[Parent]:
    made = Parent()
    yield made
    made.close()


def test_a_scan_and_a_reading_are_answered(parent: Parent) -> None:
    scanned = parent.ask(messages.DoScan())
    assert isinstance(scanned, messages.Scanned)
    assert scanned.scan.gpus == PROFILE.gpus
    assert scanned.scan.links == PROFILE.links
    parent.hardware.lose("0")
    read = parent.ask(messages.DoRead())
    assert isinstance(read, messages.Read)
    assert [reading.fault for reading in read.readings[:2]] == [LOST, None]


def test_events_are_sent_unasked(parent: Parent) -> None:
    parent.ask(messages.DoScan())
    parent.hardware.xid("3", 79)
    assert parent.next() == messages.News((XidEvent(PROFILE.gpus[3].id, 79),))


def test_a_driver_that_fails_is_told_at_a_request_and_while_waiting(parent: Parent) -> None:
    parent.hardware.fail(DriverMismatch("an upgrade", call="nvmlInit", driver_code=18))
    told = messages.Failed("driver_mismatch", "an upgrade", "nvmlInit", 18)
    assert parent.ask(messages.DoScan()) == told
    parent.hardware.fail(None)
    assert isinstance(parent.ask(messages.DoScan()), messages.Scanned)
    parent.hardware.fail(DriverMismatch("an upgrade", call="nvmlInit", driver_code=18))
    assert parent.next() == told
    parent.hardware.fail(None)
    assert isinstance(parent.ask(messages.DoScan()), messages.Scanned), "it serves on"


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1"])
def test_nonsense_ends_it(data: bytes) -> None:
    parent = Parent()
    parent.connection.sendall(data)
    parent.wait()
    parent.close()


def test_it_ends_with_its_parent_and_lets_go_of_the_driver() -> None:
    parent = Parent()
    parent.ask(messages.DoScan())
    parent.close()
    assert parent.hardware.read() == (), "closed"

"""deviceplugin.control"""

from __future__ import annotations

import contextlib
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from deviceplugin import control
from deviceplugin.control import ControlServer
from deviceplugin.errors import DaemonAbsent


def _fail(_: Mapping[str, Any]) -> None:
    raise RuntimeError("inside")


HANDLERS: control.Handlers = {
    "echo": lambda request: request.get("text"),
    "fail": _fail,
}


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[Path]:
    served = ControlServer(tmp_path / "state", HANDLERS)
    assert served.start()
    yield tmp_path / "state"
    served.stop()


def raw(state_dir: Path, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(str(state_dir / "control.sock"))
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(4096), b""))


def test_a_command_is_answered(state_dir: Path) -> None:
    assert control.ask(state_dir, "echo", text="héllo") == "héllo"


def test_the_socket_is_for_its_owner_alone(state_dir: Path) -> None:
    assert stat.S_IMODE((state_dir / "control.sock").stat().st_mode) == 0o600
    assert stat.S_IMODE(state_dir.stat().st_mode) == 0o700


def test_an_unknown_command_names_the_known_ones(state_dir: Path) -> None:
    with pytest.raises(DaemonAbsent, match="known: echo, fail"):
        control.ask(state_dir, "nope")


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"{", b"[]\n", b'{"command": 7}\n', b'{"command": []}\n', b"\xff\n", b"[" * 60000],
)
def test_garbage_is_refused_and_ends_nothing(state_dir: Path, data: bytes) -> None:
    assert b'"ok": false' in raw(state_dir, data)
    assert control.ask(state_dir, "echo", text="still here") == "still here"


def test_a_handler_that_fails_is_reported_and_ends_nothing(state_dir: Path) -> None:
    with pytest.raises(DaemonAbsent, match="RuntimeError in the daemon"):
        control.ask(state_dir, "fail")
    assert control.ask(state_dir, "echo", text="a") == "a"


def test_a_client_that_hangs_up_ends_nothing(state_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(state_dir / "control.sock"))
    assert control.ask(state_dir, "echo", text="a") == "a"


def test_without_a_daemon_the_command_says_so(tmp_path: Path) -> None:
    with pytest.raises(DaemonAbsent, match=r"no daemon answers on .*control\.sock"):
        control.ask(tmp_path, "status")


def test_the_socket_of_a_killed_daemon_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "control.sock"))
    with pytest.raises(DaemonAbsent, match="no daemon answers"):
        control.ask(tmp_path, "echo")
    served = ControlServer(tmp_path, HANDLERS)
    assert served.start()
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(served.stop)
        assert control.ask(tmp_path, "echo", text="a") == "a"
    assert not (tmp_path / "control.sock").exists()


def test_the_socket_of_a_running_daemon_is_left_alone(state_dir: Path) -> None:
    second = ControlServer(state_dir, HANDLERS)
    assert not second.start()
    second.stop()
    assert control.ask(state_dir, "echo", text="first") == "first"


def test_a_state_directory_that_cannot_be_made_costs_only_the_socket(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    served = ControlServer(tmp_path / "file", HANDLERS)
    assert not served.start()
    assert served.trouble() is None
    served.stop()

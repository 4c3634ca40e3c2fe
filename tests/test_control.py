"""deviceplugin.control"""

from __future__ import annotations

import contextlib
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
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
    served.start()
    yield tmp_path / "state"
    served.stop()


def raw(state_dir: Path, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(str(state_dir / "control.sock"))
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(4096), b""))


def eventually(good: Callable[[], bool]) -> bool:
    """Whether it comes true; while no daemon answers it has not."""
    for _ in range(1000):
        with contextlib.suppress(DaemonAbsent):
            if good():
                return True
        time.sleep(0.01)
    return False


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
    served.start()
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(served.stop)
        assert control.ask(tmp_path, "echo", text="a") == "a"
    assert not (tmp_path / "control.sock").exists()


def test_the_socket_of_a_running_daemon_is_left_alone_and_taken_over_when_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "LISTEN_AGAIN_S", 0.01)
    first = ControlServer(tmp_path, {"who": lambda _: 1})
    second = ControlServer(tmp_path, {"who": lambda _: 2})
    first.start()
    second.start()
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(second.stop)
        time.sleep(0.1)
        assert control.ask(tmp_path, "who") == 1
        first.stop()
        assert eventually(lambda: control.ask(tmp_path, "who") == 2)


def test_a_socket_that_somebody_removed_is_made_again(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (state_dir / "control.sock").unlink()
    assert eventually(lambda: control.ask(state_dir, "echo", text="a") == "a")


def test_a_state_directory_that_cannot_be_made_costs_only_the_socket_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "LISTEN_AGAIN_S", 0.01)
    (tmp_path / "file").write_text("in the way")
    served = ControlServer(tmp_path / "file", HANDLERS)
    served.start()
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(served.stop)
        assert served.trouble() is None
        (tmp_path / "file").unlink()
        assert eventually(lambda: control.ask(tmp_path / "file", "echo", text="a") == "a")

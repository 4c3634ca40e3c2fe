"""deviceplugin.kubelet: our view of it. The embedded kubelet has tests of its own."""

from __future__ import annotations

import errno
import os
import queue
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from watchdog.observers import Observer

from api.v1beta1 import api_pb2 as pb
from api.v1beta1.api_pb2_grpc import (
    RegistrationServicer,
    add_RegistrationServicer_to_server,
)
from deviceplugin.kubelet import DirectoryWatch, Registration, socket_id

Answer = Callable[[pb.RegisterRequest, grpc.ServicerContext], pb.Empty]


class Kubelet(RegistrationServicer):
    """Answers Register as the test says."""

    def __init__(self, directory: Path, answer: Answer) -> None:
        self._answer = answer
        self._workers = ThreadPoolExecutor(2)
        self._server = grpc.server(self._workers)
        add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{directory / 'kubelet.sock'}")
        self._server.start()

    def Register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.Empty:
        return self._answer(request, context)

    def stop(self) -> None:
        self._server.stop(None).wait(5)
        self._workers.shutdown()


Serve = Callable[[Answer], None]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    kubelets = []
    yield lambda answer: kubelets.append(Kubelet(tmp_path, answer))
    for served in kubelets:
        served.stop()


def register(directory: Path) -> str | None:
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    call = Registration(directory, "x.0123abcd.sock", "vendor.example/gpu", answers.put)
    try:
        return answers.get(timeout=10)
    finally:
        call.close()


def test_a_registration_says_version_endpoint_and_resource(tmp_path: Path, serve: Serve) -> None:
    got: list[pb.RegisterRequest] = []

    def answer(request: pb.RegisterRequest, _: grpc.ServicerContext) -> pb.Empty:
        got.append(request)
        return pb.Empty()

    serve(answer)
    assert register(tmp_path) is None
    (request,) = got
    assert (request.version, request.endpoint, request.resource_name) == (
        "v1beta1",
        "x.0123abcd.sock",
        "vendor.example/gpu",
    )


def test_the_kubelet_gets_more_time_than_its_dial_back_may_take(
    tmp_path: Path, serve: Serve
) -> None:
    left: list[float] = []

    def answer(_: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.Empty:
        left.append(context.time_remaining() or 0)
        return pb.Empty()

    serve(answer)
    assert register(tmp_path) is None
    assert left[0] > 15


def test_a_refusal_is_passed_on_in_the_kubelets_words(tmp_path: Path, serve: Serve) -> None:
    def answer(_: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.Empty:
        context.abort(grpc.StatusCode.UNKNOWN, "the ResourceName is invalid")

    serve(answer)
    assert register(tmp_path) == "the kubelet refused: the ResourceName is invalid"


def test_a_socket_that_nobody_serves_is_said(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "kubelet.sock"))
    assert register(tmp_path) == "kubelet.sock does not answer (Connection refused)"


def test_a_missing_socket_is_said(tmp_path: Path) -> None:
    assert register(tmp_path) == "kubelet.sock does not answer (No such file or directory)"


def test_a_call_that_is_given_up_does_not_answer(tmp_path: Path, serve: Serve) -> None:
    entered, leave = threading.Event(), threading.Event()

    def answer(_: pb.RegisterRequest, __: grpc.ServicerContext) -> pb.Empty:
        entered.set()
        leave.wait(10)
        return pb.Empty()

    serve(answer)
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    call = Registration(tmp_path, "x.sock", "vendor.example/gpu", answers.put)
    assert entered.wait(5)
    call.close()
    leave.set()
    assert answers.empty()


# --- kubelet.sock -------------------------------------------------------------------


def test_no_socket_is_none(tmp_path: Path) -> None:
    assert socket_id(tmp_path) is None
    (tmp_path / "kubelet.sock").write_text("a plain file")
    assert socket_id(tmp_path) is None


def test_a_socket_made_anew_is_another_one_and_a_chmod_is_not(tmp_path: Path) -> None:
    path = tmp_path / "kubelet.sock"
    with socket.socket(socket.AF_UNIX) as first:
        first.bind(str(path))
    before = socket_id(tmp_path)
    path.chmod(0o600)
    assert socket_id(tmp_path) == before
    path.unlink()
    with socket.socket(socket.AF_UNIX) as second:
        second.bind(str(path))
    os.utime(path, ns=(1, 1))  # as if made at another time: the inode number may be the same
    assert socket_id(tmp_path) != before


# --- the directory -------------------------------------------------------------------


class Changes:
    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __call__(self) -> None:
        self.queue.put(None)

    def expect(self) -> None:
        self.queue.get(timeout=5)

    def forget(self) -> None:
        while not self.queue.empty():
            self.queue.get()


@pytest.fixture
def changes() -> Changes:
    return Changes()


@pytest.fixture
def watch(tmp_path: Path, changes: Changes) -> Iterator[DirectoryWatch]:
    made = DirectoryWatch(tmp_path / "dir", changes)
    yield made
    made.stop()


def test_what_comes_and_goes_is_told_at_once(
    tmp_path: Path, watch: DirectoryWatch, changes: Changes
) -> None:
    directory = tmp_path / "dir"
    directory.mkdir()
    assert watch.ensure()
    (directory / "a").touch()
    changes.expect()
    changes.forget()
    (directory / "a").rename(directory / "b")
    changes.expect()
    changes.forget()
    (directory / "b").unlink()
    changes.expect()


def test_a_directory_that_is_not_there_yet_is_watched_when_it_is(
    tmp_path: Path, watch: DirectoryWatch, changes: Changes
) -> None:
    assert not watch.ensure()
    (tmp_path / "dir").mkdir()
    assert watch.ensure()
    assert not watch.ensure(), "it is watched already"
    (tmp_path / "dir/a").touch()
    changes.expect()


def test_a_directory_made_anew_is_watched_anew(
    tmp_path: Path, watch: DirectoryWatch, changes: Changes
) -> None:
    directory = tmp_path / "dir"
    directory.mkdir()
    watch.ensure()
    shutil.rmtree(directory)
    (tmp_path / "other").mkdir()  # takes the inode number, so that the new one is another
    directory.mkdir()
    watch.ensure()
    changes.forget()
    (directory / "a").touch()
    changes.expect()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOSPC])
def test_without_inotify_it_goes_on_without_a_watch(
    tmp_path: Path, watch: DirectoryWatch, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_inotify(_: object) -> None:
        raise OSError(code, os.strerror(code))

    (tmp_path / "dir").mkdir()
    monkeypatch.setattr(Observer, "start", no_inotify)
    assert not watch.ensure()
    monkeypatch.undo()
    assert watch.ensure()

"""One registered plugin as the kubelet sees it: a connection and its device stream.

The stream is read in a thread of its own and never opened again once it
ended, for whatever reason: the plugin has to register anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import grpc

from api.v1beta1 import api_pb2 as pb
from api.v1beta1.api_pb2_grpc import DevicePluginStub
from deviceplugin.sockets import answers

DIAL_TIMEOUT_S = 10.0
PRE_START_TIMEOUT_S = 30.0


class DialFailed(Exception):
    """The plugin could not be reached, or did not answer."""


class Plugin:
    """A plugin that was dialled back."""

    def __init__(self, resource: str, socket: Path) -> None:
        self.resource = resource
        self.options = pb.DevicePluginOptions()
        self._channel = grpc.insecure_channel(f"unix:{socket}")
        self.stub = DevicePluginStub(self._channel)
        self._socket = socket
        self._closed = False
        self._call: grpc._CallIterator[pb.ListAndWatchResponse] | None = None
        self._thread: threading.Thread | None = None

    def dial(self, deadline_s: float) -> None:
        """Connect and ask for the options, as the kubelet does inside Register.

        Args:
            deadline_s: what is left of the caller's time.

        Raises:
            DialFailed: nothing is registered then.
        """
        try:
            self.options = self._ask_options(deadline_s)
        except (grpc.RpcError, grpc.FutureTimeoutError, ValueError) as error:
            if self._closed:  # which a ValueError tells, too
                raise DialFailed("the kubelet is killed") from error
            self.close()
            if isinstance(error, grpc.RpcError):
                text = f"failed to get device plugin options: {describe(error)}"
            else:
                text = "failed to dial device plugin: context deadline exceeded"
            raise DialFailed(text) from error

    def _ask_options(self, deadline_s: float) -> pb.DevicePluginOptions:
        """FutureTimeoutError: nobody listens."""
        call = self.stub.GetDevicePluginOptions.future(
            pb.Empty(), timeout=deadline_s, wait_for_ready=True
        )
        try:
            return call.result(min(DIAL_TIMEOUT_S, deadline_s))
        except (grpc.FutureTimeoutError, grpc.RpcError) as error:
            late = isinstance(error, grpc.FutureTimeoutError) or (
                error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            )
            if not late:
                raise
            if not answers(self._socket):
                raise grpc.FutureTimeoutError from error
        return call.result()

    def watch(
        self,
        on_list: Callable[[list[pb.Device]], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Open ListAndWatch.

        Args:
            on_end: called once, with the reason; both come from the stream's thread.
        """
        self._call = call = self.stub.ListAndWatch(pb.Empty())

        def read() -> None:
            why = "the plugin ended it"
            try:
                for message in call:
                    on_list(list(message.devices))
            except grpc.RpcError as error:
                why = describe(error)
            on_end(why)

        self._thread = threading.Thread(target=read, name=f"kubelet {self.resource}")
        self._thread.start()

    def drop_stream(self) -> None:
        """Cancel ListAndWatch and keep the connection."""
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        """Disconnect. Ends the stream, if there is one, and a dial in progress."""
        self._closed = True
        self.drop_stream()
        self._channel.close()

    def join(self) -> None:
        """Wait until the stream's thread has ended, unless called from it."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def describe(error: BaseException) -> str:
    """As Go prints it: "rpc error: code = Unknown desc = …"."""
    if not isinstance(error, grpc.Call):
        return str(error)
    words = error.code().name.lower().split("_")
    return f"rpc error: code = {''.join(map(str.capitalize, words))} desc = {error.details()}"

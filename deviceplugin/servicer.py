"""The five calls that the kubelet makes. Thin: each reads a snapshot and answers.

Never touches the driver, a file or another process: pod admission on the node
is serial, and a call that hangs blocks every pod. One servicer belongs to one
incarnation of the server.

A ListAndWatch stream holds a worker thread as long as it is open. It keeps
its own place in the store, so a dead one takes nothing from a live one; the
end of the call wakes its thread, which would otherwise wait for a change
that may never come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

import grpc

from api.v1beta1 import api_pb2 as pb
from api.v1beta1.api_pb2_grpc import DevicePluginServicer
from deviceplugin import allocation, logs, wire
from deviceplugin.errors import DeviceUnhealthy, RequestError
from deviceplugin.stats import Stats
from deviceplugin.store import Store

_T = TypeVar("_T")

MAX_STREAMS = 16
"""Streams beyond this are refused: a thread is always left for the other calls."""

WORKERS = MAX_STREAMS + 8

_log = logs.get("servicer")


class Servicer(DevicePluginServicer):
    """Serves one resource from the store."""

    def __init__(
        self,
        store: Store,
        stats: Stats,
        on_streams: Callable[[int], None] = lambda _: None,
        *,
        check_before_start: bool = False,
    ) -> None:
        """
        Args:
            check_before_start: refuse to start a container on a GPU that is not healthy.
            on_streams: told the number of open streams whenever it changes, in
                order; from any thread, so it must only pass it on.
        """
        self._store = store
        self._stats = stats
        self._on_streams = on_streams
        self._check_before_start = check_before_start
        self._lock = threading.Lock()
        self._streams = 0

    def GetDevicePluginOptions(
        self, request: pb.Empty, context: grpc.ServicerContext
    ) -> pb.DevicePluginOptions:
        return self._answer(
            "GetDevicePluginOptions",
            context,
            lambda: wire.options(pre_start=self._check_before_start),
        )

    def ListAndWatch(
        self, request: pb.Empty, context: grpc.ServicerContext
    ) -> Iterator[pb.ListAndWatchResponse]:
        ended = threading.Event()

        def end() -> None:
            ended.set()
            self._count_streams(-1)
            self._store.wake()

        if self._count_streams(+1) > MAX_STREAMS:
            self._count_streams(-1)
            self._stats.add("rpc", "ListAndWatch", "RESOURCE_EXHAUSTED")
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_STREAMS} streams are open already"
            )
        if not context.add_callback(end):
            self._count_streams(-1)
            return
        self._stats.add("rpc", "ListAndWatch", "OK")
        sent = None
        generation = -1
        while True:
            snapshot = self._store.wait_newer(generation, ended.is_set)
            if snapshot is None:
                return
            generation = snapshot.generation
            if snapshot.devices == sent:
                continue
            sent = snapshot.devices
            self._stats.add("list_updates")
            yield wire.device_list(sent)

    def GetPreferredAllocation(
        self, request: pb.PreferredAllocationRequest, context: grpc.ServicerContext
    ) -> pb.PreferredAllocationResponse:
        def prefer() -> pb.PreferredAllocationResponse:
            snapshot = self._store.snapshot
            response = pb.PreferredAllocationResponse()
            for container in request.container_requests:
                response.container_responses.add(
                    deviceIDs=allocation.prefer(
                        snapshot,
                        container.available_deviceIDs,
                        container.must_include_deviceIDs,
                        container.allocation_size,
                    )
                )
            return response

        return self._answer("GetPreferredAllocation", context, prefer)

    def Allocate(
        self, request: pb.AllocateRequest, context: grpc.ServicerContext
    ) -> pb.AllocateResponse:
        def allocate() -> pb.AllocateResponse:
            if not request.container_requests:
                raise RequestError("no container is named: ask for at least one")
            snapshot = self._store.snapshot
            plans = [
                allocation.plan(snapshot, container.devices_ids)
                for container in request.container_requests
            ]
            for plan in plans:
                _log.info("allocated", devices=",".join(device.id for device in plan.devices))
            return pb.AllocateResponse(
                container_responses=[wire.container_response(plan) for plan in plans]
            )

        return self._answer("Allocate", context, allocate)

    def PreStartContainer(
        self, request: pb.PreStartContainerRequest, context: grpc.ServicerContext
    ) -> pb.PreStartContainerResponse:
        def check() -> pb.PreStartContainerResponse:
            if self._check_before_start:
                allocation.plan(self._store.snapshot, request.devices_ids)
            return pb.PreStartContainerResponse()

        return self._answer("PreStartContainer", context, check)

    # --- the rest -------------------------------------------------------------------

    def _count_streams(self, change: int) -> int:
        with self._lock:
            self._streams += change
            self._stats.set("list_and_watch_streams", to=self._streams)
            self._on_streams(self._streams)
            return self._streams

    def _answer(self, method: str, context: grpc.ServicerContext, act: Callable[[], _T]) -> _T:
        try:
            response = act()
        except RequestError as error:
            self._refuse(method, context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except DeviceUnhealthy as error:
            self._refuse(method, context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except Exception as error:  # noqa: BLE001  # the kubelet is owed an answer whatever happens
            _log.error("call failed by a fault of ours", cause=error, method=method)
            self._stats.add("rpc", method, "INTERNAL")
            context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__} in the device plugin")
        self._stats.add("rpc", method, "OK")
        return response

    def _refuse(
        self, method: str, context: grpc.ServicerContext, code: grpc.StatusCode, text: str
    ) -> NoReturn:
        _log.warning("request refused", method=method, code=code.name, why=text)
        self._stats.add("rpc", method, code.name)
        context.abort(code, text)

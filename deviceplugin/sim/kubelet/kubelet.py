"""The embedded kubelet: registration, device streams, admission, restarts, on real sockets.

Behaves as the kubelet of Kubernetes 1.36 does towards a device plugin, bug for
bug: it wipes sockets at start, dials back inside Register, never opens an
ended stream again, and disconnects whatever is registered under a name when
any stream of that name ends. ``fault`` makes Register misbehave.

Two locks: ``admit`` holds one for a whole admission, which is serial; the
books (``Devices``) have their own, held for moments, so that lists arrive
while an admission waits for the plugin.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

import grpc

from api.podresources.v1.api_pb2_grpc import add_PodResourcesListerServicer_to_server
from api.v1beta1 import api_pb2 as pb
from api.v1beta1.api_pb2_grpc import RegistrationServicer, add_RegistrationServicer_to_server
from deviceplugin.sim.kubelet import checkpoint
from deviceplugin.sim.kubelet.admission import Admitter, Aligner, no_alignment
from deviceplugin.sim.kubelet.devices import Devices
from deviceplugin.sim.kubelet.names import is_extended_resource
from deviceplugin.sim.kubelet.plugin import DialFailed, Plugin
from deviceplugin.sim.kubelet.podresources import PodResources
from deviceplugin.sim.kubelet.sockets import LinkedServer
from deviceplugin.sim.kubelet.values import Admission, Container, Event, Fault, Grant, Pod

SOCKET = "kubelet.sock"
API_VERSION = "v1beta1"
DEFAULT_DEADLINE_S = 3600.0


class Kubelet:
    """A kubelet on a directory. Not started by construction; a context manager."""

    def __init__(
        self,
        directory: Path,
        *,
        pod_resources_dir: Path | None = None,
        align: Aligner = no_alignment,
    ) -> None:
        """
        Args:
            directory: the device-plugin directory; made if absent.
            pod_resources_dir: serves pod-resources there; None: not at all.
        """
        self.directory = directory
        self.pod_resources_dir = pod_resources_dir
        self.fault = Fault.NONE
        self.refusal = "refused on purpose"
        self.events: list[Event] = []
        self._devices = Devices()
        self._plugins: dict[str, Plugin] = {}
        self._old_plugins: list[Plugin] = []
        self._pods: dict[str, Pod] = {}
        self._admitter = Admitter(self._devices, self._registered, align)
        self._admission = threading.Lock()
        self._server: LinkedServer | None = None
        self._pod_resources: LinkedServer | None = None
        self._dying: threading.Thread | None = None
        self._alive = False
        self._dialling: set[Plugin] = set()

    # --- starting and stopping ----------------------------------------------------------

    def start(self) -> None:
        """Wipe the directory's sockets, read the checkpoint, make kubelet.sock."""
        self.directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        for path in list(self.directory.iterdir()):  # one listing, taken up front
            if path.is_socket():
                path.unlink(missing_ok=True)
        self._devices.clear()
        self._alive = True
        checkpoint.read(self.directory, self._devices)
        self._server = LinkedServer(
            self.directory / SOCKET,
            lambda server: add_RegistrationServicer_to_server(
                _Registration(self._register), server
            ),
        )
        if self.pod_resources_dir is not None:
            self.pod_resources_dir.mkdir(parents=True, exist_ok=True)
            servicer = PodResources(self._devices, lambda: list(self._pods.values()))
            self._pod_resources = LinkedServer(
                self.pod_resources_dir / SOCKET,
                lambda server: add_PodResourcesListerServicer_to_server(servicer, server),
            )
        self._note("started")

    def stop(self) -> None:
        """As killed: connections end, files stay, kubelet.sock refuses."""
        self._alive = False
        for plugin in tuple(self._dialling):
            plugin.close()
        for server in (self._server, self._pod_resources):
            if server is not None:
                server.close()
        self._server = self._pod_resources = None
        with self._devices.lock:
            plugins = [*self._plugins.values(), *self._old_plugins]
            self._plugins.clear()
            self._old_plugins.clear()
        for plugin in plugins:
            plugin.close()
        for plugin in plugins:
            plugin.join()
        dying, self._dying = self._dying, None
        if dying is not None and dying is not threading.current_thread():
            dying.join()
        self._note("stopped")

    def restart(self, *, downtime_s: float = 0.0) -> None:
        """Stop, stay down for a while, start."""
        self.stop()
        time.sleep(downtime_s)
        self.start()

    def remove_socket(self) -> None:
        """Delete kubelet.sock; the kubelet lives on."""
        (self.directory / SOCKET).unlink(missing_ok=True)

    def remove_directory(self) -> None:
        """Delete the whole device-plugin directory."""
        shutil.rmtree(self.directory)

    def __enter__(self) -> Kubelet:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    # --- what it knows --------------------------------------------------------------------

    @property
    def crashes(self) -> list[str]:
        """What would have crashed the real kubelet."""
        return self._devices.crashes

    def capacity(self, resource: str) -> int:
        """Devices that the node has, as in Node status."""
        return self._devices.capacity(resource, time.monotonic())

    def allocatable(self, resource: str) -> int:
        """Devices that can be given out, as in Node status; held ones count."""
        return self._devices.allocatable(resource)

    def devices(self, resource: str) -> Mapping[str, pb.Device]:
        """The list last received, by id."""
        return self._devices.listed(resource)

    def registered(self, resource: str) -> bool:
        """Whether a plugin is connected under this name."""
        return self._registered(resource) is not None

    @property
    def register_calls(self) -> int:
        """How often Register was called, over all incarnations."""
        return len(self.happened("register"))

    def pods(self) -> tuple[Pod, ...]:
        """Those that were admitted and not removed."""
        return tuple(self._pods.values())

    def wait_for(self, good: Callable[[], bool], timeout_s: float = 10.0) -> bool:
        """Wait until something that this kubelet knows has come true."""
        with self._devices.lock:
            return self._devices.lock.wait_for(good, timeout_s)

    def wait_allocatable(self, resource: str, count: int, timeout_s: float = 10.0) -> bool:
        """Wait until so many devices can be given out."""
        return self.wait_for(lambda: self.allocatable(resource) == count, timeout_s)

    def happened(self, kind: str, resource: str = "") -> list[Event]:
        """The events of one kind, and of one resource if it is given."""
        return [e for e in list(self.events) if e.kind == kind and resource in ("", e.resource)]

    # --- pods -------------------------------------------------------------------------------

    def admit(self, pod: Pod) -> Admission:
        """Admit a pod, or refuse it. One at a time, as in the kubelet."""
        with self._admission:
            admission = self._admitter.admit(pod)
            if admission.admitted:
                self._pods[pod.uid] = pod
            checkpoint.write(self.directory, self._devices)
            return admission

    def remove(self, pod: Pod) -> None:
        """A pod is gone; its devices are free."""
        with self._admission:
            self._pods.pop(pod.uid, None)
            self._admitter.forget(pod.uid)
            checkpoint.write(self.directory, self._devices)

    def restart_container(self, pod: Pod, container: Container) -> tuple[Grant, ...]:
        """Restart in place: the plugin's former answer is used again."""
        with self._admission:
            return self._admitter.restart(pod, container)

    # --- faults -----------------------------------------------------------------------------

    def drop_stream(self, resource: str) -> None:
        """End the device stream as if the connection had broken."""
        plugin = self._registered(resource)
        if plugin is not None:
            plugin.drop_stream()

    @contextlib.contextmanager
    def misbehaving(self, fault: Fault) -> Iterator[None]:
        """Have Register misbehave for a while."""
        self.fault = fault
        try:
            yield
        finally:
            self.fault = Fault.NONE

    # --- Register -----------------------------------------------------------------------------

    def _registered(self, resource: str) -> Plugin | None:
        with self._devices.lock:
            return self._plugins.get(resource)

    def _register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.Empty:
        self._note("register", request.resource_name, request.endpoint)
        match self.fault:
            case Fault.REFUSE:
                self._refuse(request, context, self.refusal)
            case Fault.HANG:
                return self._never_answer(context)
            case Fault.DIE:
                self._dying = threading.Thread(target=self.stop, name="kubelet dies")
                self._dying.start()
                return self._never_answer(context)
            case Fault.NO_DIAL_BACK:
                return pb.Empty()
            case Fault.NONE | Fault.NO_STREAM:
                pass
        if request.version != API_VERSION:
            self._refuse(
                request,
                context,
                f'requested API version "{request.version}" is not supported by kubelet.'
                f' Supported version is "{API_VERSION}"',
            )
        if not is_extended_resource(request.resource_name):
            self._refuse(request, context, f'the ResourceName "{request.resource_name}" is invalid')
        deadline_s = context.time_remaining() or DEFAULT_DEADLINE_S
        plugin = Plugin(request.resource_name, self.directory / request.endpoint)
        self._dialling.add(plugin)
        if not self._alive:
            plugin.close()
        try:
            plugin.dial(deadline_s)
        except DialFailed as error:
            self._refuse(request, context, str(error))
        finally:
            self._dialling.discard(plugin)
        self._connect(plugin)
        return pb.Empty()

    def _refuse(
        self, request: pb.RegisterRequest, context: grpc.ServicerContext, text: str
    ) -> None:
        self._note("refused", request.resource_name, text)
        context.abort(grpc.StatusCode.UNKNOWN, text)

    def _connect(self, plugin: Plugin) -> None:
        """Take a dialled plugin under its name; the former one's stream lives on."""
        resource = plugin.resource
        with self._devices.lock:
            former = self._plugins.pop(resource, None)
            if former is not None:
                self._old_plugins.append(former)
            self._plugins[resource] = plugin
        self._devices.add(resource)
        self._note("registered", resource)
        if self.fault is Fault.NO_STREAM:
            return
        plugin.watch(
            lambda devices: self._list_came(resource, devices),
            lambda why: self._stream_ended(resource, why),
        )

    def _list_came(self, resource: str, devices: list[pb.Device]) -> None:
        crashes = len(self.crashes)
        self._devices.update(resource, devices)
        healthy = sum(device.health == "Healthy" for device in devices)
        self._note("list", resource, f"{healthy} of {len(devices)} healthy")
        for crash in self.crashes[crashes:]:
            self._note("crash", resource, crash)
        checkpoint.write(self.directory, self._devices)

    def _stream_ended(self, resource: str, why: str) -> None:
        """The race of the real kubelet: the plugin is looked up by its name, so
        the end of an old stream disconnects a newer registration."""
        with self._devices.lock:
            current = self._plugins.pop(resource, None)
            if current is not None:
                self._old_plugins.append(current)
        self._devices.stop(resource, time.monotonic())
        self._note("stream ended", resource, why)
        if current is not None:
            current.close()

    def _note(self, kind: str, resource: str = "", detail: str = "") -> None:
        with self._devices.lock:
            self.events.append(Event(kind, time.monotonic(), resource, detail))
            self._devices.lock.notify_all()

    @staticmethod
    def _never_answer(context: grpc.ServicerContext) -> pb.Empty:
        """Until the caller gives up or this kubelet's server is closed."""
        ended = threading.Event()
        if context.add_callback(ended.set):
            ended.wait()
        return pb.Empty()


class _Registration(RegistrationServicer):
    def __init__(
        self, register: Callable[[pb.RegisterRequest, grpc.ServicerContext], pb.Empty]
    ) -> None:
        self._register = register

    def Register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.Empty:
        return self._register(request, context)

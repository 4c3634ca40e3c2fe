"""An embedded kubelet that speaks the device-plugin protocol on real sockets.

    with Kubelet(directory) as kubelet:
        kubelet.wait_allocatable("vendor.example/gpu", 8)
        kubelet.admit(Pod("train", (Container("main", {"vendor.example/gpu": 2}),)))

It powers the demo, the tests and the benchmarks; see ``kubelet`` for what it
imitates.
"""

from deviceplugin.sim.kubelet.kubelet import Kubelet
from deviceplugin.sim.kubelet.values import Admission, Container, Event, Fault, Grant, Pod

__all__ = ["Admission", "Container", "Event", "Fault", "Grant", "Kubelet", "Pod"]

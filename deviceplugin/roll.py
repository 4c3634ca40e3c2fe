"""The roll of this node's devices, beyond what the driver lists now.

A device that the kubelet may hold for a pod has to stay in the list, or the
kubelet crashes; a GPU that is missing after a reboot is an alert, not the new
normal. Three sources say what belongs on the roll: our own memory, the
kubelet for devices that pods hold, and, where our memory was lost, the
kubelet's checkpoint for GPUs that it last knew.
"""

from __future__ import annotations

from deviceplugin import inventory, logs
from deviceplugin.clock import Clock
from deviceplugin.holders import Holders
from deviceplugin.memory import Memory
from deviceplugin.model import GpuId, Inventory
from deviceplugin.statefile import Recall

_log = logs.get("roll")


class Roll:
    """Used by one thread."""

    def __init__(self, memory: Memory, holders: Holders, clock: Clock) -> None:
        self._memory = memory
        self._clock = clock
        self.holders = holders
        self._held_only: set[GpuId] = set()
        """Devices of which nothing is known but that a pod holds them."""

    def recall(self) -> Inventory | None:
        """What belongs on the roll before the first scan; nothing of it is present."""
        remembered = self._memory.recall()
        known = {gpu.id for gpu in remembered.gpus}
        named = {GpuId(name) for name in self.holders.held() or ()}
        self._held_only = named - known
        if remembered.how is Recall.LOST:
            registered = self.holders.registered() or ()
            lost = {GpuId(name) for name in registered if inventory.is_whole(name)}
            self._held_only -= lost
            named |= lost
        if remembered.how is not Recall.NOTHING:
            _log.info("GPUs remembered", gpus=len(known), how=remembered.how.value)
        return inventory.recall(remembered.gpus, named, self._clock.boottime())

    def settle(self, merged: Inventory) -> Inventory:
        """After a scan: without what was on the roll only because a pod held it,
        once none does."""
        self._held_only -= {gpu.id for gpu in merged.gpus if gpu.present}
        if not self._held_only or (held := self.holders.held()) is None:
            return merged
        for gpu in [gpu for gpu in self._held_only if gpu not in held]:
            merged = inventory.forget(merged, gpu)
            self._held_only.discard(gpu)
            _log.info("device released, not listed any more", gpu=gpu)
        return merged

    def save(self, merged: Inventory) -> bool:
        """Remember what was found; never raises. Whether it is remembered now."""
        return self._memory.save(gpu for gpu in merged.gpus if gpu.id not in self._held_only)

    def why_not_forget(self, known: Inventory | None, name: str) -> str | None:
        """Why a device cannot be forgotten, in words; None when it can."""
        gpus = known.gpus if known is not None else ()
        gpu = next((gpu for gpu in gpus if gpu.id == name), None)
        if gpu is None:
            return f"{name} is not listed here; 'deviceplugin status' shows what is"
        if gpu.maintenance is not None:
            return f"{name} is in maintenance: end that first, then it shows whether it is there"
        if gpu.present:
            return f"{name} is there: only a device that is absent can be forgotten"
        held = self.holders.held(named=True)
        if held is None:
            return "the kubelet does not say what pods hold, so one may hold it: try again"
        if name in held:
            return f"{name} is held by {held[name]}: delete that pod first"
        return None

"""Watches the GPUs: one thread that asks the driver and tells the keeper.

The only user of ``Hardware``. It scans, waits for events and polls. When the
driver as a whole fails it closes it, says why, and tries again with back-off;
what was published stays published meanwhile. What operators want (forget a
device, maintenance) is done in this thread, too, between two calls.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from deviceplugin import logs
from deviceplugin.clock import Clock
from deviceplugin.config import Settings
from deviceplugin.errors import HardwareError, Interrupted
from deviceplugin.hardware import Hardware
from deviceplugin.health import Policy as HealthPolicy
from deviceplugin.keeper import Keeper
from deviceplugin.model import Fault
from deviceplugin.stats import Stats

if TYPE_CHECKING:
    from deviceplugin.hardware.kmsg import KernelLog

WAIT_S = 2.0
"""The longest single wait for events; a stop ends it early."""
RESCAN_S = 60.0
REOPEN_POLLS = 6
REOPEN_POLLS_MAX = 48
"""While a GPU is silent or unreadable the driver is opened anew after so many
polls: within one session NVML never takes back that a GPU is lost. Each time
in vain doubles the number, since opening is costly where no persistence daemon
runs."""
BACK_OFF_FIRST_S = 1.0
BACK_OFF_MAX_S = 30.0
ORDER_TIMEOUT_S = 4.0

_log = logs.get("monitor")


@dataclass(frozen=True, slots=True)
class Policy:
    """What can be set.

    Attributes:
        poll_interval_s: between two looks at each GPU.
        lost_after_s: how long the driver may be silent before monitoring counts as lost.
        lost_is_unhealthy: whether the GPUs are then withdrawn.
        health: what is made of what is heard.
    """

    poll_interval_s: float
    lost_after_s: float = 120.0
    lost_is_unhealthy: bool = False
    health: HealthPolicy = field(default_factory=HealthPolicy)

    @staticmethod
    def of(settings: Settings) -> Policy:
        """What the settings say."""
        return Policy(
            poll_interval_s=settings.poll_interval_s,
            lost_after_s=settings.monitoring_lost_after_s,
            lost_is_unhealthy=settings.on_monitoring_lost == "unhealthy",
            health=HealthPolicy.of(settings),
        )


class Monitor:
    """Runs in a thread of its own until ``stop``."""

    def __init__(
        self,
        hardware: Hardware,
        keeper: Keeper,
        stats: Stats,
        clock: Clock,
        policy: Policy,
        on_crash: Callable[[BaseException], None],
        kernel_log: KernelLog | None = None,
    ) -> None:
        """
        Args:
            kernel_log: a second source of Xids; None: there is none.
            on_crash: called when the thread ends by a fault of ours.
        """
        self._policy = policy
        self._hardware = hardware
        self._keeper = keeper
        self._stats = stats
        self._clock = clock
        self._on_crash = on_crash
        self._kernel_log = kernel_log
        self._stop = threading.Event()
        self._orders: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]]
        self._orders = queue.SimpleQueue()
        self._called = threading.Event()
        self._begin_anew = False
        # A daemon thread: a driver call that hangs must not keep the process.
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._in_driver = False
        self._beat_s = self._heard_s = clock.monotonic()
        self._lost = False

    @property
    def policy(self) -> Policy:
        """May be replaced at any time, from any thread."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy
        self._orders.put((self._rejudge, Future()))
        self._called.set()
        self._hardware.wake()

    def start(self) -> None:
        """Begin."""
        self._stats.set("monitoring_lost", to=0)
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; ``join`` waits for it."""
        self._stop.set()
        self._called.set()
        self._hardware.interrupt()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended, the driver closed."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def trouble(self) -> str | None:
        """What is wrong with this thread, for the liveness probe. A driver call
        that takes its time is the driver's affair and no reason to be killed."""
        if not self._thread.is_alive():
            return "the monitor thread is dead"
        age_s = self._clock.monotonic() - self._beat_s
        if age_s > BACK_OFF_MAX_S and not self._in_driver:
            return f"the monitor thread has been stuck for {age_s:.0f} s"
        return None

    # --- what is asked, from any thread -----------------------------------------------

    def forget(self, name: str) -> dict[str, Any]:
        """Drop an absent device from the list.

        Returns:
            "refused": why not, in words; None when it is forgotten.
        """
        return self._order(
            lambda: {"refused": self._keeper.forget(name)}, end_call=self._hardware.wake
        )

    def maintain(self, names: Sequence[str], reason: str | None) -> dict[str, Any]:
        """Withdraw GPUs and let go of them, or give them back; see ``Keeper.maintain``.

        Whatever call is in progress is given up: an operator turns to maintenance
        just when the driver hangs.

        Returns:
            The fields of ``Maintained``, and "let_go": nothing of ours is open any more.
        """

        def act() -> dict[str, Any]:
            let_go = self._hardware.close()
            done = self._keeper.maintain(names, reason)
            self._begin_anew = True
            return {**asdict(done), "let_go": let_go}

        return self._order(act, end_call=self._hardware.interrupt)

    def say(
        self, names: Sequence[str], healthy: bool | None, reason: str, for_s: float | None
    ) -> dict[str, Any]:
        """An operator's word; see ``Keeper.say``.

        Returns:
            The fields of ``Maintained``.
        """
        return self._order(
            lambda: asdict(self._keeper.say(names, healthy, reason, for_s)),
            end_call=self._hardware.wake,
        )

    def _order(
        self, act: Callable[[], dict[str, Any]], end_call: Callable[[], None]
    ) -> dict[str, Any]:
        done: Future[dict[str, Any]] = Future()
        self._orders.put((act, done))
        self._called.set()
        end_call()
        try:
            return done.result(ORDER_TIMEOUT_S)
        except TimeoutError:
            if not done.cancel():
                return done.result()  # it began just now
            return {"refused": ["the driver keeps the plugin waiting: try again in a minute"]}

    def _rejudge(self) -> dict[str, Any]:
        self._keeper.adopt(self._policy.health)
        return {}

    # --- the thread -----------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        try:
            self._keeper.recall()
            while not self._stop.is_set():
                self._beat(in_driver=True)
                started_s = self._clock.monotonic()
                try:
                    self._session()
                    self._hardware.close()
                except Interrupted:
                    self._hardware.close()
                    self._obey()
                except HardwareError as error:
                    if self._clock.monotonic() - started_s > BACK_OFF_MAX_S:
                        failures = 0
                    self._back_off(Fault(error.code, str(error)), failures)
                    failures += 1
            self._beat(in_driver=True)
            self._hardware.close()
        except BaseException as error:  # noqa: BLE001  # a thread that dies must be heard of
            self._on_crash(error)
        finally:
            if self._kernel_log is not None:
                self._kernel_log.close()

    def _beat(self, *, in_driver: bool) -> None:
        self._beat_s = self._clock.monotonic()
        self._in_driver = in_driver

    def _back_off(self, trouble: Fault, failures: int) -> None:
        """Let go of the driver and wait before the next try."""
        self._hardware.close()
        if self._stop.is_set():
            return
        self._count_errors()
        wait_s = min(BACK_OFF_MAX_S, BACK_OFF_FIRST_S * 2.0 ** min(failures, 16))
        self._keeper.trouble(trouble, wait_s)
        deadline_s = self._clock.monotonic() + wait_s
        while not self._stop.is_set():
            self._beat(in_driver=False)
            lost_in_s = self._check_lost(trouble)
            left_s = deadline_s - self._clock.monotonic()
            if left_s <= 0:
                return
            self._called.wait(min(left_s, lost_in_s))
            self._obey()
            if self._begin_anew:
                return

    def _session(self) -> None:
        """From a scan to the stop, or to the driver's failure, or until all begins anew."""
        self._begin_anew = False
        if self._keeper.addresses() == ():
            self._rest()
            return
        self._scan()
        now_s = self._clock.monotonic()
        poll_due_s, rescan_due_s = now_s, now_s + RESCAN_S
        silent_polls, reopen_polls = 0, REOPEN_POLLS
        while not self._stop.is_set():
            self._beat(in_driver=True)
            asked_s = self._clock.monotonic()
            wait_s = max(0.001, min(WAIT_S, poll_due_s - asked_s, self._keeper.due_in_s()))
            events = self._hardware.wait(wait_s)
            now_s = self._clock.monotonic()
            if events:
                if self._keeper.events(events):
                    poll_due_s = now_s
            elif self._keeper.due_in_s() <= 0:
                self._keeper.tick()
            elif now_s - asked_s < wait_s - 0.005:
                poll_due_s = now_s  # an early return without events: look
            if self._kernel_log is not None and (logged := self._kernel_log.read()):
                self._keeper.logged(logged)
            self._obey()
            if self._begin_anew:
                return
            if now_s >= poll_due_s:
                if self._keeper.read(self._hardware.read()):
                    silent_polls, reopen_polls = 0, REOPEN_POLLS
                else:
                    silent_polls += 1
                poll_due_s = now_s + self.policy.poll_interval_s
            if now_s >= rescan_due_s or silent_polls >= reopen_polls:
                if silent_polls >= reopen_polls:
                    self._hardware.close()
                    silent_polls, reopen_polls = 0, min(2 * reopen_polls, REOPEN_POLLS_MAX)
                self._scan()
                rescan_due_s = now_s + RESCAN_S
            self._count_errors()
            self._heard()

    def _scan(self) -> None:
        self._keeper.scanned(self._hardware.scan(self._keeper.addresses()))
        self._heard()

    def _rest(self) -> None:
        """Every GPU is in maintenance: the driver is left alone."""
        self._keeper.left_alone()
        while not (self._stop.is_set() or self._begin_anew):
            self._heard()
            self._beat(in_driver=False)
            self._called.wait(WAIT_S)
            self._obey()

    def _count_errors(self) -> None:
        for error in self._hardware.errors():
            self._stats.add("driver_errors", error.call, error.code)

    def _obey(self) -> None:
        """Do what other threads asked for."""
        self._called.clear()
        while not self._orders.empty():
            act, done = self._orders.get()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(act())
            except BaseException as error:
                done.set_exception(error)
                raise

    # --- monitoring that is lost ------------------------------------------------------

    def _heard(self) -> None:
        """The driver has answered, or is left alone on purpose."""
        self._heard_s = self._clock.monotonic()
        self._stats.set("monitor_last_success_timestamp_seconds", to=self._clock.time())
        if self._lost:
            self._lost = False
            self._stats.set("monitoring_lost", to=0)
            _log.info("monitoring is back")

    def _check_lost(self, trouble: Fault) -> float:
        """See whether the driver has been silent for too long; when to look again, in
        seconds. Asked between two tries: one that hangs may delay it."""
        policy = self.policy
        silent_s = self._clock.monotonic() - self._heard_s
        if silent_s < policy.lost_after_s:
            return policy.lost_after_s - silent_s
        if not self._lost and self._keeper.known is not None:
            self._lost = True
            self._stats.set("monitoring_lost", to=1)
            _log.error(
                "monitoring lost: nothing is heard of the GPUs",
                for_s=round(silent_s),
                offered=not policy.lost_is_unhealthy,
                why=trouble.detail,
            )
        if self._lost and policy.lost_is_unhealthy:
            self._keeper.silence(f"the driver cannot be asked: {trouble.detail}")
        return BACK_OFF_MAX_S

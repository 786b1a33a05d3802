"""No engine's step waits for long for an LMCache server, and what it did not answer counts as failed.

A worker that copies KV itself (engine-driven, synchronous) asks the server twice for each store and for each load, and
waits for each answer in the step; so does the scheduler for its lookups. A wait ends when the server does not answer a
ping either. The server never touches the engine's blocks in this mode: none of them has to be kept from anybody.

Source: LMCache PR#5047, #4516, PR#4517, #4759.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

MODULE = "lmcache.integration.vllm.vllm_multi_process_adapter"
WORKER = f"{MODULE}:LMCacheMPWorkerAdapter"
SCHEDULER = f"{MODULE}:LMCacheMPSchedulerAdapter"
SHARED = "lmcache.v1.multiprocess.transfer_context.shm:EngineDrivenContextShm"

PAUSE_SECONDS = 0.5
"""How long an answer may take before the server is pinged, and the ping's: a step waits twice that for a dead one."""

PING_SECONDS = 5.0
"""Longest time for a heartbeat's ping: the next one to a server that died under it is to be answered within 10 s."""

BACK_SECONDS = 2.0
"""Longest time for a ping to a server that is lost."""

UNANSWERED = 60
"""So many messages without an answer may wait in the queue to a lost server; then the heartbeat's own interval is kept.

The queue has room for 1,000, and LMCache's thread that sends blocks when it is full: a shutdown would wait for it.
"""

FORGOTTEN_SECONDS = 20.0
"""How long a worker may be silent, and its server surely knows it still: LMCache's own limit is 30 s or more."""

_ALLOWANCE = "_livepatch_allowance"
"""Attribute of an adapter: the seconds that steps may still wait for a server that lives, and when that was so.

Time without such waits restores it, so that the waits of one step, or of step after step, do not add up.
"""

_PINGS = "_livepatch_pings"
"""Attribute of a heartbeat: its `Pings`."""

_LOST = "_livepatch_lost"
"""Attribute of a worker's adapter: how often it took its server for gone in a step."""

_LATE = "_livepatch_late"
"""Attribute of a worker's adapter: the last two `Late` stores. Of a server that died, no answer ever comes."""


class Asking(threading.local):
    """Whose call this thread is in, if it is a step's, what it asked for last, and whether something got no answer."""

    adapter: Any = None
    last: Any = None
    sent: list[Any] | None = None  # what a heartbeat sends in this thread
    unanswered = False
    late: Late | None = None  # what is being stored, though there is no room for it yet


class Late:
    """A store over shared memory for which the server may make room yet, once it goes on: what it makes room for is
    read by others some day, filled or not. It has that room for as long as the worker is heard of.
    """

    def __init__(self, answer: Any, context: Any) -> None:
        self.answer = answer
        self.context = context
        self.heard = clock()  # when the worker last sent something, after what it asked for
        self.over = False  # filled, or not to be filled any more
        self.stored: tuple[Any, ...] = ()  # the key, and the worker's number
        self.chunks: list[Any] = []

    def end(self) -> tuple[Any, list[Any]]:
        """What it keeps, once: a mapping of the server's pool, and what is to be stored."""
        kept = self.context, self.chunks
        self.over, self.context, self.chunks = True, None, []
        return kept

    def fill(self) -> None:
        context, chunks = self.end()
        room = self.answer.result().context
        if room["slots"]:  # else the server has it all
            for slot, index in zip(context._build_slot_tensors(room["slots"]), room["chunk_indices"], strict=True):
                slot.copy_(chunks[index])
            context.mq_timeout = BACK_SECONDS
            context.commit_store(*self.stored, [])


class Pings:
    """What a heartbeat knows of its server: the interval that it was made with, in seconds, and what got no answer.

    Of a server that was stopped, or came back, an answer to one of these is a reason to ping it at once, and no more
    than that: it says nothing of what came after it was sent.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.unanswered: list[Any] = []  # no more than `UNANSWERED`

    def note(self, sent: list[Any], *, healthy: bool) -> None:
        waiting = [] if healthy else [future for future in (*self.unanswered, *sent) if not future.query()]
        self.unanswered = waiting[-UNANSWERED:]

    def is_slow(self) -> bool:
        """Whether a ping was answered after its time: a busy server lives, and is lost for good to shorter pings."""
        return any(future.query() for future in self.unanswered)

    def due(self) -> bool:
        """Whether a lost server may be pinged before the interval is over."""
        return len(self.unanswered) < UNANSWERED or self.is_slow()


def clock() -> float:
    """Seconds, those included in which this machine was suspended, where it can tell."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def pool(context: Any) -> tuple[int, int] | None:
    """Which memory a worker has mapped, None where it is none: that of a server which was restarted is another one,
    by the same name if that is one of the server's options."""
    shared = getattr(context, "_shm", None)
    if shared is None:
        return None
    file = os.fstat(shared._fd)
    return file.st_dev, file.st_ino


def wrappers(livepatch: PatchContext) -> Mapping[str, Call]:
    seconds: float = livepatch.options["SECONDS"]
    soon: float = livepatch.options["PING_SECONDS"]
    asking = Asking()
    losing = threading.Lock()

    def ask(original: Call, adapter: Any, *rest: Any, **named: Any) -> Any:
        """A call in a step, or a registration: its waits end early, whatever time-out LMCache gives them."""
        asking.adapter, asking.unanswered, asking.late = adapter, False, None
        try:
            return original(*rest, **named)
        finally:
            asking.adapter = None

    def look_up(original: Call, adapter: Any, *rest: Any, **named: Any) -> Any:
        if adapter._heartbeats is not None and not adapter._heartbeats:
            start_heartbeats(adapter)
        return ask(original, adapter, *rest, **named)

    def start_heartbeats(adapter: Any) -> None:
        """To 0.5.5 LMCache starts none, as if no heartbeats were all: a lookup that times out is a scheduler's last."""
        with adapter._heartbeat_lock:
            for url, client in clients(adapter).items():
                beat = sys.modules[MODULE].HeartbeatThread(
                    client, adapter._health_events[url], adapter._heartbeat_interval
                )
                beat.start()
                adapter._heartbeats[url] = beat

    def init(original: Call, future: Any, *rest: Any, **named: Any) -> Any:
        """An answer that a step has asked for."""
        original(*rest, **named)
        if asking.sent is not None:
            asking.sent.append(future)
        if asking.adapter is not None:
            asking.last = future
            livepatch.around_its(future.is_done_, "wait", wait)

    def wait(original: Call, _: Any, timeout: float | None = None, *rest: Any, **named: Any) -> Any:
        adapter = asking.adapter
        if adapter is None:
            return original(timeout, *rest, **named)
        if asking.unanswered:
            return original(0.0)
        if answered(original, adapter, seconds if timeout is None else timeout):
            return True
        asking.unanswered = True
        livepatch.tell("unanswered", "LMCache's server did not answer: nothing is stored or loaded until it does")
        return original(0.0)

    def answered(original: Call, adapter: Any, given: float) -> bool:
        began = time.monotonic()
        if original(min(given, PAUSE_SECONDS)):
            return True
        left, at = vars(adapter).get(_ALLOWANCE, (seconds, began))
        allowance = min(seconds, left + began - at)
        deadline = began + min(given, allowance)
        try:
            while (left := deadline - time.monotonic()) > 0 and pinged(adapter):
                if original(min(left, PAUSE_SECONDS)):
                    return True
            return False
        finally:
            now = time.monotonic()
            setattr(adapter, _ALLOWANCE, (allowance - (now - began), now))

    def pinged(adapter: Any) -> bool:
        """Whether each server of an adapter answers a ping."""
        send_ping = sys.modules[MODULE].send_ping
        asking.adapter = None  # the ping's own wait is a plain one
        try:
            return all(send_ping(client, PAUSE_SECONDS) for client in clients(adapter).values())
        finally:
            asking.adapter = adapter

    def clients(adapter: Any) -> Mapping[str, Any]:
        """What an adapter sends to its servers with, by their addresses; from 0.5.5 on by the second name."""
        for name in ("mq_clients", "req_clients"):  # a scheduler's
            if hasattr(adapter, name):
                several: Mapping[str, Any] = getattr(adapter, name)
                return several
        return {"": getattr(adapter, "mq_client", None) or adapter.req_client}

    def copies_in_the_step(adapter: Any) -> bool:
        return type(adapter.transfer_ctx).__name__ == "EngineDrivenTransferContext"

    def store(original: Call, adapter: Any, *rest: Any, **named: Any) -> Any:
        if not copies_in_the_step(adapter):
            return original(*rest, **named)
        try:
            return ask(original, adapter, *rest, **named)
        finally:
            lose(adapter)

    def prepare_store(original: Call, context: Any, *rest: Any, **named: Any) -> Any:
        """Over shared memory, an answer that does not come is an error, which would end the engine."""
        try:
            return original(*rest, **named)
        except TimeoutError:
            if asking.adapter is None or not asking.unanswered:
                raise
            asking.late = Late(asking.last, context)
            return None  # no room: LMCache makes some

    def commit_store(
        original: Call, context: Any, key: Any, instance_id: int, _chunks: list[Any], *rest: Any, **named: Any
    ) -> Any:
        """The release's own would say that room is filled which is made later."""
        adapter, late, asking.late = asking.adapter, asking.late, None
        if late is None:
            return original(key, instance_id, _chunks, *rest, **named)
        late.stored, late.chunks = (key, instance_id), _chunks
        setattr(adapter, _LATE, [*getattr(adapter, _LATE, [])[-1:], late])
        return False

    def beats(adapter: Any) -> None:
        """The worker is about to send a ping. If it was silent for long, its room may be another's by now."""
        now = clock()
        for late in getattr(adapter, _LATE, []):
            if now - late.heard > FORGOTTEN_SECONDS:
                late.end()
            late.heard = now

    def fill_late(adapter: Any) -> None:
        for late in getattr(adapter, _LATE, []):  # a step may put another list there meanwhile, with the same in it
            if late.over:
                continue
            if pool(late.context) != pool(getattr(adapter.transfer_ctx, "_engine_driven_context", None)):
                late.end()  # the server that was asked is gone, whoever has answered
            elif late.answer.query():
                late.fill()
                livepatch.count("stored_late")

    def load(original: Call, adapter: Any, request_id: str, *rest: Any, **named: Any) -> Any:
        if not copies_in_the_step(adapter):
            return original(request_id, *rest, **named)
        try:
            result = ask(original, adapter, request_id, *rest, **named)
        finally:
            lose(adapter)
        if asking.unanswered:
            _, *blocks = adapter.retrieve_futures.get(request_id, (None,))
            livepatch.count("loads_failed")
            adapter.error_block_ids.update(*blocks)  # to 0.5.4 LMCache only logs it, once the server answers again
        return result

    def lose(adapter: Any) -> None:
        """Let a worker take its server for gone, if it did not answer, until it is registered again."""
        if asking.unanswered:
            with losing:
                setattr(adapter, _LOST, lost(adapter) + 1)
                adapter._health_event.clear()

    def lost(adapter: Any) -> int:
        return int(getattr(adapter, _LOST, 0))

    def execute(original: Call, beat: Any, *rest: Any, **named: Any) -> Any:
        """A heartbeat: the first ping that was sent to a lost server, and answered, registers its worker again."""
        adapter = getattr(beat._recover_callback, "__self__", None)  # a worker's, or None
        # Whether a step does, for this server. From 0.5.5 on a scheduler's only looks whether a lookup is answered.
        waits = hasattr(beat, "_mq_client") if adapter is None else copies_in_the_step(adapter)
        health, pings = beat._health_event, vars(beat).get(_PINGS)
        if pings is None:
            pings = vars(beat)[_PINGS] = Pings(beat._interval)
            watch(beat, health, pings)

        def ping() -> Any:
            if adapter is not None:
                beats(adapter)
            longest = pings.interval
            if not health.is_set() and not pings.is_slow():
                longest = BACK_SECONDS
            elif health.is_set() and waits:
                longest = PING_SECONDS
            beat._interval = min(pings.interval, longest)  # the ping's time-out
            sent: list[Any] = []
            asking.sent = sent
            try:
                return original(*rest, **named)
            finally:
                asking.sent, beat._interval = None, pings.interval
                pings.note(sent, healthy=health.is_set())

        result = ping() if adapter is None or not waits else found(adapter, beat, health, ping)
        if adapter is not None and health.is_set():
            fill_late(adapter)
        return result

    def register_again(original: Call, adapter: Any, *rest: Any, **named: Any) -> Any:
        """A heartbeat that waits for a server which was lost once more would not see it come back."""
        if not copies_in_the_step(adapter):
            return original(*rest, **named)
        return ask(original, adapter, *rest, **named)

    def watch(beat: Any, health: threading.Event, pings: Pings) -> None:
        """Let a heartbeat's pause end when its server is found to be lost, by whomever, and last `soon` while it is."""

        def pause(original: Call, _: Any, timeout: float | None = None, *rest: Any, **named: Any) -> Any:
            if timeout is None:  # not a heartbeat's pause: whoever waits for its end
                return original()
            deadline = time.monotonic() + timeout
            while (left := deadline - time.monotonic()) > 0:
                if original(min(left, soon)):  # it is to end
                    return True
                if not health.is_set() and pings.due():
                    return False
            return original(0.0)

        event = beat._wake_event if hasattr(beat, "_wake_event") else beat._stop_event  # the latter to 0.5.2
        livepatch.around_its(event, "wait", pause)

    def found(adapter: Any, beat: Any, health: threading.Event, ping: Callable[[], Any]) -> Any:
        """Ping until no step lost the server under it: such a ping says nothing of what came after it was sent.

        LMCache notes what it finds in an event of ours, from which the adapter's own is set.
        """
        while True:
            times = lost(adapter)
            beat._health_event = event = threading.Event()
            if health.is_set():
                event.set()
            try:
                result = ping()
            finally:
                beat._health_event = health
            with losing:
                if lost(adapter) == times:
                    (health.set if event.is_set() else health.clear)()
                    return result

    return {
        f"{SCHEDULER}.maybe_submit_lookup_request": look_up,
        f"{SCHEDULER}.check_lookup_result": look_up,
        f"{SCHEDULER}.end_session": look_up,
        f"{WORKER}.submit_store_request": store,
        f"{WORKER}.submit_retrieve_request": load,
        f"{WORKER}._reregister_kv_caches_callback": register_again,
        f"{MODULE}:HeartbeatThread._execute": livepatch.lasting(execute),
        f"{SHARED}.prepare_store": prepare_store,
        f"{SHARED}.commit_store": livepatch.lasting(commit_store),
        "lmcache.v1.multiprocess.futures:MessagingFuture.__init__": init,
    }

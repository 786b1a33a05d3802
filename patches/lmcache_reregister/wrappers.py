"""A worker that LMCache's server may have forgotten registers again, before anything else is asked of that server.

The server forgets a worker of which it has heard nothing for a time that is 30 s or more, and says so to nobody: a ping
is answered as ever. What the worker knows is how long ago it sent the last message that was answered, so it knows when
it may have been forgotten: LMCache's own recovery then registers it, and does nothing where the server knows it still.

Source: LMCache#4715, PR#4732, PR#4730, #4593.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

MODULE = "lmcache.integration.vllm.vllm_multi_process_adapter"
ADAPTER = f"{MODULE}:LMCacheMPWorkerAdapter"

WAIT_SECONDS = 1.0
"""How long an engine's step waits for a server that is asked to register its worker again."""

GRACE_SECONDS = 3600.0
"""How long a server keeps a worker that has sent no ping yet, if nobody has told it otherwise."""

STOP_SECONDS = 5.0
"""How long a shutdown waits for such a heartbeat: as long as LMCache waits for its own."""

_STATE = "_livepatch_registration"
"""Attribute of a worker's adapter."""


def clock() -> float:
    """Seconds, those included in which this machine was suspended, where it can tell."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Registration:
    """What a worker knows of its registration."""

    __slots__ = ("answered", "asking", "beating", "earlier", "first_ping", "left_out", "renewed", "silent")

    def __init__(self, silent: float) -> None:
        self.silent = silent
        self.answered = clock()  # when the last message was sent that a server answered which knew this worker
        self.first_ping: float | None = None  # when it was sent, to a server that had not been silent for too long
        self.renewed = 0  # how often it was registered again
        self.beating = threading.Lock()  # one heartbeat at a time
        self.asking: threading.Thread | None = None  # a heartbeat that a step asked for
        self.left_out = False  # no event was made: what the step would ask for with it is left out too
        # The transfer contexts of earlier registrations, whose stores may still read: these keep them, and nobody else,
        # since with each goes a mapping of the server's whole pool.
        self.earlier: list[weakref.ref[Any]] = []

    def in_doubt(self) -> bool:
        """Whether it is to register again, as soon as the server answers."""
        return clock() - self.answered > self.silent

    def forgotten(self) -> bool:
        """Whether nothing is to be asked of the server before it has.

        A server that is not told otherwise knows a worker that has not pinged yet: an engine that has started beside a
        busy one waits for its first ping's answer, and for its registration's, no longer than a step does.
        """
        if self.first_ping is None:
            return clock() - self.answered > max(self.silent, GRACE_SECONDS)
        return clock() - max(self.answered, self.first_ping) > self.silent


class Failed:
    """In place of the future of a load that is not to be relied on."""

    def query(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> bool:
        return False


def wrappers(livepatch: PatchContext) -> Mapping[str, Call]:
    def register_kv_caches(original: Call, adapter: Any, *rest: Any, **named: Any) -> Any:
        # LMCache asks for servers that forget nobody within three of its worker's heartbeats. A busy one may take an
        # interval to answer, so that from a ping to the next one's answer three intervals may pass.
        silent = max(livepatch.options["SILENT_SECONDS"], 3 * adapter._heartbeat_interval)
        registration = Registration(silent)
        result = original(*rest, **named)
        setattr(adapter, _STATE, registration)
        return result

    def execute(original: Call, beat: Any, *rest: Any, **named: Any) -> Any:
        """One heartbeat, which is a worker's where it has somebody to tell that the server is back."""
        adapter = getattr(beat._recover_callback, "__self__", None)
        registration: Registration | None = getattr(adapter, _STATE, None)
        if adapter is None or registration is None:
            return original(*rest, **named)
        with registration.beating:
            began, context = clock(), adapter.transfer_ctx
            if registration.first_ping is None:
                registration.first_ping = registration.answered if registration.forgotten() else began
            result = original(*rest, **named)
            if beat._health_event.is_set():
                if adapter.transfer_ctx is not context:  # LMCache itself has just registered it
                    registration.renewed += 1
                    registration.answered = began
                elif not registration.in_doubt() or again(beat, registration):
                    registration.answered = began
            if adapter.transfer_ctx is not context:
                registration.earlier = [one for one in registration.earlier if one() is not None]
                registration.earlier.append(weakref.ref(context))
        return result

    def again(beat: Any, registration: Registration) -> bool:
        """Let LMCache register the worker again; whether it did."""
        if not beat._recover_callback():
            return False
        registration.renewed += 1
        why = f"nothing was heard for over {registration.silent:g} s: this worker has registered again"
        livepatch.tell("registered_again", f"{why} with LMCache's server, which may have forgotten it")
        return True

    def known(adapter: Any, registration: Registration) -> bool:
        """Whether the server can be asked for something; where it may not know the worker, it is waited for once."""
        if registration.in_doubt() and (registration.asking is None or not registration.asking.is_alive()):
            registration.asking = threading.Thread(target=adapter._heartbeat._execute, daemon=True)
            registration.asking.start()
            registration.asking.join(WAIT_SECONDS)
        return not registration.forgotten()

    def asked(original: Call, adapter: Any, registration: Registration, *rest: Any, **named: Any) -> tuple[Any, int]:
        """Leave out what the server is asked for, as where it is gone, if it may not know the worker.

        Returns the answer, and how often the worker had been registered again when it was asked for.
        """
        sure = not registration.left_out
        if adapter.is_healthy:
            adapter._ensure_heartbeat_started()
            sure = sure and known(adapter, registration)
        renewed = registration.renewed
        if sure:
            return original(*rest, **named), renewed
        if adapter.is_healthy:
            livepatch.count("left_out")
        health, adapter._health_event = adapter._health_event, threading.Event()
        try:
            return original(*rest, **named), renewed
        finally:
            adapter._health_event = health

    def create_recorded_event(original: Call, adapter: Any, *rest: Any, **named: Any) -> Any:
        """The event that the step's stores or loads are asked for with, from 0.5.5 on; None where they are left out."""
        registration: Registration | None = getattr(adapter, _STATE, None)
        if registration is None:
            return original(*rest, **named)
        healthy = adapter.is_healthy
        if healthy:
            adapter._ensure_heartbeat_started()
        registration.left_out = not (healthy and known(adapter, registration))
        return asked(original, adapter, registration, *rest, **named)[0]

    def submit_store_request(original: Call, adapter: Any, *rest: Any, **named: Any) -> Any:
        registration: Registration | None = getattr(adapter, _STATE, None)
        if registration is None:
            return original(*rest, **named)
        return asked(original, adapter, registration, *rest, **named)[0]

    def submit_retrieve_request(original: Call, adapter: Any, request_id: str, *rest: Any, **named: Any) -> Any:
        """A load during which the server may have forgotten the worker has failed: it may have read what came next."""
        registration: Registration | None = getattr(adapter, _STATE, None)
        if registration is None:
            return original(request_id, *rest, **named)
        result, renewed = asked(original, adapter, registration, request_id, *rest, **named)
        if registration.renewed != renewed or registration.forgotten():
            future, *blocks = adapter.retrieve_futures.get(request_id, (None,))
            if future is not None and future.query():  # copied by the worker itself: it has ended
                livepatch.count("load_in_doubt")
                adapter.retrieve_futures[request_id] = (Failed(), *blocks)
                adapter.error_block_ids.update(blocks[0])  # to 0.5.4 LMCache itself only logs a failed load
        return result

    def handle_preemptions(
        original: Call, adapter: Any, need_flush_before_forward: bool, *rest: Any, **named: Any
    ) -> Any:
        """Stores of earlier registrations may read the blocks that are about to be overwritten, too."""
        result = original(need_flush_before_forward, *rest, **named)
        registration: Registration | None = getattr(adapter, _STATE, None)
        if registration is not None and need_flush_before_forward:
            for earlier in registration.earlier:
                context = earlier()
                if context is not None:
                    context.flush_inflight_stores()
        return result

    def shutdown(original: Call, adapter: Any, *rest: Any, **named: Any) -> Any:
        """A heartbeat that a step asked for ends before the worker says goodbye, or it might register it afterwards."""
        registration: Registration | None = getattr(adapter, _STATE, None)
        if registration is not None and registration.asking is not None:
            registration.asking.join(STOP_SECONDS)
        return original(*rest, **named)

    return {
        f"{ADAPTER}.register_kv_caches": register_kv_caches,
        f"{MODULE}:HeartbeatThread._execute": execute,
        f"{ADAPTER}.create_recorded_event": create_recorded_event,
        f"{ADAPTER}.submit_store_request": submit_store_request,
        f"{ADAPTER}.submit_retrieve_request": submit_retrieve_request,
        f"{ADAPTER}.handle_preemptions": handle_preemptions,
        f"{ADAPTER}.shutdown": shutdown,
    }

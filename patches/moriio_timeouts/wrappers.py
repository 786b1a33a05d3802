"""Every wait of MoRI-IO ends, and a failed write ends its own request and nothing else.

What a wait gives up may still be under way: the blocks that it reads from stay with their request until mori says that
it has ended. Reads are in reads.py.

Source: vllm PR#40344, which bounds the same waits from 0.23.0 on.
"""

from __future__ import annotations

import contextlib
import math
import queue
import sys
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import reads

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

ENGINE = "vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_engine"
WORKER = reads.WORKER

_PAUSE = (0.00005, 0.002)
"""Seconds between two looks at a transfer: a twentieth of the time waited so far, within these."""
_LOOK_AT_ALL = 0.05
"""Seconds between two looks at all transfers for one that failed; otherwise only the first pending one is looked at."""


class Writes:
    """What became of one worker's writes. Shared by its writer thread and the thread that runs the model."""

    def __init__(self) -> None:
        # Requests that were marked done, and until when (perf_counter) what is queued for them is of no use any more:
        # without end, until the mark was reported; then an id may come again.
        self.ended: dict[str, float] = {}
        self.statuses: dict[str, list[Any]] = {}  # of the transfers begun for a request
        self.given_up: dict[str, list[Any]] = {}  # those that were pending then: their blocks are still being read
        self.task: Any = None  # what the writer thread is executing
        self.completed_by_waiting = False  # whether `Succeeded` may stay false until `Wait` is called

    def is_past(self, task: Any) -> bool:
        """Whether the task's request has ended since the task was queued."""
        return bool(task.enqueue_time <= self.ended.get(task.request_id, -math.inf))

    def end(self, request_id: str) -> bool:
        """End a request; whether it had not ended before."""
        pending = [status for status in self.statuses.pop(request_id, ()) if reads.in_progress(status)]
        if pending:
            self.given_up.setdefault(request_id, []).extend(pending)
        again = self.ended.get(request_id) == math.inf
        self.ended[request_id] = math.inf
        return not again

    def take_released(self) -> list[str]:
        """The requests that were given up, and whose last transfer has ended since."""
        released = [name for name, pending in self.given_up.items() if not any(map(reads.in_progress, pending))]
        for request_id in released:
            del self.given_up[request_id]
        return released


class Handshakes:
    """Stands where a worker keeps its queue of requests whose handshake has ended.

    The methods that spin over that queue find it empty: whoever waits for a handshake hears of it here, before they
    run, and nobody hears of one that was given up.
    """

    def __init__(self) -> None:
        self.under_way: dict[str, threading.Event] = {}  # by peer: what is set when that handshake has ended
        self.step: Any = None  # the metadata of the step that `given_up` is about
        self.given_up: set[str] = set()

    def put(self, entry: tuple[str, Any]) -> None:
        event = self.under_way.pop(reads.peer_of(entry[1]), None)
        if event is not None:
            event.set()

    def empty(self) -> bool:
        return True


def wait_for(statuses: Sequence[Any], seconds: float) -> tuple[int, Any]:
    """Wait until all have succeeded, one has failed or the time is over: how many are pending, and which failed."""
    begin = looked = time.monotonic()
    pending = deque(statuses)
    while pending:
        if pending[0].Succeeded():
            pending.popleft()
            continue
        now = time.monotonic()
        if pending[0].Failed() or now - looked >= _LOOK_AT_ALL or now - begin >= seconds:
            looked = now
            failed = next((status for status in pending if status.Failed()), None)
            if failed is not None:
                return sum(not (status.Succeeded() or status.Failed()) for status in pending), failed
            if now - begin >= seconds:
                left = sum(not status.Succeeded() for status in pending)
                return left, None
        time.sleep(min(max((now - begin) / 20, _PAUSE[0]), _PAUSE[1]))
    return 0, None


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of each target."""
    handshake_seconds: float = livepatch.options["HANDSHAKE_SECONDS"]
    transfer_seconds: float = livepatch.options["TRANSFER_SECONDS"]
    defer_seconds: float = livepatch.options["DEFER_SECONDS"]
    # What names a request in the messages between prefill and decode, and so in `done_remote_allocate_req_dict`.
    # What is reported as done is the request's own id in every release that needs this patch.
    transfer_key: str = livepatch.facts.get("transfer_key", "transfer_id")

    # Writes, on the prefill side

    def writes_of(engine: Any) -> Writes:
        found: Writes | None = vars(engine).get("_livepatch_writes")
        if found is None:
            made = Writes()  # the writer's thread and the model's may both be the first
            found = vars(engine).setdefault("_livepatch_writes", made)
            if found is made:
                put_back_of(engine, give_back_transfers)
        return found

    def put_back_of(owner: Any, put_back: Callable[[Any], None]) -> None:
        """When the patch stands aside, put back what it holds of an object of the engine's, if that is still there."""
        known = weakref.ref(owner)

        def put_back_if_there() -> None:
            there = known()
            if there is not None:
                put_back(there)

        livepatch.on_stand_aside(put_back_if_there)

    def give_back_transfers(engine: Any) -> None:
        """The release's own wait looks for what it waits for in one place; it is not to find that all has ended."""
        writes = writes_of(engine)
        with engine.lock:
            for statuses in writes.statuses.values():
                engine.transfer_status += statuses
            writes.statuses.clear()

    def give_up(engine: Any, kind: str, request: Any, request_id: str, peer: str, why: str) -> None:
        """Mark a request done, once, and forget what was known of its transfer: its blocks come back.

        Where transfers are pending, that mark waits for their end: they still read the blocks.
        """
        with engine.lock:
            engine.done_remote_allocate_req_dict.pop(getattr(request, transfer_key, request_id), None)
            first = writes_of(engine).end(request_id)
            pending = len(writes_of(engine).given_up.get(request_id, ()))
            if first and not pending:
                engine.done_req_ids.append(request_id)
        if first:
            livepatch.count(kind)
            if pending:
                livepatch.count("held")
                why += f"; its blocks are held until {pending} pending transfers have ended"
            livepatch.say(kind, f"the write of request {request_id} to {peer} is given up: {why}")

    def execute(original: Callable[..., Any], writer: Any, task: Any, *rest: Any, **named: Any) -> Any:
        """A write that fails ends its request; the writer thread goes on with the next."""
        worker = writer.worker
        engine = worker.moriio_wrapper
        writes = writes_of(engine)
        if writes.is_past(task):  # also after the patch has stood aside: its blocks may be another's by now
            return None
        if livepatch.aside:
            return original(task, *rest, **named)
        writes.task = task
        # Some releases of mori complete a transfer between the GPUs of one machine only within `Wait`.
        writes.completed_by_waiting = getattr(worker.moriio_config, "backend", "rdma") == "xgmi"
        try:
            result = original(task, *rest, **named)
        except Exception as error:
            kind = getattr(error, "livepatch_kind", "write_failed")
            if kind == "write_failed":
                sys.modules[ENGINE].logger.exception("MoRI-IO: a write failed")
            elapsed = time.perf_counter() - task.enqueue_time
            why = f"{type(error).__name__}: {error}; queued {elapsed:.1f} s ago"
            give_up(engine, kind, task, task.request_id, task.dst_engine_id, why)
            return None
        finally:
            writes.task = None
        if getattr(task, transfer_key) not in engine.done_remote_allocate_req_dict:  # that was the last layer
            with engine.lock:
                writes.end(task.request_id)
                writes.ended[task.request_id] = time.perf_counter()  # reported by the release itself
        return result

    def process_deferred(original: Callable[..., Any], writer: Any, *rest: Any, **named: Any) -> Any:
        """Writes whose peer never says where to end after a time, those of requests that have ended at once."""
        try:
            engine = writer.worker.moriio_wrapper
        except RuntimeError:  # the engine was dropped, and this thread outlives it
            return original(*rest, **named)
        if writer._deferred_tasks:
            writes = writes_of(engine)
            now = time.perf_counter()
            waiting = []
            for task in writer._deferred_tasks:
                if writes.is_past(task):
                    continue
                if now - task.enqueue_time > defer_seconds and not writer._is_remote_ready(task):
                    why = f"no blocks were allocated for it there in {now - task.enqueue_time:.1f} s"
                    give_up(engine, "deferred_expired", task, task.request_id, task.dst_engine_id, why)
                else:
                    waiting.append(task)
            writer._deferred_tasks = waiting
        if writer._write_task_q.empty():
            writes = writes_of(engine)
            if writes.ended:
                deferred = {task.request_id for task in writer._deferred_tasks}  # all that they are told from
                with engine.lock:
                    past = [name for name, until in writes.ended.items() if until < math.inf and name not in deferred]
                    for request_id in past:
                        del writes.ended[request_id]
        return original(*rest, **named)

    def write_layer(original: Callable[..., Any], writer: Any, plan: Any, *rest: Any, **named: Any) -> Any:
        """Keep a request's transfers apart from those of others: each waits for its own, and fails by its own."""
        engine = writer.worker.moriio_wrapper
        try:
            return original(plan, *rest, **named)
        finally:
            with engine.lock:
                if not livepatch.aside:  # else they would be missed where they were given back to
                    begun = writes_of(engine).statuses.setdefault(plan.request_id, [])
                    begun += engine.transfer_status
                    engine.transfer_status.clear()

    def wait_for_transfers(original: Callable[..., Any], engine: Any, *rest: Any, **named: Any) -> None:
        """In place of the release's own wait, which ends only with the transfers."""
        writes = writes_of(engine)
        task = writes.task
        with engine.lock:
            waited_for = [task.request_id] if task is not None else list(writes.statuses)
            statuses = [*engine.transfer_status, *(one for name in waited_for for one in writes.statuses.get(name, ()))]
        if writes.completed_by_waiting and not all(status.Succeeded() for status in statuses):
            reads.wait_aside(statuses)
        begin = time.monotonic()
        pending, failed = wait_for(statuses, transfer_seconds)
        with engine.lock:
            for request_id in waited_for:
                writes.statuses.pop(request_id, None)
            waited = {id(status) for status in statuses}
            engine.transfer_status[:] = [status for status in engine.transfer_status if id(status) not in waited]
            if task is not None and pending:
                writes.statuses[task.request_id] = statuses  # for whoever gives the request up
        if not pending and failed is None:
            return
        why = f"{pending} of {len(statuses)} transfers are pending after {time.monotonic() - begin:.1f} s"
        if failed is not None:
            why = f"a transfer failed: {failed.Message()} (code {failed.Code()}); {why}"
        error = sys.modules[ENGINE].TransferError(why)
        error.livepatch_kind = "transfer_timeout" if failed is None else "transfer_failed"
        raise livepatch.deliberate(error)

    def pop_finished(original: Callable[..., Any], engine: Any, *rest: Any, **named: Any) -> Any:
        """What was queued until now for a request that is reported as done belongs to it; what comes later does not."""
        writes = writes_of(engine)
        with engine.lock:
            engine.done_req_ids += writes.take_released()
        done = original(*rest, **named)
        with engine.lock:
            for request_id in done:
                if request_id in writes.ended:
                    writes.ended[request_id] = time.perf_counter()
        return done

    # Handshakes, on both sides

    def connect(worker: Any, requests: Mapping[str, Any]) -> dict[str, tuple[str, str, str]]:
        """Shake hands with peers that are not known yet. The requests whose peer did not: kind, peer, what to say.

        One thread shakes hands with one peer after another. A handshake that an earlier step gave up keeps its turn:
        one more with the same peer would keep that thread from peers that answer.
        """
        handshakes = handshakes_of(worker)
        begin = time.monotonic()
        pending: dict[str, threading.Event] = {}
        peers = {name: reads.peer_of(meta) for name, meta in requests.items()}
        for request_id, meta in requests.items():
            peer = peers[request_id]
            if peer in worker.write_ready_flags and is_known(worker, peer):
                continue
            event = handshakes.under_way.get(peer)
            if event is None:
                event = handshakes.under_way[peer] = threading.Event()
                with worker._handshake_lock:
                    worker._background_moriio_handshake(request_id, peer, meta)
            pending[peer] = event
        lost: dict[str, tuple[str, str]] = {}
        for peer, event in pending.items():
            ended = event.wait(max(0.0, begin + handshake_seconds - time.monotonic()))
            elapsed = time.monotonic() - begin
            if not ended or (elapsed >= handshake_seconds and not is_known(worker, peer)):
                lost[peer] = "handshake_timeout", f"no handshake in {elapsed:.1f} s"
            elif not is_known(worker, peer):
                lost[peer] = "handshake_failed", f"the handshake failed after {elapsed:.1f} s"
        return {name: (lost[peer][0], peer, lost[peer][1]) for name, peer in peers.items() if peer in lost}

    def is_known(worker: Any, peer: str) -> bool:
        return worker.get_engine_name_with_dp(peer, 0) in worker._remote_agents

    def handshakes_of(worker: Any) -> Handshakes:
        if not isinstance(worker._ready_requests, Handshakes):
            worker._ready_requests = Handshakes()
            # The release's own methods would wait for ever for what is handed over here.
            put_back_of(worker, lambda worker: setattr(worker, "_ready_requests", queue.Queue()))
        found: Handshakes = worker._ready_requests
        return found

    def save_kv_layer(original: Callable[..., Any], worker: Any, metadata: Any, *rest: Any, **named: Any) -> Any:
        """Let the method see only requests whose peer is there, so that it has nothing to spin for."""
        if not worker.is_producer or worker.mode.name != "WRITE":
            return original(metadata, *rest, **named)
        handshakes = handshakes_of(worker)
        if handshakes.step is not metadata:  # this is the first layer of its step
            handshakes.step, handshakes.given_up = metadata, set()
        every = metadata.reqs_to_save
        wanted = {name: meta for name, meta in every.items() if name not in handshakes.given_up}
        for request_id, (kind, peer, why) in connect(worker, wanted).items():
            handshakes.given_up.add(request_id)
            give_up(worker.moriio_wrapper, kind, wanted.pop(request_id), request_id, peer, why)
        if not wanted:
            return None
        metadata.reqs_to_save = wanted
        try:
            return original(metadata, *rest, **named)
        finally:
            metadata.reqs_to_save = every

    def handshake(original: Any, worker: Any, *rest: Any, **named: Any) -> Any:
        """A peer that never answers frees the one thread that shakes hands, for the next peer."""
        function = original.__func__
        names = function.__globals__
        zmq = names["zmq"]

        @contextlib.contextmanager
        def bounded(socket_type: Any, address: str) -> Iterator[Any]:
            with names["zmq_ctx"](socket_type, address) as socket:
                socket.setsockopt(zmq.RCVTIMEO, max(1, int(handshake_seconds * 1000)))
                yield socket

        # The release's own body, with another way to its socket: nothing else reaches that.
        same = types.FunctionType(
            function.__code__,
            {**names, "zmq_ctx": bounded},
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        same.__kwdefaults__ = function.__kwdefaults__
        try:
            return original.answered_by(same, worker, *rest, **named)
        except zmq.Again as error:
            raise livepatch.deliberate(names["HandshakeError"](f"no answer in {handshake_seconds:g} s")) from error

    # Start-up: the worker waits for its own listener, which may have failed to bind its port

    def listen(
        original: Callable[..., Any], metadata: Any, ready_event: threading.Event, *rest: Any, **named: Any
    ) -> Any:
        try:
            return original(metadata, ready_event, *rest, **named)
        except Exception as error:
            if not ready_event.is_set():
                failed_to_listen[threading.get_ident()] = error
                ready_event.set()
            raise

    failed_to_listen: dict[int, Exception] = {}  # by thread

    def register_kv_caches(original: Callable[..., Any], worker: Any, *rest: Any, **named: Any) -> Any:
        result = original(*rest, **named)
        error = failed_to_listen.pop(worker._moriio_handshake_listener_t.ident, None)
        if error is not None:
            livepatch.count("listener_failed")
            why = f"MoRI-IO cannot listen for handshakes on port {worker.side_channel_port}: {error}"
            raise livepatch.deliberate(sys.modules[reads.MODULE].HandshakeError(why)) from error
        return result

    return {
        **reads.wrappers(livepatch, connect),
        f"{ENGINE}:MoRIIOWriter._execute_write_task": livepatch.lasting(execute),
        f"{ENGINE}:MoRIIOWriter._process_deferred_tasks": process_deferred,
        f"{ENGINE}:MoRIIOWriter._do_layer_write": write_layer,
        f"{ENGINE}:MoRIIOWrapper.waiting_for_transfer_complete": wait_for_transfers,
        f"{ENGINE}:MoRIIOWrapper.pop_finished_req_ids": livepatch.lasting(pop_finished),
        f"{WORKER}.save_kv_layer": save_kv_layer,
        f"{WORKER}._moriio_handshake": handshake,
        f"{WORKER}._moriio_handshake_listener": listen,
        f"{WORKER}.register_kv_caches": register_kv_caches,
    }

"""A decode engine hears from prefill of a write that will not come.

Source: vllm PR#50754, vllm#48633, vllm#46283. Who says what, and why it suffices: docs/nixl.md.
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from . import words
from .decode import Desk, agent_name
from .prefill import LATE, REFUSED, STATE, Answers, Registered
from .reach import Reach

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl."
WORKER = _NIXL + "push_worker:NixlPushConnectorWorker"
BASE = _NIXL + "base_worker:NixlBaseConnectorWorker"

_SIDES = "_livepatch_push"
"""Attribute of a worker: its `Sides`."""

HELD_SECONDS = 5.0
"""For so long at least the lease of a request that is being written still runs, from each step."""

IDLE_SECONDS = 1.0
"""How long a writer that has nothing to do rests before it looks for notifications: an idle engine never wakes it."""


class Sides:
    """What one worker's patch has: both parts, since a worker may be prefill and decode."""

    def __init__(self, livepatch: PatchContext, worker: Any, wait: float) -> None:
        self.reach = Reach(livepatch, worker)
        self.desk = Desk(livepatch, wait)
        self.answers = Answers(livepatch, self.reach.tell)
        self.address: bytes | None = None  # decode's, once it has registered
        self.came: str | None = None  # the id under which a registration comes that the writer is handling
        self.replaced: dict[str, Any] | None = None  # what waited under that id


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    """The wrapper of each target."""
    by_request: bool = livepatch.facts.get("by_request", False)

    def create(original: Call, worker: Any, *rest: Any, **named: Any) -> Any:
        result = original(*rest, **named)
        wait = livepatch.options["WAIT_SECONDS"] or float(
            worker.kv_transfer_config.get_from_extra_config(
                "push_registration_timeout",
                worker.kv_transfer_config.get_from_extra_config("decoder_kv_blocks_ttl", 480),
            )
        )
        sides = Sides(livepatch, worker, wait)
        look_at(worker, sides)
        setattr(worker, _SIDES, sides)
        return result

    def look_at(worker: Any, sides: Sides) -> None:
        """Note when the worker's writer begins to write, and read its notifications with it; both answer as ever."""
        agent, wake = worker.nixl_wrapper, worker._push_writer_wake

        def post(original: Call, _: Any, *rest: Any, **named: Any) -> Any:
            sides.answers.posted = True
            return original(*rest, **named)

        def listen(original: Call, _: Any, *rest: Any, **named: Any) -> Any:
            pending = worker._pending_d_registrations
            sides.answers.sweep(pending)
            for waiting in sides.desk.overdue():
                sides.reach.send(waiting.agent, words.WITHDRAW, waiting.token)
            notifications = original(*rest, **named)
            for kind, token in words.take(notifications):
                if kind == words.REFUSED:
                    sides.desk.refused(token)
                else:
                    sides.answers.withdraw(token, pending)
            return notifications

        def pause(original: Call, _: Any, *rest: Any, **named: Any) -> Any:
            return original(*rest, **named) if rest or named else original(IDLE_SECONDS)

        livepatch.around_its(agent, "transfer", post)
        livepatch.around_its(agent, "get_new_notifs", listen)
        livepatch.around_its(wake, "wait", pause)

    def close(original: Call, worker: Any, *rest: Any, **named: Any) -> Any:
        """The worker ends. What it has not begun to write it never will, and decode is told before its agent goes."""
        sides: Sides | None = getattr(worker, _SIDES, None)
        if sides is None:
            return original(*rest, **named)
        sides.answers.close(worker._pending_d_registrations)
        try:
            return original(*rest, **named)
        finally:  # to 0.26.0 a worker that has written raises KeyError
            sides.reach.forget()
            delattr(worker, _SIDES)
            for name in ("transfer", "get_new_notifs"):  # each refers to the agent, which would stay
                vars(sides.reach.agent).pop(name, None)
            vars(worker._push_writer_wake).pop("wait", None)

    # Decode

    def register(
        original: Call, worker: Any, req_id: str, reg_data: Mapping[str, Any], *rest: Any, **named: Any
    ) -> Any:
        """The writer is about to send a registration to prefill."""
        sides: Sides | None = getattr(worker, _SIDES, None)
        agents = worker._remote_agents.get(reg_data["remote_engine_id"])
        if sides is None or not agents:
            return original(req_id, reg_data, *rest, **named)
        several = len(agents) != 1 or reg_data.get("remote_pp_size", 1) != 1
        if several or reg_data["remote_tp_size"] != reg_data["decode_tp_size"]:
            livepatch.tell(
                "not_covered", "prefill and decode have different numbers of ranks: failures are not reported"
            )
            return original(req_id, reg_data, *rest, **named)
        if sides.address is None:
            sides.address = sides.reach.address()
        token = sides.desk.register(req_id, agent_name(next(iter(agents.values()))))
        return original(req_id, {**reg_data, words.ADDED: [token, sides.address]}, *rest, **named)

    def fail(worker: Any, request_id: str) -> None:
        """Report a failed load in the release's own way, with all of the request's blocks."""
        livepatch.tell("failed", f"the KV of request {request_id} is not coming: a failed load")
        if by_request:
            worker._failed_recv_reqs.put(request_id)
            return
        worker._handle_failed_transfer(request_id, None)
        if worker._is_hma_required:  # the release leaves the blocks of models with several KV groups out
            groups = worker._recving_metadata[request_id].local_block_ids
            worker._invalid_block_ids.put({block for group in groups for block in group})

    # Prefill

    def base_id(request_id: str) -> str:
        """The part of an id that prefill and decode share, by the release's own rule."""
        return str(sys.modules[WORKER.partition(":")[0]].get_base_request_id(request_id))

    def coming(worker: Any, request_id: str, *rest: Any, **named: Any) -> None:
        """The writer looks whether the request of a registration that has come is computed."""
        sides: Sides | None = getattr(worker, _SIDES, None)
        if sides is not None:
            sides.came = request_id
            sides.replaced = worker._pending_d_registrations.get(request_id)

    def came(original: Call, worker: Any, *rest: Any, **named: Any) -> Any:
        """The writer has a registration. What it does not match waits, unless its request is over."""
        sides: Sides | None = getattr(worker, _SIDES, None)
        if sides is None:
            return original(*rest, **named)
        pending, answers = worker._pending_d_registrations, sides.answers
        sides.came = sides.replaced = None
        result = original(*rest, **named)
        registration = pending.get(sides.came)
        if registration is None or registration is sides.replaced:
            return result
        before = None if sides.replaced is None else answers.take(sides.replaced, base_id)
        if before is not None:  # the release has dropped it
            answers.refuse(before, pending)
        registered = answers.take(registration, base_id)
        if registered is not None and answers.over(registered.base_id):
            answers.refuse(registered, pending)
        return result

    def push(
        original: Call,
        worker: Any,
        request_id: str,
        local_block_ids: Any,
        registration_data: dict[str, Any],
        *rest: Any,
        **named: Any,
    ) -> Any:
        """The writer begins to write, or, after a handshake, does so at last."""
        sides: Sides | None = getattr(worker, _SIDES, None)
        registered = registration_data.get(STATE)
        if LATE in registration_data:
            livepatch.count("late")
            return None  # its blocks may be another request's by now
        if isinstance(registered, Registered) and registered.state == REFUSED:
            livepatch.count("left")
            return None  # decode knows that, and its own blocks may be another request's
        if sides is None or livepatch.aside:
            return original(request_id, local_block_ids, registration_data, *rest, **named)
        answers = sides.answers
        registered = answers.take(registration_data, base_id)
        if not answers.begins(request_id, base_id(request_id), registration_data):
            livepatch.count("late")
            if registered is not None:
                answers.refuse(registered, worker._pending_d_registrations)
            return None
        try:
            return original(request_id, local_block_ids, registration_data, *rest, **named)
        finally:
            answers.began(request_id, registration_data)

    def shake(original: Call, worker: Any, engine_id: str, *rest: Any, **named: Any) -> Any:
        future = original(engine_id, *rest, **named)
        sides: Sides | None = getattr(worker, _SIDES, None)
        if sides is not None and future is not None:
            sides.answers.shaking(engine_id, future)
        return future

    def load(original: Call, worker: Any, metadata: Any, *rest: Any, **named: Any) -> Any:
        result = original(metadata, *rest, **named)
        sides: Sides | None = getattr(worker, _SIDES, None)
        if sides is not None:
            for request_id in metadata.reqs_in_batch:
                sides.answers.begun(base_id(request_id))
            if metadata.reqs_not_processed:
                sides.answers.ended((base_id(one), one) for one in metadata.reqs_not_processed)
        return result

    # Both

    def finished(original: Call, worker: Any, *rest: Any, **named: Any) -> Any:
        sides: Sides | None = getattr(worker, _SIDES, None)
        if sides is None:
            return original(*rest, **named)
        answers, desk = sides.answers, sides.desk
        for request_id in desk.failed():
            if request_id in worker._recving_metadata:
                fail(worker, request_id)
        if not by_request:
            leave_out_writes(worker)
        with answers.leases:
            hold_leases(worker, answers)
            result = original(*rest, **named)
            sent, received = (
                result[:2] if isinstance(result, tuple) else (result.finished_sending, result.finished_recving)
            )
            if sent:
                answers.ended((base_id(one), one) for one in sent)
        for request_id in received:
            desk.ended(request_id)
        return result

    def hold_leases(worker: Any, answers: Answers) -> None:
        """A lease does not end while the request's blocks are being read for the write."""
        under_way = list(worker._sending_transfers)
        if answers.writing_for is not None:
            under_way.append(answers.writing_for)
        for request_id in under_way:
            until = worker._reqs_to_send.get(request_id)
            if until is not None:
                worker._reqs_to_send[request_id] = max(until, time.perf_counter() + HELD_SECONDS)

    def leave_out_writes(worker: Any) -> None:
        """A write that failed is no failed load of this worker: these releases take it for one, and assert."""
        failed: dict[str, None] = {}
        while not worker._failed_recv_reqs.empty():
            try:
                failed[worker._failed_recv_reqs.get_nowait()] = None
            except queue.Empty:
                break
        for request_id in failed:
            if request_id in worker._recving_metadata:
                worker._failed_recv_reqs.put(request_id)
            else:
                livepatch.count("write_failed")

    livepatch.lasting(push)
    return {
        f"{WORKER}.__init__": create,
        f"{WORKER}.shutdown": close,
        f"{WORKER}._do_send_reg_notif": register,
        f"{WORKER}._handle_push_reg_notif": came,
        f"{WORKER}._pop_matching_finished_blocks": livepatch.before(coming),
        f"{WORKER}._do_start_push_kv": push,
        f"{WORKER}.start_load_kv": load,
        f"{WORKER}.get_finished": finished,
        f"{WORKER}.get_transfer_results": finished,
        f"{BASE}._ensure_handshake": shake,
    }

"""A decode engine hears of a write that failed or will not come, from prefill or from the end of its process.

Source: vllm PR#50754, vllm#48633, vllm#46283. Who says what, and why it suffices: docs/nixl-push-failures.md.
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .decode import Desk, agent_name
from .prefill import Answers

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl."
WORKER = _NIXL + "push_worker:NixlPushConnectorWorker"
BASE = _NIXL + "base_worker:NixlBaseConnectorWorker"

_DESK, _ANSWERS = "_livepatch_desk", "_livepatch_answers"
"""Attributes of a worker: either side's part."""

HELD_SECONDS = 5.0
"""For so long at least the lease of a request that is being written still runs, from each step."""


def wrappers(livepatch: PatchContext) -> Mapping[str, Call]:
    """The wrapper of each target, in wrapt's form (wrapped, instance, args, kwargs)."""
    by_request: bool = livepatch.facts.get("by_request", False)

    def create(wrapped: Call, worker: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        wait = livepatch.options["WAIT_SECONDS"] or float(
            worker.kv_transfer_config.get_from_extra_config(
                "push_registration_timeout",
                worker.kv_transfer_config.get_from_extra_config("decoder_kv_blocks_ttl", 480),
            )
        )
        answers = Answers(livepatch)
        look_at_writes(worker, answers)
        setattr(worker, _DESK, Desk(livepatch, wait))
        setattr(worker, _ANSWERS, answers)
        return result

    # Decode

    def register(wrapped: Call, worker: Any, args: Any, kwargs: Any) -> Any:
        """The writer is about to send a registration to prefill."""
        request_id, registration = args
        desk: Desk | None = getattr(worker, _DESK, None)
        agents = worker._remote_agents.get(registration["remote_engine_id"])
        if desk is None or not agents:
            return wrapped(*args, **kwargs)
        several = len(agents) != 1 or registration.get("remote_pp_size", 1) != 1
        if several or registration["remote_tp_size"] != registration["decode_tp_size"]:
            livepatch.count("not_covered")
            livepatch.say(
                "not_covered", "prefill and decode have different numbers of ranks: failures are not reported"
            )
            return wrapped(*args, **kwargs)
        prefill = (registration["remote_host"], registration["remote_port"])
        try:
            added = desk.register(request_id, agent_name(next(iter(agents.values()))), prefill)
        except OSError as error:
            livepatch.count("not_covered")
            livepatch.say("not_listening", f"prefill cannot tell what fails, this worker cannot listen: {error}")
            return wrapped(*args, **kwargs)
        return wrapped(request_id, {**registration, **added}) if added is not None else None

    def fail(worker: Any, request_id: str) -> None:
        """Report a failed load in the release's own way, with all of the request's blocks."""
        livepatch.count("failed")
        livepatch.say("failed", f"the KV of request {request_id} is not coming: a failed load")
        if by_request:
            worker._failed_recv_reqs.put(request_id)
            return
        worker._handle_failed_transfer(request_id, None)
        if worker._is_hma_required:  # the release leaves the blocks of models with several KV groups out
            groups = worker._recving_metadata[request_id].local_block_ids
            worker._invalid_block_ids.put({block for group in groups for block in group})

    # Prefill

    def look_at_writes(worker: Any, answers: Answers) -> None:
        """Note what the worker asks of its NIXL agent; the agent answers as ever."""
        agent = worker.nixl_wrapper

        def make(wrapped: Call, _: Any, args: Any, kwargs: Any) -> Any:
            handle = wrapped(*args, **kwargs)
            answers.made(handle)
            return handle

        def post(wrapped: Call, _: Any, args: Any, kwargs: Any) -> Any:
            answers.posting(args[0])
            return wrapped(*args, **kwargs)

        def check(wrapped: Call, _: Any, args: Any, kwargs: Any) -> Any:
            state = wrapped(*args, **kwargs)
            answers.state(args[0], state)
            return state

        def release(wrapped: Call, _: Any, args: Any, kwargs: Any) -> Any:
            result = wrapped(*args, **kwargs)
            answers.released(args[0])
            return result

        def listen(wrapped: Call, _: Any, args: Any, kwargs: Any) -> Any:
            look_for_left(worker, answers)
            return wrapped(*args, **kwargs)

        agent.make_prepped_xfer = livepatch.around(agent.make_prepped_xfer, make)
        agent.transfer = livepatch.around(agent.transfer, post)
        agent.check_xfer_state = livepatch.around(agent.check_xfer_state, check)
        agent.release_xfer_handle = livepatch.around(agent.release_xfer_handle, release)
        agent.get_new_notifs = livepatch.around(agent.get_new_notifs, listen)

    def base_id(worker: Any, request_id: str) -> str:
        """The part of an id that prefill and decode share, by the release's own rule."""
        return str(sys.modules[WORKER.partition(":")[0]].get_base_request_id(request_id))

    def look_for_left(worker: Any, answers: Answers) -> None:
        """The writer refuses registrations for requests that are over, and forgets what was refused."""
        while answers.left:
            request_id = answers.left.pop()
            while (registration := worker._pop_matching_registration(request_id)) is not None:
                refuse(answers, registration)
        if answers.tidy:
            answers.tidy = False
            for request_id, registration in list(worker._pending_d_registrations.items()):
                if answers.unwanted(registration):
                    del worker._pending_d_registrations[request_id]

    def refuse(answers: Answers, registration: Mapping[str, Any]) -> None:
        registered = answers.take(registration)
        if registered is not None:
            answers.refuse(registered)

    def registered(wrapped: Call, worker: Any, args: Any, kwargs: Any) -> Any:
        """The writer has a registration. What it does not match waits, unless its request is over."""
        result = wrapped(*args, **kwargs)
        answers: Answers | None = getattr(worker, _ANSWERS, None)
        if answers is not None:
            for request_id, registration in list(worker._pending_d_registrations.items()):
                if answers.take(registration) is not None and answers.over(base_id(worker, request_id)):
                    del worker._pending_d_registrations[request_id]
                    refuse(answers, registration)
        return result

    def push(wrapped: Call, worker: Any, args: Any, kwargs: Any) -> Any:
        """The writer begins to write, or, after a handshake, does so at last."""
        answers: Answers | None = getattr(worker, _ANSWERS, None)
        if answers is None:
            return wrapped(*args, **kwargs)
        request_id, _, registration = args
        if answers.unwanted(registration):
            livepatch.count("left")
            return None  # decode knows that, and its blocks may be another request's
        if livepatch.aside:
            return wrapped(*args, **kwargs)
        registered = answers.take(registration)
        with answers.leases:
            over = answers.over(base_id(worker, request_id))
            answers.writing_for = None if over else request_id
        if over:  # its blocks may be another request's by now
            livepatch.count("late")
            refuse(answers, registration)
            return None
        try:
            if registered is None:
                return wrapped(*args, **kwargs)
            with answers.writing(registered):
                return wrapped(*args, **kwargs)
        finally:
            answers.writing_for = None

    def shake(wrapped: Call, worker: Any, args: Any, kwargs: Any) -> Any:
        future = wrapped(*args, **kwargs)
        answers: Answers | None = getattr(worker, _ANSWERS, None)
        if answers is not None:
            answers.shaking(future)
        return future

    def load(wrapped: Call, worker: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        answers: Answers | None = getattr(worker, _ANSWERS, None)
        if answers is not None:
            metadata = args[0] if args else kwargs["metadata"]
            for request_id in metadata.reqs_in_batch:
                answers.begun(base_id(worker, request_id))
            if metadata.reqs_not_processed:
                answers.ended((base_id(worker, one), one) for one in metadata.reqs_not_processed)
        return result

    # Both

    def finished(wrapped: Call, worker: Any, args: Any, kwargs: Any) -> Any:
        desk: Desk | None = getattr(worker, _DESK, None)
        answers: Answers | None = getattr(worker, _ANSWERS, None)
        if desk is None or answers is None:
            return wrapped(*args, **kwargs)
        for request_id in desk.failed():
            if request_id in worker._recving_metadata:
                fail(worker, request_id)
            else:
                desk.ended(request_id)
        if not by_request:
            leave_out_writes(worker)
        with answers.leases:
            hold_leases(worker, answers)
            result = wrapped(*args, **kwargs)
            sent, received = (
                result[:2] if isinstance(result, tuple) else (result.finished_sending, result.finished_recving)
            )
            if sent:
                answers.ended((base_id(worker, one), one) for one in sent)
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
        f"{WORKER}._do_send_reg_notif": register,
        f"{WORKER}._handle_push_reg_notif": registered,
        f"{WORKER}._do_start_push_kv": push,
        f"{WORKER}.start_load_kv": load,
        f"{WORKER}.get_finished": finished,
        f"{WORKER}.get_transfer_results": finished,
        f"{BASE}._ensure_handshake": shake,
    }

"""The scheduler acts only on completions that it can act on; the connector still sees them all.

Source: vllm#43226, vllm#46240, vllm PR#53631.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

TARGET = "vllm.v1.core.sched.scheduler:Scheduler._update_from_kv_xfer_finished"


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of each target, in wrapt's form (wrapped, instance, args, kwargs)."""
    # Whether this release frees a finished request's blocks when its receive completes (from 0.16).
    receive_frees: bool = livepatch.facts.get("receive_frees", True)

    def drop(kind: str, request_id: str) -> None:
        livepatch.count(kind)
        livepatch.say(kind, f"dropped a completion the scheduler cannot act on: {kind}, request {request_id}")

    def actionable(scheduler: Any, output: Any) -> tuple[set[str] | None, set[str] | None]:
        """The received and sent ids (either may be None) that hold for the scheduler's requests as they are now."""
        received, sent = output.finished_recving, output.finished_sending
        requests = scheduler.requests
        freed: set[str] = set()
        keep: set[str] = set()
        for request_id in received or ():
            request = requests.get(request_id)
            if request is None:
                drop("recv_unknown", request_id)
            elif request.status == type(request.status).WAITING_FOR_REMOTE_KVS:
                keep.add(request_id)
            elif receive_frees and request.is_finished():
                keep.add(request_id)
                freed.add(request_id)
            else:
                drop("recv_not_waiting", request_id)
        if received and len(keep) < len(received):
            received = keep
        keep = set()
        for request_id in sent or ():
            request = requests.get(request_id)
            if request is None:
                drop("send_unknown", request_id)
            elif not request.is_finished():
                drop("send_not_finished", request_id)
            elif request_id in freed:
                drop("send_already_freed", request_id)
            else:
                keep.add(request_id)
        if sent and len(keep) < len(sent):
            sent = keep
        return received, sent

    def update(wrapped: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any) -> Any:
        output = args[0] if args else kwargs["kv_connector_output"]
        raw = output.finished_recving, output.finished_sending
        connector = scheduler.connector
        if connector is None:
            output.finished_recving, output.finished_sending = actionable(scheduler, output)
            try:
                return wrapped(*args, **kwargs)
            finally:
                output.finished_recving, output.finished_sending = raw

        see = connector.update_connector_output

        def see_all_then_leave_actionable(seen: Any) -> Any:
            # The method tells the connector first, in every release, and the connector may change what it is told. So
            # the moment between the two is where the ids are sorted; `raw` is what anybody afterwards finds again.
            nonlocal raw
            result = see(seen)
            raw = seen.finished_recving, seen.finished_sending
            seen.finished_recving, seen.finished_sending = actionable(scheduler, seen)
            return result

        own = vars(connector).get("update_connector_output")
        connector.update_connector_output = see_all_then_leave_actionable
        try:
            return wrapped(*args, **kwargs)
        finally:
            if own is None:
                del connector.update_connector_output
            else:
                connector.update_connector_output = own
            output.finished_recving, output.finished_sending = raw
            if not receive_frees:
                forget_gone(scheduler)

    def forget_gone(scheduler: Any) -> None:
        """Releases to 0.15 keep a received id for ever when its request ended before it was scheduled again."""
        lingering = scheduler.finished_recving_kv_req_ids
        for request_id in [name for name in lingering if name not in scheduler.requests]:
            lingering.discard(request_id)

    return {TARGET: update}

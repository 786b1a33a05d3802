"""The scheduler acts only on completions that it can act on; the connector still sees them all.

Source: vllm#43226, vllm#46240, vllm PR#53631.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Ids = set[str] | None
TARGET = "vllm.v1.core.sched.scheduler:Scheduler._update_from_kv_xfer_finished"


class _Sorter:
    """Stands where the scheduler tells its connector, which it does first in every release.

    The connector may change what it is told (MoRI-IO does), so the ids are sorted between the connector's look at them
    and the scheduler's; afterwards the output has again what the connector left in it.
    """

    __slots__ = ("actionable", "output", "raw", "scheduler", "see")

    def __init__(self, see: Any, scheduler: Any, actionable: Callable[[Any, Ids, Ids], tuple[Ids, Ids]]) -> None:
        self.see = see
        self.scheduler = scheduler
        self.actionable = actionable
        self.output: Any = None  # the one that the scheduler is acting on; another caller's passes through
        self.raw: tuple[Ids, Ids] | None = None

    def __call__(self, output: Any) -> Any:
        result = None if self.see is None else self.see(output)
        if output is self.output:
            received, sent = output.finished_recving, output.finished_sending
            if received or sent:
                self.raw = received, sent
                output.finished_recving, output.finished_sending = self.actionable(self.scheduler, received, sent)
        return result

    def done(self) -> None:
        if self.raw is not None:
            self.output.finished_recving, self.output.finished_sending = self.raw
            self.raw = None
        self.output = None


def wrappers(livepatch: PatchContext) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of each target, in wrapt's form (wrapped, instance, args, kwargs)."""
    # Whether this release frees a finished request's blocks when its receive completes (from 0.16).
    receive_frees: bool = livepatch.facts.get("receive_frees", True)

    def drop(kind: str, request_id: str) -> None:
        livepatch.count(kind)
        livepatch.say(kind, f"dropped a completion the scheduler cannot act on: {kind}, request {request_id}")

    def actionable(scheduler: Any, received: Ids, sent: Ids) -> tuple[Ids, Ids]:
        """The received and sent ids (either may be None) that hold for the scheduler's requests as they are now."""
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
        connector = scheduler.connector
        if connector is None:
            sorter = _Sorter(None, scheduler, actionable)
            sorter.output = output
            sorter(output)
        else:
            sorter = vars(connector).get("update_connector_output")
            if type(sorter) is not _Sorter:
                sorter = _Sorter(connector.update_connector_output, scheduler, actionable)
                connector.update_connector_output = sorter
            sorter.output = output
        try:
            return wrapped(*args, **kwargs)
        finally:
            sorter.done()
            if not receive_frees:
                forget_gone(scheduler)

    def forget_gone(scheduler: Any) -> None:
        """Releases to 0.15 keep a received id for ever when its request ended before it was scheduled again."""
        lingering = scheduler.finished_recving_kv_req_ids
        for request_id in [name for name in lingering if name not in scheduler.requests]:
            lingering.discard(request_id)

    return {TARGET: update}

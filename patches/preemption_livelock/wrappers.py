"""A running request that finds no block waits a step, where preempting others would free none now.

Source: vllm#49674, vllm PR#49675, vllm PR#50297.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

MODULE = "vllm.v1.core.sched.scheduler"
KEPT_AS = "_livepatch_spared"

Call = Callable[..., Any]


class _Spared:
    """What a scheduler runs, while it looks for somebody to preempt in favour of `request`; None at other times."""

    __slots__ = ("request", "running")

    def __init__(self) -> None:
        self.request: Any = None
        self.running: list[Any] = []


def wrappers(livepatch: PatchContext) -> Mapping[str, Call]:
    """The wrapper of each target.

    The release preempts from `running` until the request finds blocks or is preempted itself. Where the next victim's
    blocks would be fenced, it is shown a `running` of that request alone, and is not obeyed when it preempts that.
    """

    def made(original: Call, scheduler: Any, *rest: Any, **named: Any) -> None:
        original(*rest, **named)
        if not scheduler.defer_block_free:
            return
        if not all(_is_the_releases_own(scheduler, name) for name in ("schedule", "_preempt_request")):
            livepatch.count("other_scheduler")
            return
        spared = _Spared()
        manager = scheduler.kv_cache_manager
        allocate = manager.allocate_slots

        # Called for each running request in each step, so without a guard: what can fail has its own.
        def allocate_slots(_: Any, request: Any, *rest: Any, **named: Any) -> Any:
            blocks = allocate(request, *rest, **named)
            if blocks is None and not livepatch.aside:
                try:
                    found_none(scheduler, spared, request)
                except Exception as error:
                    livepatch.stand_aside("looking for whom to preempt", error)
            return blocks

        setattr(scheduler, KEPT_AS, spared)
        # A method: who wraps it in turn is given the pool, as of the release's own.
        manager.allocate_slots = types.MethodType(allocate_slots, manager)

    def found_none(scheduler: Any, spared: _Spared, request: Any) -> None:
        """Spare whoever else runs, where the release's next victim has a step in flight."""
        if request.status.name != "RUNNING":
            return  # one that is to be admitted preempts nobody
        running = scheduler.running
        victim = running[-1]
        if scheduler.policy.name == "PRIORITY":
            victim = max(running, key=lambda one: (one.priority, one.arrival_time))
        if victim.last_sched_seq > scheduler.processed_step_seq:
            livepatch.count("waited")
            spared.running, spared.request = running, request  # from here on nothing can fail
            scheduler.running = [request]

    def preempt(original: Call, scheduler: Any, *rest: Any, **named: Any) -> Any:
        spared: _Spared | None = vars(scheduler).get(KEPT_AS)
        if spared is None or spared.request is None:
            return original(*rest, **named)
        scheduler.running, spared.running, spared.request = spared.running, [], None
        return None

    return {
        f"{MODULE}:Scheduler.__init__": made,
        # Were the patch to stand aside between the two, those that are spared must still come back.
        f"{MODULE}:Scheduler._preempt_request": livepatch.lasting(preempt),
    }


def _is_the_releases_own(scheduler: Any, name: str) -> bool:
    """Whether a method is that of the class that was verified, not one of a subclass, whose loop may be another."""
    (owner, *_) = [kind for kind in type(scheduler).__mro__ if name in vars(kind)]
    return bool(owner.__module__ == MODULE)

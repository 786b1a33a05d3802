"""While nothing but holds remain, the engine core waits between its steps, and a worker for the next of them.

A hold is a finished request whose blocks are kept until a transfer of them has ended. Two parts, in two processes: the
engine core's loop, and the worker's end of the queue in shared memory through which it hears of each step.

Source: vllm PR#43433, vllm PR#45595, LMCache PR#4998 (who keeps the loop going); vllm PR#45224 (a lost notification).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

CORE = "vllm.v1.engine.core"
QUEUE = "vllm.distributed.device_communicators.shm_broadcast"

SHARE = 8
"""A wait is at most this part of the time for which nothing but holds have remained: what would have ended a hold of a
tenth of a second ends it 12 ms later at most."""

APART_SECONDS = 0.005
"""Steps without a token that come further apart than this come from a core that waits between them. A core that waits
for a load steps every millisecond or two, and its worker goes on spinning."""

LOOK_AGAIN_MS = 20
"""Milliseconds after which a worker that waits for a notification looks by itself. One may be lost (vllm PR#45224), and
to 0.26.0 the release's own wait has no end."""

SINCE = "_livepatch_holding_since"
"""Attribute of an engine core: since when (seconds, monotonic) nothing but holds have remained; None when more does."""

STEPPED = "_livepatch_stepped"
"""Attribute of a queue's `SpinCondition`: when (seconds, monotonic) the last step was read from it."""

ASLEEP = float("-inf")
"""What `last_read` of a `SpinCondition` is set to: so long ago that the release's own `wait` does not spin."""

Call = Callable[..., Any]


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    """At each target: a look at its calls, or a wrapper."""
    longest: float = livepatch.options["WAIT_SECONDS"]

    def before_input(engine: Any, *rest: Any, **named: Any) -> None:
        """Wait for a message, where the next step could bring nothing but the end of a hold."""
        if not nothing_but_holds(engine):
            vars(engine)[SINCE] = None
            return
        now, since = time.monotonic(), vars(engine).get(SINCE)
        if since is None:
            vars(engine)[SINCE] = now
            livepatch.count("slowed")
            return
        # The end of a hold is read from a step's result, and the results of so many steps are still to come.
        under_way = len(engine.batch_queue or ())
        seconds = min(longest, (now - since) / SHARE) / (1 + under_way)
        # Whatever is asked of the engine comes through this queue, and wakes it. It is not taken out here.
        messages = engine.input_queue
        with messages.not_empty:
            messages.not_empty.wait_for(lambda: messages.queue, seconds)

    def read(message: Any, messages: Any, *rest: Any, **named: Any) -> None:
        """Let a worker's next wait be one for a notification, if it was sent a step that a waiting core has made."""
        if not isinstance(message, tuple) or len(message) != 4 or message[0] != "execute_model":
            return
        condition = messages._spin_condition
        if condition is None:  # a reader on another machine, which waits at a socket
            return
        now = time.monotonic()
        before = vars(condition).get(STEPPED, now)
        vars(condition)[STEPPED] = now
        (scheduled,) = message[1]
        if not scheduled.total_num_scheduled_tokens and now - before > APART_SECONDS:
            condition.last_read = ASLEEP

    def wait_for_step(original: Call, condition: Any, timeout_ms: int | None = None, *rest: Any, **named: Any) -> Any:
        stepped = vars(condition)[STEPPED]
        if time.monotonic() - stepped > condition.busy_loop_s:
            condition.last_read = stepped  # where the release itself would spin no more
            return original(timeout_ms, *rest, **named)
        return original(LOOK_AGAIN_MS if timeout_ms is None else min(timeout_ms, LOOK_AGAIN_MS), *rest, **named)

    def make_wait(release: Call, guarded: Call) -> Call:
        """Called for each turn of a reader that spins."""

        def wait(condition: Any, timeout_ms: int | None = None) -> Any:
            return (guarded if condition.last_read == ASLEEP else release)(condition, timeout_ms)

        return wait

    return {
        f"{CORE}:EngineCoreProc._process_input_queue": livepatch.before(before_input),
        f"{QUEUE}:MessageQueue.dequeue": livepatch.after(read),
        f"{QUEUE}:SpinCondition.wait": livepatch.shortcut(make_wait, wait_for_step),
    }


def nothing_but_holds(engine: Any) -> bool:
    """Whether the engine core goes on stepping only to learn that a finished request's transfer has ended."""
    scheduler = engine.scheduler
    # What waits for its KV is unfinished. Of a request that has just finished the workers are still to be informed.
    if scheduler.has_unfinished_requests() or scheduler.finished_req_ids or not scheduler.has_finished_requests():
        return False
    # Who pushes KV does so in the steps, and a decode engine waits for it.
    if any(_pushes(connector) for connector in (scheduler.connector, getattr(scheduler, "ec_connector", None))):
        return False
    # Data-parallel engines step together, in a loop of their own.
    if not _is_the_releases_own(engine, "run_busy_loop"):
        return False
    # Asked to end, to pause or to scale: each of these looks at what a step has left.
    if not engine.is_running() or engine._idle_state_callbacks or not engine.process_input_queue_block:
        return False
    return not any(entry[1].total_num_scheduled_tokens for entry in engine.batch_queue or ())


def _pushes(connector: Any) -> bool:
    pending = getattr(connector, "has_pending_push_work", None)
    return pending is not None and bool(pending())


def _is_the_releases_own(engine: Any, name: str) -> bool:
    """Whether a method is that of the class that was verified, not one of a subclass."""
    (owner, *_) = [kind for kind in type(engine).__mro__ if name in vars(kind)]
    return bool((owner.__module__, owner.__name__) == (CORE, "EngineCoreProc"))

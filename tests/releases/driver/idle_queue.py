# mypy: disable-error-code="import-not-found"
"""A worker's end of the release's queue in shared memory: how it waits for the next step, in looks and in time.

Writer and reader are one process's. The reader's time is the driver's: a turn of its spin takes SPIN seconds, a wait for
a notification what it was given. So no figure is of the machine.
"""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace
from typing import Any

from vllm.distributed.device_communicators import shm_broadcast
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

SPIN = 0.0001
CHUNK = 1 << 16


class Reading:
    """A queue and its one reader, which is told of steps so many seconds apart."""

    def __init__(self) -> None:
        self.now = 1e6
        self.spins = 0
        self.polls: list[float] = []
        """Milliseconds for which the reader was to wait for a notification, each time."""
        self.writes: list[tuple[float, Any, bool]] = []
        self.queue = shm_broadcast.MessageQueue(1, 1, max_chunk_bytes=CHUNK, max_chunks=4)
        self.reader = shm_broadcast.MessageQueue.create_from_handle(self.queue.export_handle(), 0)
        self.condition = self.reader._spin_condition
        self.condition.poller = SimpleNamespace(poll=self.poll)
        self.condition.last_read = self.now

    def poll(self, timeout: float | None) -> list[Any]:
        """What a wait comes to: it ends with a message that is told of, or in time."""
        assert timeout is not None or any(announced for _, _, announced in self.writes), "it would wait for ever"
        self.polls.append(-1 if timeout is None else timeout)
        until = float("inf") if timeout is None else self.now + timeout / 1000
        announced = [moment for moment, _, is_announced in self.writes if is_announced and moment <= until]
        self.pass_to(max(self.now, min([*announced[:1], until])))
        return []

    def spin(self) -> None:
        self.spins += 1
        self.pass_to(self.now + SPIN)

    def pass_to(self, moment: float) -> None:
        self.now = moment
        while self.writes and self.writes[0][0] <= moment:
            self.queue.enqueue(self.writes.pop(0)[1])

    def hear(self, after: float, message: Any, announced: bool = True) -> dict[str, Any]:
        """Read what comes `after` so many seconds, with a notification or without."""
        self.spins, self.polls = 0, []
        due = self.now + after
        self.writes.append((due, message, announced))
        kept = time.monotonic, shm_broadcast.sched_yield
        time.monotonic, shm_broadcast.sched_yield = (lambda: self.now), self.spin
        try:
            self.reader.dequeue(indefinite=True)
        finally:
            time.monotonic, shm_broadcast.sched_yield = kept
        return {"spins": self.spins, "polls": self.polls, "late": round(self.now - due, 4)}

    def close(self) -> None:
        """Without this, sockets that are still open keep the interpreter from ending, and shared memory is left behind."""
        for end in (self.queue, self.reader):
            end.local_socket.context.destroy(linger=0)
        del end, self.condition, self.reader, self.queue
        gc.collect()


class Told(Exception):
    """What an executor is about to tell its workers."""


def step(tokens: int = 0) -> Any:
    """What a worker is told of a step, as this release's executor does."""

    def enqueue(message: Any) -> None:
        raise Told(message)

    executor = object.__new__(MultiprocExecutor)
    vars(executor).update(rpc_broadcast_mq=SimpleNamespace(enqueue=enqueue), is_failed=False, output_rank=0)
    vars(executor).update(kv_output_aggregator=None, ec_output_aggregator=None)
    try:
        executor.execute_model(SimpleNamespace(total_num_scheduled_tokens=tokens))
    except Told as told:
        return told.args[0]
    raise AssertionError("the executor tells its workers of no step")


def play() -> dict[str, Any]:
    """How the reader waits for what comes after each of these; nothing where the release has another queue."""
    if not hasattr(shm_broadcast, "SpinCondition"):
        return {}
    found: dict[str, Any] = {}
    one = Reading()
    one.hear(0.05, step())
    one.hear(0.05, step())
    found["apart"] = one.hear(0.05, step())
    found["a request"] = one.hear(0.0301, step(7))
    found["after a request"] = one.hear(0.02, step(7))
    found["together"] = [one.hear(0.002, step()) for _ in range(3)][-1]
    one.hear(0.05, step())
    found["another call"] = one.hear(0.05, ("profile", (), {}, None))
    found["after another call"] = one.hear(0.05, step())
    one.hear(0.05, step())
    found["not told of"] = one.hear(0.05, step(), announced=False)
    one.hear(0.05, step())
    found["idle then"] = one.hear(1.5, step(7))
    found["something else"] = one.hear(0.01, {"broadcast": 1})
    one.close()
    return found

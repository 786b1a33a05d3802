"""Drive one release's scheduler through stale completion notifications; print what happened as one JSON object.

Run by a fresh interpreter with the release's sources, and the bundle or not, on PYTHONPATH. A case that does
not go as a user would want says so in its outcome: `survives`, or the exception and where it was raised, or
what was wrong at its end. What to expect of which release is none of this script's business.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import time

from result import begin_driver, print_result, raised

STARTED = time.perf_counter()
begin_driver()

import gc
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import real_scheduler as real
import vllm
from connector_double import ConnectorDouble
from worlds import Stepping

gc.enable()

WITNESS_TOKENS = 40
"""Longer than any case: the witness runs throughout, so a case shows whether others are disturbed."""


class LMCacheMPConnector(ConnectorDouble):
    """One that the patch takes for LMCache's, which announces a send of each request that ends."""


class World(Stepping):
    """A scheduler with one running request, the witness, and what was told to it and seen of it."""

    def __init__(self, scheduler_name: str, model_config: Any, kind: type = ConnectorDouble) -> None:
        connector = ("connector_double", "ConnectorDouble")
        super().__init__(real.make_scheduler(scheduler_name, model_config, connector))
        self.scheduler.connector.__class__ = kind
        self.reported: list[tuple[list[str], list[str]]] = []
        self.ran: dict[str, int] = {}
        self.add("witness", tokens=WITNESS_TOKENS)
        self.steps(2)

    @property
    def requests(self) -> dict[str, Any]:
        """The requests that the scheduler knows, by id."""
        requests: dict[str, Any] = self.scheduler.requests
        return requests

    def add(self, request_id: str, **options: Any) -> None:
        """Hand a new request to the scheduler; options as for `make_request`."""
        self.scheduler.add_request(real.make_request(request_id, **options))

    def step(
        self,
        recving: Sequence[str] = (),
        sending: Sequence[str] = (),
        before_answer: Callable[[], None] = lambda: None,
    ) -> None:
        """Schedule a step, and answer the oldest one with these completions."""
        scheduled = self.scheduler.schedule()
        self.unanswered.append((scheduled, real.run_model(scheduled)))
        for request_id in scheduled.num_scheduled_tokens:
            self.ran[request_id] = self.ran.get(request_id, 0) + 1
        before_answer()
        if len(self.unanswered) > self.ahead:
            scheduled, output = self.unanswered.popleft()
            # Workers report on every step that runs the model, if only that nothing ended.
            if recving or sending or scheduled.num_scheduled_tokens:
                output.kv_connector_output = real.transfers(recving, sending)
                self.reported.append((sorted(recving), sorted(sending)))
            self.scheduler.update_from_output(scheduled, output)

    def expect_loading(self, request_id: str) -> None:
        """Expect a request to wait for its KV, holding blocks."""
        waiting = real.status_name(self.requests[request_id]) == "WAITING_FOR_REMOTE_KVS"
        self.expect(waiting and request_id not in self.ran, "runs before its KV is there")

    def expect_kept(self, request_id: str) -> None:
        """Expect the blocks of a request that ended to be kept for its transfer."""
        kept = request_id in self.requests and self.requests[request_id].is_finished()
        self.expect(kept, "blocks freed before their transfer ended")

    def expect_freed(self, request_id: str) -> None:
        """Expect a completion reported in the last step to have freed a request."""
        self.expect(request_id not in self.requests, "valid id not honoured in its step")

    def expect_received(self, request_id: str) -> None:
        """Expect a completion reported in the last step to have readied a request that waited for it."""
        ready = request_id in self.scheduler.finished_recving_kv_req_ids
        self.expect(ready, "valid id not honoured in its step")
        if real.counts_fetches():
            self.expect(real.completed_fetches(self.scheduler) == 1, "completed load not counted")

    def finish(self) -> None:
        """Let all requests end, then look for whatever is left behind."""
        self.expect_ends(2 * WITNESS_TOKENS, 3)
        self.expect(not self.scheduler.finished_recving_kv_req_ids, "ids linger")
        self.expect_full_pool()
        self.expect(self.ran["witness"] >= WITNESS_TOKENS, "others disturbed")


def recv_unknown(world: World) -> None:
    """A receive ends of a request that never was, or is long gone."""
    world.step(recving=["ghost"])


def recv_running(world: World) -> None:
    """A receive ends of a request that runs already."""
    world.step(recving=["witness"])


def recv_waiting(world: World) -> None:
    """A receive ends of a request that waits, but for no KV."""
    world.step(recving=["new"], before_answer=lambda: world.add("new"))


def send_unknown(world: World) -> None:
    """A send ends of a request that never was, or is long gone."""
    world.step(sending=["ghost"])


def send_running(world: World) -> None:
    """A send ends of a request that still runs."""
    world.step(sending=["witness"])


def send_loading(world: World) -> None:
    """A send ends of a request that waits for its KV."""
    world.add("load", load=True)
    world.steps(2)
    world.expect_loading("load")
    world.step(sending=["load"])
    world.expect_loading("load")
    world.step(recving=["load"])
    world.expect_received("load")


def send_after_recv(world: World) -> None:
    """A client disconnects while its prompt loads; receive and send then end in one step."""
    world.add("gone", load=True, delay_free=True)
    world.steps(2)
    world.expect_loading("gone")
    real.abort(world.scheduler, "gone")
    world.expect_kept("gone")
    world.step(recving=["gone"], sending=["gone"])
    world.expect_freed("gone")


def mixed_batch(world: World) -> None:
    """Three valid completions and four stale ones in one step."""
    world.add("load", load=True)
    world.add("gone", load=True, delay_free=True)
    world.add("done", delay_free=True, tokens=1)
    world.steps(3)
    world.expect_loading("load")
    real.abort(world.scheduler, "gone")
    world.expect_kept("gone")
    world.expect_kept("done")
    world.step(recving=["load", "gone", "ghost", "witness"], sending=["done", "gone", "ghost"])
    world.expect_received("load")
    world.expect_freed("gone")
    world.expect_freed("done")


def same_id_later(world: World) -> None:
    """A receive ends of an unknown request; later, a request of that id waits for its own."""
    world.step(recving=["again"])
    world.add("again", load=True, tokens=8)
    world.steps(3)
    world.expect_loading("again")
    if "again" not in world.ran:
        world.step(recving=["again"])
        world.expect_received("again")


def recv_again(world: World) -> None:
    """A receive is reported, the request runs and ends, the receive is reported again."""
    world.add("load", load=True)
    world.steps(2)
    world.step(recving=["load"])
    world.steps(6)
    world.expect("load" not in world.requests, "requests never end")
    world.step(recving=["load"])


def send_again(world: World) -> None:
    """A send is reported and frees the blocks, then it is reported again."""
    world.add("done", delay_free=True, tokens=1)
    world.steps(3)
    world.expect_kept("done")
    world.step(sending=["done"])
    world.expect_freed("done")
    world.step(sending=["done"])


def abort_while_loading(world: World) -> None:
    """A client disconnects while its prompt loads; the receive ends later."""
    world.add("gone", load=True)
    world.steps(2)
    world.expect_loading("gone")
    real.abort(world.scheduler, "gone")
    world.steps(2)
    world.step(recving=["gone"])
    world.expect_freed("gone")


def abort_after_recv(world: World) -> None:
    """A client disconnects between its receive's end and the step that would resume its request."""
    world.add("gone", load=True)
    world.steps(2)
    world.step(recving=["gone"])
    world.expect_received("gone")
    real.abort(world.scheduler, "gone")
    world.expect_freed("gone")


def connector_gives_up(world: World) -> None:
    """No send ends, but the connector gives one up and adds it to what it is told."""
    world.add("done", delay_free=True, tokens=1)
    world.steps(3)
    world.expect_kept("done")
    world.scheduler.connector.expired = {"done"}
    world.step()
    world.expect_freed("done")


def send_before_recv(world: World) -> None:
    """A client disconnects while its prompt loads; the send is reported first, the load still writes."""
    world.add("gone", load=True, delay_free=True)
    world.steps(2)
    real.abort(world.scheduler, "gone")
    world.step(sending=["gone"])
    world.expect_kept("gone")
    world.steps(2)
    world.expect_kept("gone")
    world.step(recving=["gone"])
    world.expect_freed("gone")


def recv_before_send(world: World) -> None:
    """The same, the other way round: the blocks are still being sent when the load has ended."""
    world.add("gone", load=True, delay_free=True)
    world.steps(2)
    real.abort(world.scheduler, "gone")
    world.step(recving=["gone"])
    world.expect_kept("gone")
    world.step(sending=["gone"])
    world.expect_freed("gone")


def send_not_announced(world: World) -> None:
    """A client disconnects while its prompt loads; a send ends that nobody announced."""
    world.add("gone", load=True)
    world.steps(2)
    real.abort(world.scheduler, "gone")
    world.step(sending=["gone"])
    world.expect_kept("gone")
    world.step(recving=["gone"])
    world.expect_freed("gone")


def recv_again_while_sending(world: World) -> None:
    """A receive is reported once more while the blocks of its request, which has ended, are being sent."""
    world.add("done", load=True, delay_free=True, tokens=1)
    world.steps(2)
    world.step(recving=["done"])
    world.steps(4)
    world.expect_kept("done")
    world.step(recving=["done"])
    world.expect_kept("done")
    world.step(sending=["done"])
    world.expect_freed("done")


def id_used_again(world: World) -> None:
    """The id of a request whose load is still under way is used again: the load is not the new request's."""
    world.add("again", load=True)
    world.steps(2)
    real.abort(world.scheduler, "again")
    old = world.requests.get("again")
    world.add("again", load=True, tokens=8)
    world.steps(2)
    world.expect(world.requests["again"] is old, "blocks freed before their transfer ended")
    world.expect(world.scheduler.get_num_unfinished_requests() == 2, "a waiting request is not counted")
    world.step(recving=["again"])
    world.steps(2)
    world.expect_loading("again")
    world.step(recving=["again"])
    world.expect_received("again")


def id_used_again_aborted(world: World) -> None:
    """The id of a request whose send is under way is used again, by a client that disconnects meanwhile."""
    world.add("again", delay_free=True, tokens=1)
    world.steps(3)
    world.expect_kept("again")
    world.add("again", load=True)
    world.steps(1)
    real.abort(world.scheduler, "again")
    world.expect_kept("again")
    world.step(sending=["again"])
    world.expect_freed("again")


def send_late(world: World) -> None:
    """Blocks are freed without their send's completion, which comes when a later request of that id is being sent."""
    world.add("again", delay_free=True, tokens=1)
    world.steps(3)
    world.expect_kept("again")
    world.scheduler._free_blocks(world.requests["again"])
    world.add("again", delay_free=True, tokens=1)
    world.steps(3)
    world.expect_kept("again")
    world.step(sending=["again"])
    world.expect_kept("again")
    world.step(sending=["again"])
    world.expect_freed("again")


def empty_send_late(world: World) -> None:
    """LMCache tells of an aborted request that nothing of it was to be sent, when a later one of its id is being sent."""
    world.add("again", load=True, delay_free=True)
    world.steps(2)
    world.expect_loading("again")
    world.step(recving=["again"], before_answer=lambda: real.abort(world.scheduler, "again"))
    world.expect_freed("again")
    world.add("again", delay_free=True, tokens=1)
    world.steps(world.ahead)
    world.step(sending=["again"])
    world.expect_kept("again")
    world.steps(world.ahead)
    world.step(sending=["again"])
    world.expect_freed("again")


def stopped_while_loading(world: World) -> None:
    """A preempted request loads again, when a token that was under way before arrives and is its last.

    So it is with three pipeline stages. From 0.27 such a request is not let in again before. Of the releases before it,
    those with a queue of their own for what loads look for it only in the other, and end at the next step.
    """
    scheduler, connector, ahead = world.scheduler, world.scheduler.connector, world.ahead
    if hasattr(scheduler, "skipped_waiting") or hasattr(scheduler, "kv_holding_waiting"):
        return
    world.add("gone", tokens=1)
    request = world.requests["gone"]
    scheduled = scheduler.schedule()
    world.unanswered.append((scheduled, real.run_model(scheduled)))
    for request_id in scheduled.num_scheduled_tokens:
        world.ran[request_id] = world.ran.get(request_id, 0) + 1
    scheduler.running.remove(request)  # as `schedule` does where blocks are short
    scheduler._preempt_request(request, time.monotonic())
    connector.get_num_new_matched_tokens = lambda asked, computed: (16, True) if asked is request else (0, False)
    world.ahead += 2
    world.step()
    del connector.get_num_new_matched_tokens
    world.expect(real.status_name(request) == "WAITING_FOR_REMOTE_KVS", "does not load again")
    world.ahead = ahead
    while len(world.unanswered) > ahead:
        scheduler.update_from_output(*world.unanswered.popleft())
    world.expect_kept("gone")
    world.steps(2)
    world.expect_kept("gone")
    world.step(recving=["gone"])
    world.expect_freed("gone")


def healthy_load(world: World) -> None:
    """A load completes and its request runs to the end."""
    world.add("load", load=True)
    world.steps(3)
    world.expect_loading("load")
    world.step(recving=["load"])
    world.expect_received("load")
    world.steps(6)
    world.expect("load" not in world.requests and world.ran.get("load") == 2, "requests never end")


def healthy_send(world: World) -> None:
    """A request ends, and its blocks come back when, and not before, they were sent."""
    world.add("done", delay_free=True, tokens=1)
    world.steps(6)
    world.expect_kept("done")
    before = len(real.held_blocks(world.scheduler))
    world.step(sending=["done"])
    world.expect_freed("done")
    world.steps(3)
    world.expect(len(real.held_blocks(world.scheduler)) < before, "pool not full")


CASES: list[Callable[[World], None]] = [
    recv_unknown,
    recv_running,
    recv_waiting,
    send_unknown,
    send_running,
    send_loading,
    send_after_recv,
    mixed_batch,
    same_id_later,
    recv_again,
    send_again,
    abort_while_loading,
    abort_after_recv,
    connector_gives_up,
    send_before_recv,
    recv_before_send,
    send_not_announced,
    recv_again_while_sending,
    id_used_again,
    id_used_again_aborted,
    send_late,
    empty_send_late,
    stopped_while_loading,
    healthy_load,
    healthy_send,
]
LMCACHE = [empty_send_late]
"""Cases of a connector that announces sends of requests that never ran."""


def play(case: Callable[[World], None], scheduler_name: str, model_config: Any) -> dict[str, Any]:
    """Play one case on a scheduler of its own; return its outcome and whether the connector missed nothing."""
    world = World(scheduler_name, model_config, LMCacheMPConnector if case in LMCACHE else ConnectorDouble)
    try:
        case(world)
        world.finish()
        outcome = ", ".join(world.wrong) or "survives"
    except Exception as error:
        traceback.print_exc()
        outcome = raised(error)
    return {"outcome": outcome, "connector_saw_all": world.scheduler.connector.notified == world.reported}


def played() -> dict[str, dict[str, Any]]:
    """All cases on all scheduler classes."""
    return real.with_each_scheduler(lambda name, config: {case.__name__: play(case, name, config) for case in CASES})


def main() -> None:
    """Play all cases, and print what they came to."""
    imported = time.perf_counter()
    cases = played()
    result = {
        "counts_fetches": real.counts_fetches(),
        "cases": cases,
        "seconds": {"import": imported - STARTED, "cases": time.perf_counter() - imported},
    }
    print_result(result, vllm)


if __name__ == "__main__":
    main()

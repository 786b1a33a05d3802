"""Drive one release's scheduler through lost completions; print what happened as one JSON object.

Run with the release's sources, and the bundle or not, on PYTHONPATH: `kv_block_reaper.py CONNECTOR`, a class of
reaper_connectors.py. A case's outcome is the list of what went wrong, or the exception and where it was raised. Time is
a number that the cases set: the patch's clock.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from result import begin_driver, print_result, raised

begin_driver()

import gc
import inspect
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import real_scheduler as real
import vllm
from worlds import Stepping

gc.enable()

AGE = 100.0
"""LIVEPATCH_KV_BLOCK_REAPER_IDLE_SECONDS of the run."""

now = 0.0


def patch_module() -> Any:
    """The patch's code as this process runs it, None on stock."""
    return next((module for name, module in sys.modules.items() if name.endswith("kv_block_reaper.wrappers")), None)


def later(seconds: float) -> None:
    """Let time pass for the patch."""
    global now
    now += seconds


class World(Stepping):
    """A scheduler, and what was told to it and seen of it."""

    def __init__(self, scheduler_name: str, connector: str, model_config: Any) -> None:
        super().__init__(real.make_scheduler(scheduler_name, model_config, ("reaper_connectors", connector)))
        self.reported: list[tuple[list[str], list[str]]] = []

    def add(self, request_id: str, **options: Any) -> None:
        """Hand a new request to the scheduler; options as for `make_request`."""
        self.scheduler.add_request(real.make_request(request_id, **options))

    def step(self, recving: Sequence[str] = (), sending: Sequence[str] = ()) -> Any:
        """Schedule a step, answer the oldest one with these completions, and return what was scheduled."""
        scheduled = self.scheduler.schedule()
        self.unanswered.append((scheduled, real.run_model(scheduled)))
        if len(self.unanswered) > self.ahead:
            answered, output = self.unanswered.popleft()
            if recving or sending:
                output.kv_connector_output = real.transfers(recving, sending)
                self.reported.append((sorted(recving), sorted(sending)))
            self.scheduler.update_from_output(answered, output)
        return scheduled

    def hold(self, *request_ids: str) -> None:
        """Have requests end whose blocks are to be sent; no word will come that they were."""
        for request_id in request_ids:
            self.add(request_id, delay_free=True, tokens=1)
        self.steps(4)
        for request_id in request_ids:
            self.expect(self.is_held(request_id), "blocks freed before their transfer ended")

    def is_held(self, request_id: str) -> bool:
        """Tell whether a request has ended and is still known, and so has its blocks."""
        request = self.scheduler.requests.get(request_id)
        return request is not None and bool(request.is_finished())

    def expect_empty(self) -> None:
        """Expect all blocks in the pool, and nothing known."""
        self.expect(not self.scheduler.requests, "held for ever")
        self.expect_full_pool()


def by_age(world: World) -> None:
    """Blocks come back when their own hold is old, not before, and not with those of a younger one."""
    world.hold("old")
    later(AGE / 2)
    world.hold("young")
    later(AGE / 2 - 1)
    world.steps(3)
    world.expect(world.is_held("old") and world.is_held("young"), "freed too early")
    later(1)
    world.steps(3)
    world.expect(not world.is_held("old"), "held for ever")
    world.expect(world.is_held("young"), "freed too early")
    later(AGE)
    world.steps(3)
    world.expect_empty()


def under_load(world: World) -> None:
    """The age is the hold's: it comes back also while others run all the time, and disturbs none of them."""
    world.add("witness", tokens=40)
    world.hold("done")
    later(AGE)
    world.steps(3)
    world.expect("done" not in world.scheduler.requests, "held for ever")
    world.expect("witness" in world.scheduler.requests, "others disturbed")
    later(10 * AGE)
    world.steps(3)
    world.expect(not world.scheduler.requests["witness"].is_finished(), "others disturbed")
    world.steps(80)
    world.expect_empty()


def own_way(world: World) -> None:
    """They are freed by the scheduler's own `_free_blocks`, and by nothing else."""
    world.hold("done")
    freed: list[str] = []
    own = world.scheduler._free_blocks

    def noted(request: Any) -> None:
        freed.append(request.request_id)
        own(request)

    world.scheduler._free_blocks = noted
    later(AGE)
    world.steps(3)
    world.expect(freed == ["done"], "not freed by the scheduler's own way")
    world.expect_empty()


def in_flight(world: World) -> None:
    """A request ends while a step that writes its blocks is in flight: no one gets them before that was answered."""
    world.add("gone", delay_free=True, tokens=40)
    world.steps(3)
    scheduled = world.scheduler.schedule()
    world.unanswered.append((scheduled, real.run_model(scheduled)))
    real.abort(world.scheduler, "gone")
    world.expect(world.is_held("gone"), "blocks freed before their transfer ended")
    later(AGE)
    before = real.free_blocks(world.scheduler)
    fenced = getattr(world.scheduler, "defer_block_free", False)
    world.add("next", tokens=1)
    world.expect("gone" not in world.scheduler.requests, "held for ever")
    world.expect(not fenced or real.free_blocks(world.scheduler) == before, "fence not kept")
    while len(world.unanswered) > world.ahead:
        answered, output = world.unanswered.popleft()
        world.scheduler.update_from_output(answered, output)
    world.steps(6)
    world.expect_empty()


def receive_pending(world: World) -> None:
    """A client disconnects while its prompt loads: those blocks are written to, and never reaped."""
    world.add("gone", load=True, delay_free=True)
    world.steps(3)
    world.expect(real.status_name(world.scheduler.requests["gone"]) == "WAITING_FOR_REMOTE_KVS", "does not load")
    real.abort(world.scheduler, "gone")
    world.steps(2)
    later(100 * AGE)
    world.steps(3)
    world.add("next", tokens=1)
    world.steps(4)
    world.expect(world.is_held("gone"), "reaped while its KV arrived")
    knows_receives = "delay_free_blocks" in inspect.signature(real.Scheduler._free_request).parameters
    world.step(recving=["gone"])
    if knows_receives and not beside():  # the release frees at the first completion
        world.steps(2)
        world.expect_empty()
        return
    world.step()
    if beside():
        world.expect(world.is_held("gone"), "blocks freed before their transfer ended")
        later(AGE - 1)
        world.steps(3)
        world.expect(world.is_held("gone"), "freed too early")
        later(1)
    else:  # to 0.15 a receive frees nothing, and stays where it was noted
        world.step(sending=["gone"])
        world.scheduler.finished_recving_kv_req_ids.discard("gone")
    world.steps(3)
    world.expect_empty()


def late_completion(world: World) -> None:
    """The completion comes after the reap, with a valid one in the same step, and once more."""
    world.hold("done")
    later(AGE)
    world.steps(3)
    world.expect(not world.is_held("done"), "held for ever")
    world.hold("next")
    world.step(sending=["done", "next"])
    world.steps(1)
    world.expect(not world.is_held("next"), "valid id not honoured in its step")
    world.scheduler.connector.expired = {"done"}  # as MoRI-IO gives one up
    world.step(sending=["done"])
    world.steps(1)
    world.expect(world.scheduler.connector.notified == world.reported, "the connector was not told of all")
    world.expect("update_connector_output" not in vars(world.scheduler.connector) or beside(), "left on the connector")
    world.expect_empty()


def beside() -> bool:
    """Tell whether the other patch of this method is applied, too, which stays on the connector."""
    return any(name.endswith("stale_finished_recving.wrappers") for name in sys.modules)


def same_id_again(world: World) -> None:
    """A new request has the id of a reaped one, whose send ends after all: its own frees it, its own receive readies it."""
    world.hold("again")
    later(AGE)
    world.steps(3)
    world.hold("again")
    world.step(sending=["again"])
    world.steps(1)
    world.expect(world.is_held("again"), "blocks freed before their transfer ended")
    world.step(sending=["again"])
    world.steps(1)
    world.expect(not world.is_held("again"), "valid id not honoured in its step")
    world.hold("load")
    later(AGE)
    world.steps(3)
    world.scheduler.reset_prefix_cache()
    world.add("load", load=True, tokens=1)
    world.steps(3)
    world.expect(real.status_name(world.scheduler.requests["load"]) == "WAITING_FOR_REMOTE_KVS", "does not load")
    world.step(recving=["load"])
    world.steps(5)
    world.expect_empty()


def new_request_finds_blocks(world: World) -> None:
    """The engine sleeps, all blocks are held: who comes next is scheduled at once."""
    held = 0
    while real.free_blocks(world.scheduler) >= 3 + 3:
        world.hold(f"h{held}")
        held += 1
    before = real.free_blocks(world.scheduler)
    world.expect(before < 6, "pool not used up")
    later(AGE)
    # As many as the whole pool takes, so that nobody fits as long as anything is held.
    for number in range(held):
        world.add(f"n{number}", tokens=1)
    scheduled = world.step()
    ran = scheduled.num_scheduled_tokens
    world.expect(len(ran) >= 5, "new requests wait")
    world.steps(40)
    world.expect_empty()


def sleeps_again(world: World) -> None:
    """An engine core steps while `has_requests`: not for ever."""
    world.hold("done")
    later(AGE)
    for _ in range(50):
        if not world.scheduler.has_requests():
            break
        world.step()
    world.expect(not world.scheduler.has_requests(), "steps for ever")


CASES: list[Callable[[World], None]] = [
    by_age,
    under_load,
    own_way,
    in_flight,
    receive_pending,
    late_completion,
    same_id_again,
    new_request_finds_blocks,
    sleeps_again,
]


def play(case: Callable[[World], None], scheduler: str, connector: str, model_config: Any) -> list[str]:
    """Run one case in a world of its own and say what was wrong."""
    world = World(scheduler, connector, model_config)
    try:
        case(world)
    except Exception as error:
        traceback.print_exc()
        return [raised(error)]
    return world.wrong


def real_ages(model_config: Any) -> dict[str, float]:
    """What the patch reads of the release's own connectors, in seconds."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    engine: Any = ModuleType("mooncake.engine")  # releases to 0.18 import it for the scheduler's side, too
    engine.TransferEngine = object
    sys.modules.update({"mooncake": ModuleType("mooncake"), engine.__name__: engine})
    ages: dict[str, float] = {}
    for name in ("NixlConnector", "MooncakeConnector", "MoRIIOConnector"):
        module = KVConnectorFactory._registry[name]().__module__
        scheduler = real.make_scheduler("Scheduler", model_config, (module, name))
        ages[name] = patch_module().default_age(scheduler.connector)
    return ages


def take_clock() -> None:
    """From now on the patch's time is the cases'."""
    code = patch_module()
    if code is not None:
        code.time = SimpleNamespace(monotonic=lambda: now, perf_counter=lambda: now)


def played(connector: str, model_config: Any) -> dict[str, dict[str, list[str]]]:
    """What every case came to on every scheduler class."""
    return {
        scheduler: {case.__name__: play(case, scheduler, connector, model_config) for case in CASES}
        for scheduler in real.SCHEDULERS
    }


def main() -> None:
    """Play every case on every scheduler class, and print the outcomes."""
    real.quiet()
    take_clock()
    with tempfile.TemporaryDirectory() as directory:
        model_config = real.make_model_config(Path(directory))
        cases = played(sys.argv[1], model_config)
        ages = real_ages(model_config) if patch_module() is not None else {}
    print_result({"cases": cases, "ages": ages}, vllm)


if __name__ == "__main__":
    main()

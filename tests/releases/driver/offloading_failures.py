"""Drive one release's OffloadingConnector through transfers that fail; print what it came to as one JSON object.

Run by a fresh interpreter with the release's sources, and the bundle or not, on PYTHONPATH. The scheduler, both sides of the
connector, the manager of the CPU memory, the model runner's part for connectors and the aggregation of several workers'
outputs are the release's own; what the workers say is pickled on its way. Stood in for are what copies bytes
(`offloading_backend`) and the model, which samples WRONG where a request's blocks on any worker hold other than its own KV.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import time

from result import begin_driver, print_result, raised

STARTED = time.perf_counter()
begin_driver()

import gc
import pickle
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import offloading_backend as backend
import real_scheduler as real
import vllm
from model_runner import Runner, first
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from worlds import RIGHT, WRONG, Serving, Work

gc.enable()

first.get_forward_context = lambda: None

ANSWER = 6
BLOCK = real.BLOCK_SIZE
PROMPT = 4 * BLOCK + 5
EXTRA = {"spec_name": "Spec", "spec_module_path": "offloading_backend", "cpu_bytes_to_use": 1}
CONNECTOR = ("vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector", "OffloadingConnector")


class World(Serving):
    """A scheduler, its workers' connectors, their memory, and what clients got."""

    def __init__(self, mode: str, model_config: Any, policy: str, workers: int, **extra: Any) -> None:
        super().__init__(self.make_scheduler(mode, model_config, EXTRA | extra))
        self.scheduler.recompute_kv_load_failures = policy == "recompute"
        connector = self.scheduler.connector
        self.offloading = self.parts(connector)[0].connector_scheduler
        self.offloading.config = self.offloading.config._replace(num_workers=workers)
        given = (self.scheduler.vllm_config, KVConnectorRole.WORKER, self.scheduler.kv_cache_config)
        self.workers = [type(connector)(*given) for _ in range(workers)]
        self.movers = [backend.begin(self.parts(worker)[0].connector_worker) for worker in self.workers]
        # The V1 runner beside one kind of scheduler, and V2 beside the other.
        self.runners = [Runner(given[0], worker, v2=mode == "AsyncScheduler") for worker in self.workers]
        self.aggregator = KVOutputAggregator(workers)
        self.answers: dict[str, int] = {}
        self.loads: dict[str, int] = {}
        self.add("witness", answer=60)

    def make_scheduler(self, mode: str, model_config: Any, extra: dict[str, Any]) -> Any:
        """The scheduler; `extra` is what the OffloadingConnector is configured with."""
        return real.make_scheduler(mode, model_config, CONNECTOR, extra=extra)

    def parts(self, whole: Any) -> list[Any]:
        """Of a connector, or of its metadata: what is the OffloadingConnector's, and then what is others'."""
        return [whole]

    def add(self, name: str, like: str = "", answer: int = ANSWER, prompt: int = PROMPT) -> None:
        """A client comes; its prompt is its own, or begins with that of the request `like`."""
        request = real.make_request(like or name, tokens=answer, prompt=prompt)
        request.kv_transfer_params = None
        self.answers[name] = answer
        self.come(name, request)

    def step(self, between: Callable[[], None] = lambda: None) -> None:
        """Schedule a step, run the oldest that is not answered, and answer it."""
        scheduled = self.scheduler.schedule()
        work = self.work_of(scheduled)
        for load in self.parts(scheduled.kv_connector_metadata)[0].load_jobs.values():
            self.loads[load.req_id] = self.loads.get(load.req_id, 0) + 1
        self.unanswered.append((scheduled, work))
        between()
        if len(self.unanswered) > self.ahead:
            self.answer(*self.unanswered.popleft())

    def answer(self, scheduled: Any, work: list[Work]) -> None:
        """Let each worker run a step, and tell the scheduler what all of them said."""
        outputs = []
        sampled: dict[str, bool] = {}
        for runner, mover in zip(self.runners, self.movers, strict=True):
            output = real.run_model(scheduled)
            # In a process of its own, a worker has a copy.
            given = pickle.loads(pickle.dumps(scheduled))
            with runner.step(given) as connector_output:
                for name, tables, start, end, _ in work:
                    right = [self.compute(mover, name, table, start, end) for table in tables]
                    sampled[name] = all(right) and sampled.get(name, True)
            output.kv_connector_output = pickle.loads(pickle.dumps(connector_output))
            outputs.append(output)
        output = self.aggregator.aggregate(outputs, 0) if len(outputs) > 1 else outputs[0]
        for name, _, _, _, samples in work:
            index = output.req_id_to_index[name]
            output.sampled_token_ids[index] = [RIGHT if sampled[name] else WRONG] if samples else []
        self.deliver(scheduled, output)

    def compute(self, mover: backend.Mover, name: str, table: list[int], start: int, end: int) -> bool:
        """Read what a request attends to, and write its KV; whether what was read is its own."""
        held = [slot for block in table[: (start + BLOCK - 1) // BLOCK] for slot in mover.device.get(block, ())[:BLOCK]]
        right = held[:start] == [self.content(name, place) for place in range(start)]
        for place in range(start, end):
            block, offset = table[place // BLOCK], place % BLOCK
            slots = mover.device.get(block, ())[:offset]
            mover.device[block] = (*slots, self.content(name, place) if right else backend.LOST)
        return right

    def plan(self, kind: str, fate: str, worker: int = 0) -> None:
        """What becomes of a worker's next load or store."""
        self.movers[worker].plan[kind] = fate

    def finish(self) -> None:
        """Let all requests end, then look at what clients got, and for whatever is left behind."""
        self.expect_ends(120, 6)
        self.expect_full_pool()
        self.expect(not self.offloading._jobs, "jobs never end")
        self.expect(not any(mover.plan for mover in self.movers), "nothing failed")
        for name, tokens in self.clients.items():
            self.expect(WRONG not in tokens, f"{name} got a wrong token")
            whole = self.answers[name]
            if name != "gone" and self.ends.get(name) != "error":
                self.expect(len(tokens) == whole, f"{name} got another answer")


def store(world: World, fate: str = "well", worker: int = 0) -> None:
    """A request is computed and stored; `fate` is its store's, on one worker. Then the prefix cache loses it."""
    world.steps(6)  # the witness' own stores are over
    world.plan("store", fate, worker)
    world.add("first")
    world.steps(14)
    world.expect(world.ends.get("first") == "length", "first never ends")
    world.forget()


def stored(world: World, fate: str, worker: int = 0) -> None:
    """After a failed store another with the same prompt computes it itself, and stores it; a third loads it."""
    store(world, fate, worker)
    world.add("second", like="first")
    world.steps(14)
    world.expect("second" not in world.loads, "second loads what was not stored")
    world.forget()
    world.add("third", like="first")
    world.steps(14)
    world.expect("third" in world.loads, "third loads nothing")
    world.finish()


def flushed(world: World, fate: str) -> None:
    """A slow store fails, and others need its blocks: it is waited for. Whoever has the same prompt computes it."""
    world.steps(6)
    (mover,) = world.movers
    mover.patience = 50
    world.plan("store", fate)
    world.add("first", answer=1)
    world.steps(3)
    for number in range(4):
        world.add(f"filler{number}", prompt=real.MAX_MODEL_LEN - ANSWER)
        world.steps(4)
    world.expect(fate == "refused" or mover.waited_for.count(fate) == 1, "the store was not waited for")
    mover.patience = 1
    world.steps(8)
    world.forget()
    world.add("second", like="first")
    world.steps(14)
    world.expect("second" not in world.loads, "second loads what was not stored")
    world.finish()


def loaded(world: World, fate: str, worker: int = 0) -> None:
    """A load fails: the request computes its prompt, or ends; the next with it loads again, and gets it."""
    store(world)
    world.plan("load", fate, worker)
    world.add("second", like="first")
    world.step()
    world.add("beside", like="first")
    world.steps(16)
    world.expect("second" in world.loads, "second loads nothing")
    world.forget()
    world.add("third", like="first")
    world.steps(14)
    world.expect("third" in world.loads, "third loads nothing")
    world.finish()


def aborted(world: World, fate: str) -> None:
    """The client hangs up while the load that fails is under way."""
    store(world)
    world.plan("load", fate)
    world.add("gone", like="first")
    world.step()
    real.abort(world.scheduler, "gone")
    world.steps(6)
    world.add("third", like="first")
    world.steps(14)
    world.finish()


def cleared(world: World) -> None:
    """The connector's cache is reset while a store that fails is under way."""
    world.steps(6)
    world.plan("store", "failed")
    world.add("first")
    world.steps(2 + world.ahead)
    world.expect(bool(world.offloading._jobs), "no store is under way")
    world.offloading.reset_cache()
    world.steps(14)
    world.forget()
    world.add("second", like="first")
    world.steps(14)
    world.finish()


def longer(world: World, fate: str, worker: int = 0) -> None:
    """A load fails, of a request that computes more of its prompt: what was computed on it is not stored."""
    store(world)
    world.plan("load", fate, worker)
    world.add("second", like="first", prompt=PROMPT + 3 * BLOCK)
    world.step()
    world.steps(16)
    world.expect("second" in world.loads, "second loads nothing")
    world.forget()
    world.add("third", like="first", prompt=PROMPT + 3 * BLOCK)
    world.steps(14)
    world.expect("third" in world.loads, "third loads nothing")
    world.finish()


CASES: dict[str, tuple[str, int, Callable[[World], None]]] = {
    # policy, workers, what happens
    "well": ("recompute", 1, lambda world: loaded(world, "well")),
    "store_failed": ("recompute", 1, lambda world: stored(world, "failed")),
    "store_refused": ("recompute", 1, lambda world: stored(world, "refused")),
    "store_flushed": ("recompute", 1, lambda world: flushed(world, "failed")),
    "store_flushed_refused": ("recompute", 1, lambda world: flushed(world, "refused")),
    "store_first_worker": ("recompute", 2, lambda world: stored(world, "failed", 0)),
    "store_second_worker": ("recompute", 2, lambda world: stored(world, "refused", 1)),
    "load_failed": ("recompute", 1, lambda world: loaded(world, "failed")),
    "load_refused": ("recompute", 1, lambda world: loaded(world, "refused")),
    "load_first_worker": ("recompute", 2, lambda world: loaded(world, "refused", 0)),
    "load_second_worker": ("recompute", 2, lambda world: loaded(world, "failed", 1)),
    "load_fail": ("fail", 1, lambda world: loaded(world, "failed")),
    "load_longer": ("recompute", 1, lambda world: longer(world, "failed")),
    "load_longer_fail": ("fail", 1, lambda world: longer(world, "failed")),
    "load_aborted": ("recompute", 1, lambda world: aborted(world, "failed")),
    "store_raises": ("recompute", 1, lambda world: stored(world, "raises")),
    "load_raises": ("recompute", 1, lambda world: loaded(world, "raises")),
}
if hasattr(OffloadingConnectorScheduler, "reset_cache"):  # from 0.22.1
    CASES["store_cleared"] = ("recompute", 1, cleared)
if backend.tiers:
    CASES["tiered_store_failed"] = ("recompute", 1, lambda world: stored(world, "failed", 0))
    CASES["tiered_load_failed"] = ("recompute", 1, lambda world: loaded(world, "failed"))
if hasattr(TransferJob, "sync"):  # from 0.33.0, and off by default
    CASES["sync_well"] = ("recompute", 1, lambda world: longer(world, "well"))
    CASES["sync_failed"] = ("recompute", 1, lambda world: longer(world, "failed"))
    CASES["sync_fail"] = ("fail", 1, lambda world: longer(world, "failed"))
    CASES["sync_refused"] = ("recompute", 1, lambda world: longer(world, "refused"))
    CASES["sync_second_worker"] = ("recompute", 2, lambda world: longer(world, "failed", 1))


EXTRAS: dict[str, dict[str, Any]] = {
    "sync": {"sync_load_budget_bytes": 1 << 40},
    "tiered": {"spec_name": "Tiered"},
}
"""What the OffloadingConnector is configured with, by the first word of a case."""


def outcome(mode: str, model_config: Any, case: str) -> dict[str, Any]:
    """Run one case; what it came to, and who ended with an error."""
    policy, workers, play = CASES[case]
    try:
        world = World(mode, model_config, policy, workers, **EXTRAS.get(case.partition("_")[0], {}))
        play(world)
    except Exception as error:
        traceback.print_exc()
        return {"outcome": raised(error), "ends": []}
    ends = sorted(name for name, end in world.ends.items() if end == "error")
    return {"outcome": ", ".join(world.wrong) or "right", "ends": ends}


def found(wanted: Iterable[str]) -> dict[str, Any]:
    """What these cases came to with both schedulers."""
    return real.with_each_scheduler(lambda mode, config: {case: outcome(mode, config, case) for case in wanted})


def main() -> None:
    """Run the cases that are asked for, or all, and print what they came to."""
    played = found(sys.argv[1:] or list(CASES))
    seconds = time.perf_counter() - STARTED
    print_result({"seconds": seconds, **played}, vllm)


if __name__ == "__main__":
    main()

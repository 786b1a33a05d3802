# mypy: disable-error-code="import-not-found"
"""A release's scheduler, a pool whose every slot has contents, and a device that is a step behind.

The scheduler is the release's own, told to overlap its steps as on a GPU. Stood in for are the connector
(`loading_double`), whose loads end when the world says, the device and the model. A slot's content names the tokens up to
and including its own, so a request that runs on anything but its own KV is seen; the token that the model answers with
is known beforehand by its place, so a token that is lost, doubled or out of order is seen too.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import real_scheduler as real
from result import outcome_of
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request, RequestStatus

BLOCK = real.BLOCK_SIZE
QUIET_STEPS = 30
"""Steps in which nothing can happen any more before a world counts as stalled."""

real.MAX_MODEL_LEN = 2048


@dataclass
class Plan:
    """One client's request. Sizes in tokens, times in steps."""

    name: str
    prompt: list[int]
    outputs: int = 40
    arrives: int = 0
    hit: int = 0  # what is to be loaded of it
    once: bool = False  # whether it can be loaded only once, as of a prefill engine
    unanswered: int = 0  # how many lookups are answered with None first
    loading: int = 2  # steps that its loads take
    priority: int = 0
    leaves: int | None = None  # by when its client hangs up

    def __post_init__(self) -> None:
        self.tokens = [*self.prompt, *random.Random(f"answer to {self.name}").choices(range(3, 250), k=self.outputs)]
        self.contents: list[int] = []
        for token in self.tokens:
            self.contents.append(hash((self.contents[-1] if self.contents else 0, token)))


@dataclass
class Work:
    """A request's share of a step: tokens `start` to `end`, and its block table when that was scheduled."""

    plan: Plan
    start: int
    end: int
    blocks: list[int]
    samples: bool


@dataclass
class Load:
    """A load under way: tokens `start` to `end` into a request's blocks, done in the step `due`."""

    plan: Plan
    start: int
    end: int
    blocks: list[int]
    due: int


def prompt(name: str, length: int) -> list[int]:
    """A prompt like no other name's."""
    return random.Random(name).choices(range(3, 250), k=length)


class World:
    """One run. `mode` is the scheduler's class, `options` the scheduler configuration's; `lookahead` is how many tokens
    beyond its own a running request has slots for, as with speculative decoding."""

    def __init__(
        self,
        mode: str,
        model_config: Any,
        plans: list[Plan],
        options: Mapping[str, Any] | None = None,
        lookahead: int = 0,
    ) -> None:
        self.scheduler = real.make_scheduler(mode, model_config, ("loading_double", "LoadingDouble"), options=options)
        self.scheduler.num_lookahead_tokens = lookahead
        kept_free = getattr(self.scheduler, "_spec_decode_step_blocks", None)  # for such a step; a method to 0.31
        if lookahead and kept_free is not None:
            self.scheduler._spec_decode_step_blocks = (lambda *_: 1) if callable(kept_free) else 1
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.all_blocks = real.free_blocks(self.scheduler)
        self.plans = {plan.name: plan for plan in plans}
        self.ahead = int(mode == "AsyncScheduler")
        self.slots = [[0] * BLOCK for _ in range(real.NUM_BLOCKS)]
        self.in_flight: deque[tuple[Any, list[Work]]] = deque()
        self.loads: list[Load] = []
        self.answers: dict[str, list[int]] = {plan.name: [] for plan in plans}
        self.requests: list[Any] = []
        self.wrong: set[str] = set()
        self.loaded = 0
        self.now = 0

    def run(self, limit: int) -> str:
        """Run to the end; return `finishes`, or that it stalls or never ends, or what was wrong."""
        coming = deque(sorted(self.plans.values(), key=lambda plan: plan.arrives))
        quiet = 0
        while coming or self.scheduler.requests:
            while coming and coming[0].arrives <= self.now:
                self.requests.append(make_request(coming.popleft()))
                self.scheduler.add_request(self.requests[-1])
            for plan in self.plans.values():
                if plan.leaves == self.now:
                    self.scheduler.finish_requests(plan.name, RequestStatus.FINISHED_ABORTED)
            quiet = 0 if self.step() or coming or self.loads else quiet + 1
            left = f"{len(self.scheduler.requests)} of {len(self.plans)} unfinished"
            if quiet > QUIET_STEPS:
                return f"stalls: {left}"
            if self.now > limit:
                return f"never ends: {left}"
        for _ in range(3):
            self.step()
        if real.free_blocks(self.scheduler) != self.all_blocks:
            self.wrong.add("blocks never freed")
        for name, plan in self.plans.items():
            answer = plan.tokens[len(plan.prompt) :]
            if self.answers[name] != answer[: None if plan.leaves is None else len(self.answers[name])]:
                self.wrong.add("another answer")
        return ", ".join(sorted(self.wrong)) or "finishes"

    def step(self) -> bool:
        """Schedule a step and answer the oldest, which the device runs only now; return whether there was any work."""
        self.now += 1
        scheduled = self.scheduler.schedule()
        self.in_flight.append((scheduled, list(self.work(scheduled))))
        self.begin_loads()
        for _, works in self.in_flight:
            if any(self.pool.blocks[block].ref_cnt == 0 for work in works for block in work.blocks):
                self.wrong.add("blocks of a step in flight are free")
        self.end_loads()
        if len(self.in_flight) > self.ahead:
            self.answer(*self.in_flight.popleft())
        return bool(scheduled.num_scheduled_tokens)

    def work(self, scheduled: Any) -> Iterator[Work]:
        """What each request is to compute in a step."""
        starts = real.computed_before(scheduled)
        for name, count in scheduled.num_scheduled_tokens.items():
            (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            end = starts[name] + count
            samples = end >= self.scheduler.requests[name].num_tokens
            yield Work(self.plans[name], starts[name], end, list(blocks), samples)

    def answer(self, scheduled: Any, works: list[Work]) -> None:
        """Let the device run a step: each slot before a request's own must hold what is that request's."""
        output = real.run_model(scheduled)
        for work in works:
            plan, contents = work.plan, work.plan.contents
            for first in range(0, work.start, BLOCK):
                last = min(work.start, first + BLOCK)
                if self.slots[work.blocks[first // BLOCK]][: last - first] != contents[first:last]:
                    self.wrong.add("runs on KV that is not its own")
            for place in range(work.start, min(work.end, len(contents))):
                self.slots[work.blocks[place // BLOCK]][place % BLOCK] = contents[place]
            token = plan.tokens[work.end] if work.end < len(plan.tokens) else 0
            output.sampled_token_ids[output.req_id_to_index[plan.name]] = [token] if work.samples else []
        received = [load for load in self.loads if load.due < self.now]
        self.loads = [load for load in self.loads if load.due >= self.now]
        output.kv_connector_output = real.transfers([load.plan.name for load in received], [])
        for answered in self.scheduler.update_from_output(scheduled, output).values():
            for one in answered.outputs:
                self.answers[one.request_id] += one.new_token_ids

    def begin_loads(self) -> None:
        """Begin the loads of what was let in in this step."""
        for name, start, end in self.scheduler.connector.begun:
            (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            self.loads.append(Load(self.plans[name], start, end, list(blocks), self.now + self.plans[name].loading))
        self.scheduler.connector.begun.clear()

    def end_loads(self) -> None:
        """Write what has been loaded, in no order with the steps in flight: none of them may write the same blocks."""
        for load in self.loads:
            if load.due != self.now:
                continue
            written = set(load.blocks[load.start // BLOCK : (load.end - 1) // BLOCK + 1])
            for _, works in self.in_flight:
                if any(not written.isdisjoint(work.blocks) for work in works):
                    self.wrong.add("a load writes what a step in flight uses")
            for place in range(load.start, load.end):
                self.slots[load.blocks[place // BLOCK]][place % BLOCK] = load.plan.contents[place]
            self.loaded += load.end - load.start


def make_request(plan: Plan) -> Any:
    """Return the request that a plan describes."""
    parameters = {"hit": plan.hit, "once": plan.once, "unanswered": plan.unanswered}
    return Request(
        request_id=plan.name,
        prompt_token_ids=list(plan.prompt),
        sampling_params=SamplingParams(
            max_tokens=plan.outputs, ignore_eos=True, extra_args={"kv_transfer_params": parameters}
        ),
        pooling_params=None,
        arrival_time=float(plan.arrives),
        priority=plan.priority,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        **real.end_token_named_per_request(),
    )


def play(world: World, limit: int) -> dict[str, Any]:
    """Run a world; return what it came to and its figures."""
    outcome = outcome_of(lambda: world.run(limit))
    preemptions = sum(request.num_preemptions for request in world.requests)
    return {"outcome": outcome, "steps": world.now, "preemptions": preemptions, "loaded": world.loaded}

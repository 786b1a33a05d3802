# mypy: disable-error-code="import-not-found"
"""A scheduler, a pool of KV blocks whose every slot has contents, and an LMCache server that is stood in for.

The scheduler and the LMCache connector are the release's own. Stood in for are the connector's adapter, which talks to
the server (`ServerDouble`), the worker, and the model. A slot's content names the tokens up to and including its own, so
a request that runs on anything but its own KV is seen, wherever it came from.
"""

from __future__ import annotations

import contextlib
import importlib
import random
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import real_scheduler as real
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

BLOCK = real.BLOCK_SIZE
CHUNK = 4 * BLOCK
"""Tokens in one of LMCache's chunks."""
MULTI = ("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector", "MultiConnector")
POOL_BLOCKS = 100
STEP_TOKENS = 512
"""Tokens that one step computes at most: less than a long prompt."""
QUIET_STEPS = 40
"""Steps in which nothing can happen any more before a world counts as stalled."""
LONGEST = 4000
"""Steps after which a world counts as one that never ends."""


@dataclass
class Plan:
    """One client's request, and what becomes of it. Sizes in tokens, times in steps."""

    name: str
    prompt: list[int]
    hit: int = 0  # what LMCache holds of it, in whole chunks
    arrives: int = 0
    answered_after: int = 0  # the lookup; 0 is at once
    outputs: int = 2
    aborted_after: int | None = None  # counted from its arrival
    failing_loads: int = 0  # how many of its loads fail
    loads_before: int = 0  # how many of its loads succeed before those
    adapter: int = 0  # the LoRA adapter that it asks for
    priority: int = 0

    def contents(self) -> list[int]:
        """What each slot of its prompt and outputs (all token 7) holds once it is there."""
        held, result = 0, []
        for token in [*self.prompt, *[7] * self.outputs]:
            held = hash((held, token))
            result.append(held)
        return result


class ServerDouble:
    """Stands where `LMCacheMPSchedulerAdapter` stood: answers lookups, and keeps account of the read locks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.submitted: dict[str, int] = {}
        self.answers: dict[str, int] = {}
        self.locks: Counter[tuple[str, int]] = Counter()
        self.lmcache_tokens_per_chunk = CHUNK
        self.blocks_in_chunk = CHUNK // BLOCK
        self.is_healthy = True

    def num_blocks_per_chunk(self) -> int:
        """A chunk's size in vLLM's blocks."""
        return CHUNK // BLOCK

    def maybe_submit_lookup_request(self, request_id: str, *_: Any, **__: Any) -> None:
        """Begin a lookup, where none is under way."""
        self.submitted.setdefault(request_id, self.world.now)

    def check_lookup_result(self, request_id: str) -> int | None:
        """Answer with the hit's tokens when it is time, and lock its chunks."""
        if request_id not in self.submitted:
            return self.answers.get(request_id, 0)
        if request_id not in self.answers:
            plan = self.world.plans[request_id]
            if self.world.now < self.submitted[request_id] + plan.answered_after:
                return None
            self.answers[request_id] = plan.hit
            for chunk in range(plan.hit // CHUNK):
                self.locks[request_id, chunk] += 1
        return self.answers[request_id]

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Forget a lookup; its locks stay."""
        self.submitted.pop(request_id, None)
        self.answers.pop(request_id, None)

    def unlock(self, request_id: str, start: int, end: int) -> None:
        """Release the locks of the chunks from the one that holds `start` to the last that ends by `end`."""
        for chunk in range(start // CHUNK, end // CHUNK):
            self.locks[request_id, chunk] -= 1
            if self.locks[request_id, chunk] < 0:
                self.world.wrong.add("a read lock released twice")

    def end_session(self, request_id: str) -> None:
        """Take note of nothing: locks outlive the session."""

    def report_block_allocations(self, *_: Any, **__: Any) -> None:
        """Take note of nothing."""


class UnlockingServerDouble(ServerDouble):
    """A server's whose connector gives back the locks that it does not need."""

    def free_lookup_locks(self, token_ids: Any, start: int, end: int, request_id: str, **_: Any) -> None:
        """Release read locks without loading."""
        self.unlock(request_id, start, end)


@dataclass
class Transfer:
    """A load under way: each group's `blocks` take the tokens from `start` on, the first `skip` aside."""

    name: str
    start: int
    end: int
    skip: int
    blocks: list[list[int]]  # by KV cache group
    due: int


@dataclass
class World:
    """Everything of one run. `mode` is the scheduler class; `seed` decides how long transfers take.

    `windows` are the sliding windows of the KV cache groups beside the first, `adapters` how many LoRA adapters run at once,
    `options` the scheduler configuration's; `recomputes` says whether what failed to load is computed, or its request fails;
    at `resets`, in steps, all running requests are preempted and the prefix cache emptied. `beside` are a MultiConnector's
    other children, as a configuration names them; without one, LMCache's connector is the scheduler's.
    """

    mode: str
    model_config: Any
    connector: tuple[str, str]
    requests: Iterable[Plan]
    seed: int = 0
    windows: tuple[int, ...] = ()
    adapters: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    recomputes: bool = True
    resets: tuple[int, ...] = ()
    beside: tuple[Mapping[str, Any], ...] = ()
    now: int = 0
    loaded: int = 0
    recomputed: int = 0
    largest_load: int = 0
    most_committed: int = 0
    most_running: int = 0
    aborted_loads: int = 0
    wrong: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.plans = {plan.name: plan for plan in self.requests}
        self.contents = {
            plan.name: [[content ^ group for content in plan.contents()] for group in self.groups()]
            for plan in self.plans.values()
        }
        self.server: ServerDouble | None = None
        self.scheduler = self.make_scheduler()
        self.all_blocks = real.free_blocks(self.scheduler)
        self.slots = [[0] * BLOCK for _ in range(POOL_BLOCKS)]
        self.ended_at: dict[str, int] = {}
        self.transfers: list[Transfer] = []
        self.sending: dict[str, int] = {}
        # Connectors that have no state for a failed load wait for ever after one: not what is looked at here.
        bypasses = hasattr(importlib.import_module(self.connector[0]).LMCacheMPRequestState, "BYPASS_LMCACHE")
        self.failing = {plan.name: plan.failing_loads if bypasses else 0 for plan in self.plans.values()}
        self.succeeding = {plan.name: plan.loads_before for plan in self.plans.values()}
        self.unanswered: deque[tuple[Any, Any]] = deque()

    def make_scheduler(self) -> Any:
        """Build the release's scheduler and connector, the adapter replaced."""
        module = importlib.import_module(self.connector[0])
        unlocks = "free_lookup_locks" in getattr(module, self.connector[1]).update_state_after_alloc.__code__.co_names

        def adapter(*_: Any, **__: Any) -> ServerDouble:
            self.server = (UnlockingServerDouble if unlocks else ServerDouble)(self)
            return self.server

        replaced = [name for name in ("create_scheduler_adapter", "LMCacheMPSchedulerAdapter") if hasattr(module, name)]
        originals = {name: getattr(module, name) for name in replaced}
        try:
            for name in replaced:
                setattr(module, name, adapter)
            connector, extra = self.connector, {}
            if self.beside:
                module_path, name = self.connector
                lmcache = {"kv_connector": name, "kv_connector_module_path": module_path, "kv_role": "kv_both"}
                connector, extra = MULTI, {"connectors": [lmcache, *self.beside]}
            scheduler = real.make_scheduler(
                self.mode, self.model_config, connector, self.windows, self.adapters, self.options, extra
            )
        finally:
            for name, original in originals.items():
                setattr(module, name, original)
        scheduler.max_num_scheduled_tokens = min(STEP_TOKENS, scheduler.max_num_scheduled_tokens)
        scheduler.recompute_kv_load_failures = self.recomputes
        return scheduler

    def run(self) -> str:
        """Run to the end; return `finishes`, or how it stalls, or what was wrong."""
        quiet = 0
        coming = deque(sorted(self.plans.values(), key=lambda plan: plan.arrives))
        while coming or self.scheduler.requests or self.transfers:
            while coming and coming[0].arrives <= self.now:
                self.scheduler.add_request(make_request(coming.popleft()))
            for plan in self.plans.values():
                if plan.aborted_after is not None and plan.arrives + plan.aborted_after == self.now:
                    self.abort(plan.name)
            if self.now in self.resets:
                with contextlib.suppress(RuntimeError):  # it says so where loads hold blocks
                    self.scheduler.reset_prefix_cache(reset_running_requests=True)
            something = self.step()
            quiet = 0 if something or coming or self.sending or self.transfers or self.asked() else quiet + 1
            if quiet > QUIET_STEPS:
                return f"stalls with {self.scheduler.get_num_unfinished_requests()} of {len(self.plans)} unfinished"
            if self.now > LONGEST:
                return f"never ends: {self.scheduler.get_num_unfinished_requests()} of {len(self.plans)} unfinished"
        for _ in range(3):
            self.step()
        if real.free_blocks(self.scheduler) != self.all_blocks or self.scheduler.requests:
            self.wrong.add("blocks never freed")
        if isinstance(self.server, UnlockingServerDouble) and any(self.server.locks.values()):
            self.wrong.add("read locks never released")
        return ", ".join(sorted(self.wrong)) or "finishes"

    def abort(self, name: str) -> None:
        """End a request whose client has gone; a load that is under way must not count as arrived."""
        if any(transfer.name == name for transfer in self.transfers):
            if name in self.scheduler.finished_recving_kv_req_ids:
                self.wrong.add("a load under way counts as arrived")
            self.aborted_loads += 1
        real.abort(self.scheduler, name)

    def asked(self) -> bool:
        """Whether a lookup's answer is still to come."""
        assert self.server is not None
        return any(self.now < at + self.plans[name].answered_after for name, at in self.server.submitted.items())

    def step(self) -> bool:
        """Schedule a step, run it, and answer the oldest; return whether anything ran or arrived."""
        self.now += 1
        scheduled = self.scheduler.schedule()
        output = real.run_model(scheduled)
        output.sampled_token_ids = [[7] if self.compute(scheduled, name) else [] for name in output.req_ids]
        self.most_running = max(self.most_running, len(output.req_ids))
        self.account()
        lmcaches, *others = self.metadata(scheduled)
        for meta in lmcaches.requests:
            if meta.direction == "RETRIEVE":
                self.submit(meta)
            else:
                self.store(meta)
        for other in others:
            self.submit_beside(other)
        for name in scheduled.finished_req_ids:
            self.ended_at[name] = self.now
            self.sending[name] = self.now + self.random.randint(1, 3)
        self.unanswered.append((scheduled, output))
        arrived = self.answer() if len(self.unanswered) > (self.mode == "AsyncScheduler") else False
        return bool(scheduled.num_scheduled_tokens) or arrived

    def answer(self) -> bool:
        """Answer the oldest step with the transfers that have ended; return whether any has."""
        received, failed = set(), set()
        for transfer in [transfer for transfer in self.transfers if transfer.due <= self.now]:
            self.transfers.remove(transfer)
            received.add(transfer.name)
            failed |= self.complete(transfer)
        loading = {transfer.name for transfer in self.transfers} | received
        sent = {name for name, due in self.sending.items() if due <= self.now and name not in loading}
        for name in sent:
            del self.sending[name]
        # What a completed load freed is not sent any more.
        sent = {name for name in sent if name in self.scheduler.requests}
        scheduled, output = self.unanswered.popleft()
        output.kv_connector_output = real.transfers(received, sent)
        output.kv_connector_output.invalid_block_ids = failed
        self.scheduler.update_from_output(scheduled, output)
        return bool(received or sent)

    def blocks_of(self, name: str, group: int = 0) -> list[int]:
        """The blocks of a request in a KV cache group, in the order of its tokens."""
        return list(self.scheduler.kv_cache_manager.get_block_ids(name)[group])

    def groups(self) -> range:
        """The KV cache groups: one with full attention, then those with a sliding window."""
        return range(1 + len(self.windows))

    def compute(self, scheduled: Any, name: str) -> bool:
        """Run a request's share of the step; every slot before it must hold what is its own. Tell if it has a token."""
        start = real.computed_before(scheduled)[name]
        end = start + scheduled.num_scheduled_tokens[name]
        for group in self.groups():
            self.compute_group(name, group, start, end)
        plan = self.plans[name]
        self.recomputed += max(0, min(end, plan.hit, len(plan.prompt) - 1) - start)
        return bool(end >= self.scheduler.requests[name].num_tokens)

    def compute_group(self, name: str, group: int, start: int, end: int) -> None:
        """Read what the tokens from `start` on attend to in a group, and write theirs."""
        blocks, contents = self.blocks_of(name, group), self.contents[name][group]
        oldest = max(0, start - self.windows[group - 1] + 1) if group else 0
        for first in range(oldest // BLOCK * BLOCK, start, BLOCK):
            here = slice(max(first, oldest), min(start, first + BLOCK))
            if self.slots[blocks[first // BLOCK]][here.start - first : here.stop - first] != contents[here]:
                self.wrong.add("runs on KV that is not its own")
        for place in range(start, min(end, len(contents))):
            self.slots[blocks[place // BLOCK]][place % BLOCK] = contents[place]

    def metadata(self, scheduled: Any) -> list[Any]:
        """What a step tells the workers' connectors: LMCache's first, then those beside it."""
        given = scheduled.kv_connector_metadata
        return list(given.metadata) if self.beside else [given]

    def submit_beside(self, metadata: Any) -> None:
        """Begin the loads of a connector beside LMCache's."""

    def store(self, meta: Any) -> None:
        """Store what a step computes."""

    def submit(self, meta: Any) -> None:
        """Begin a load."""
        op = meta.op
        blocks = blocks_in(op)
        due = self.now + self.random.randint(1, 5)
        skip = getattr(op, "skip_first_n_tokens", 0)  # releases that say nothing of it load it over itself
        start = getattr(op, "start", self.blocks_of(meta.request_id).index(blocks[0][0]) * BLOCK)
        end = getattr(op, "end", start + len(blocks[0]) * BLOCK)
        if any(transfer.name == meta.request_id for transfer in self.transfers):
            self.wrong.add("two loads of one request at once")
        self.transfers.append(Transfer(meta.request_id, start, end, skip, blocks, due))
        self.largest_load = max(self.largest_load, end - start - skip)

    def complete(self, transfer: Transfer) -> set[int]:
        """Write what was loaded, into blocks that must still be its request's alone; return those that failed."""
        assert self.server is not None
        name = transfer.name
        self.server.unlock(name, transfer.start, transfer.end)
        if self.failing[name] and not self.succeeding[name]:
            self.failing[name] -= 1
            return {block for blocks in transfer.blocks for block in blocks[transfer.skip // BLOCK :]}
        self.succeeding[name] = max(0, self.succeeding[name] - 1)
        written = range(transfer.start + transfer.skip, transfer.end)
        for group in self.groups():
            self.write(transfer, group, written)
        self.loaded += len(written)
        return set()

    def write(self, transfer: Transfer, group: int, written: range) -> None:
        """Write a group's share of what was loaded; what has left the sliding window has the null block, and is not."""
        name, pool = transfer.name, self.scheduler.kv_cache_manager.block_pool
        owned = self.blocks_of(name, group) if name in self.scheduler.requests else []
        for place in written:
            index = place // BLOCK
            block = transfer.blocks[group][index - transfer.start // BLOCK]
            if pool.blocks[block].is_null:
                continue
            content = self.contents[name][group][place]
            again = self.slots[block][place % BLOCK] == content  # its own, once more
            if index >= len(owned) or owned[index] != block or (pool.blocks[block].ref_cnt != 1 and not again):
                self.wrong.add("a load writes into blocks that are not its request's")
            self.slots[block][place % BLOCK] = content

    def account(self) -> None:
        """Add up what requests that do not run yet hold of the pool for their loads, and still need."""
        committed = 0
        for request in self.scheduler.requests.values():
            if real.status_name(request) in ("WAITING_FOR_REMOTE_KVS", "WAITING"):
                held = len(self.blocks_of(request.request_id))
                committed += max(held, -(-request.num_tokens // BLOCK)) if held else 0
        self.most_committed = max(self.most_committed, committed)


def blocks_in(op: Any) -> list[list[int]]:
    """The blocks of a store or a load, by KV cache group; to LMCache 0.4.6 there is one."""
    nested = bool(op.block_ids) and isinstance(op.block_ids[0], list)
    return [list(group) for group in op.block_ids] if nested else [list(op.block_ids)]


def make_request(plan: Plan) -> Any:
    """Return the request that a plan describes."""
    return Request(
        request_id=plan.name,
        prompt_token_ids=list(plan.prompt),
        sampling_params=SamplingParams(max_tokens=plan.outputs, ignore_eos=True),
        pooling_params=None,
        priority=plan.priority,
        lora_request=LoRARequest(f"adapter{plan.adapter}", plan.adapter, "/none") if plan.adapter else None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        **real.end_token_named_per_request(),
    )

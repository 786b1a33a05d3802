"""Loads from LMCache in bounded parts, admitted only where every load in flight can still be finished.

Source: vllm#45388, vllm PR#44560, vllm PR#57104, LMCache PR#3382.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

PART_TOKENS = 32768
"""So much one request loads at a time where MAX_TOKENS is not set and the pool has no room to spare for a whole load.
Each further part costs steps."""

KEPT_AS = "_livepatch_loads"
ARRIVED = "_livepatch_arrived"
"""Attribute of a request: what `stale-finished-recving` notes when a load has arrived."""


class _Load:
    """One request's load; places are in tokens from the prompt's start.

    What is before `start` was in the pool already, what is before `at` has arrived or is under way, `end` is where the
    load ends, and LMCache's read locks reach to `locked`. `tokens` is the request's length when it began.
    """

    __slots__ = ("at", "end", "locked", "request", "start", "tokens", "tracker")

    def __init__(self, request: Any, tracker: Any, start: int, at: int, end: int, locked: int) -> None:
        self.request = request
        self.tracker = tracker
        self.start = start
        self.at = at
        self.end = end
        self.locked = locked
        self.tokens: int = request.num_tokens


class _Loads:
    """The loads of one scheduler, from the connector's answer until the request's last prefill step.

    Invariant: when nothing runs, the blocks that these requests still need are free. So whichever load arrives first,
    its request can run.

    An error of this class's own may come anywhere. So until a part was reported to the connector, its request is as if
    that part had failed to load, and from then on it waits for it.
    """

    def __init__(self, scheduler: Any, livepatch: PatchContext) -> None:
        self.livepatch = livepatch
        self.scheduler = scheduler
        self.connector = scheduler.connector
        self.ask: Callable[..., tuple[int | None, bool]] = self.connector.get_num_new_matched_tokens
        self.loads: dict[str, _Load] = {}
        self.arrived: list[Any] = []  # requests whose load has arrived, and that do not run yet
        self.short: list[Any] = []  # those whose next part finds no blocks in this step
        self.refused: str | None = None  # the request, first in this step, that does not fit
        self.let_in: list[Any] = []  # requests that the scheduler was made to let in, in this step
        self.in_vain = False  # whether it found no blocks for one of them in the step before, and looked no further
        self.stopped = False  # whether the pool has no blocks for `refused`, until this step ends
        self.allocates: Any = None  # what the pool's `allocate_slots` is otherwise, where another patch put it there
        self.needs: dict[str, int] = {}  # blocks that each load and running prefill still takes, as of this step
        self.sum = 0  # of all these
        self.changed: list[Any] | None = None  # loads to be counted anew; None: nothing was counted in this step
        self.seen = 0  # how many of the running requests were counted
        self.coordinator = scheduler.kv_cache_manager.coordinator
        self.managers = self.coordinator.single_type_managers
        self.latest: tuple[tuple[Any, ...], Any] = (), None
        """The hit that was looked for last in this step, and for what."""
        self.asks_for = inspect.signature(self.managers[0].get_num_blocks_to_allocate).parameters
        adapter = self.connector.scheduler_adapter
        blocks = adapter.num_blocks_per_chunk() * getattr(self.connector, "vllm_block_size", scheduler.block_size)
        self.chunk: int = getattr(adapter, "lmcache_tokens_per_chunk", blocks)
        whole = (
            [type(manager).__name__ for manager in self.managers] != ["FullAttentionManager"]
            or getattr(scheduler, "defer_async_loads", False)
            or getattr(scheduler, "aux_output_connector", None) is not None
        )
        given: int = livepatch.options["max_tokens"]
        self.is_given = given >= 0
        self.part_tokens = 0 if whole else given if self.is_given else PART_TOKENS
        self.connector.get_num_new_matched_tokens = livepatch.around(self.ask, self.matched, self.connector)
        livepatch.around_its(self.coordinator, "find_longest_cache_hit", self.found)

    # What the connector's tracker counts in: tokens from LMCache 0.4.7, blocks before and in vLLM's own.

    def unit(self, tracker: Any) -> tuple[str, int]:
        if hasattr(tracker, "num_lmcache_hit_tokens"):
            return "tokens", 1
        return "blocks", int(self.connector.vllm_block_size)

    def hit(self, tracker: Any) -> int:
        """Tokens of the prompt that LMCache holds, as the tracker has it."""
        name, size = self.unit(tracker)
        return int(getattr(tracker, f"num_lmcache_hit_{name}")) * size

    def note(self, tracker: Any, **tokens: int) -> None:
        """Set `lmcache_hit`, `vllm_hit` or `stored` of a tracker. AttributeError where it has no such field."""
        name, size = self.unit(tracker)
        for field, value in tokens.items():
            getattr(tracker, f"num_{field}_{name}")
            setattr(tracker, f"num_{field}_{name}", value // size)

    # Admission: what the scheduler asks for each request that holds nothing yet.

    def matched(
        self, original: Callable[..., Any], connector: Any, *rest: Any, **named: Any
    ) -> tuple[int | None, bool]:
        """Wraps the connector's `get_num_new_matched_tokens`."""
        return self.bounded(original, *rest, **named)

    def bounded(
        self, ask: Callable[..., tuple[int | None, bool]], request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """The connector's answer: bounded, or None (ask later) where the request would take what loads still need."""
        name = request.request_id
        if self.loads.pop(name, None) is not None:
            self.sum -= self.needs.pop(name, 0)
        # Behind one that does not fit, nobody is asked, as where the scheduler itself finds no blocks. And where it
        # found none for one that should have fitted, what has arrived comes first: else no step got as far as that.
        if self.refused is not None or (self.in_vain and self.some_have_arrived()):
            return None, False
        answer, later = ask(request, num_computed_tokens)
        if answer is None:
            return answer, later
        tracker = self.connector.request_trackers[name]
        locked = self.hit(tracker)
        if locked:  # some releases add to it each time they are asked
            self.note(tracker, stored=locked)
        if not answer and not self.loads:
            return answer, later
        end = num_computed_tokens + answer
        room = self.room(request, num_computed_tokens, end)
        if (self.loads or self.scheduler.running) and room < 0:
            self.refused = name
            self.livepatch.count("held_back")
            return (answer, later) if self.look_no_further() else (None, False)
        self.let_in.append(request)
        if not answer:
            return answer, later
        at = end if self.can_spare(room) else self.part_end(num_computed_tokens, end)
        self.loads[name] = _Load(request, tracker, num_computed_tokens, at, end, locked)
        if self.changed is not None:
            self.changed.append(request)  # the scheduler gives it blocks next
        if at < end:
            self.note(tracker, lmcache_hit=at)  # last: were this put back, it would be by what is in `loads`
        return at - num_computed_tokens, later

    def some_have_arrived(self) -> bool:
        """Whether a request whose load has arrived does not run yet. One that runs stays so in this step: drop it."""
        while self.arrived and self.arrived[-1].status.name == "RUNNING":
            self.arrived.pop()
        return bool(self.arrived)

    def look_no_further(self) -> bool:
        """Let the scheduler find no blocks for `refused`; False where what has arrived may still have to run behind it.

        It then ends its walk, as where it finds none by itself. If it had to ask later, it would look at all that
        wait, in each step.
        """
        if self.some_have_arrived():
            return False
        manager = self.scheduler.kv_cache_manager
        self.allocates = vars(manager).get("allocate_slots")
        guarded = self.livepatch.around(manager.allocate_slots, self.no_blocks, manager)
        self.stopped = True
        manager.allocate_slots = guarded
        return True

    def no_blocks(self, original: Callable[..., Any], manager: Any, request: Any, *rest: Any, **named: Any) -> Any:
        """Stands at the pool's `allocate_slots` from where a request was refused until the step ends."""
        return None if request.request_id == self.refused else original(request, *rest, **named)

    def part_end(self, start: int, end: int) -> int:
        """Where a part that begins at `start` ends: at a chunk's end, or where the load does."""
        if not self.part_tokens:
            return end
        chunks = max((start + self.part_tokens) // self.chunk, start // self.chunk + 1)
        return min(end, chunks * self.chunk)

    def room(self, request: Any, cached: int, end: int) -> int:
        """Blocks that are free beside all of a request, and all that loads and running prefills still need; less than 0
        where it does not fit.

        What is before `cached` is in the pool, what is before `end` will be loaded.
        """
        free: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free - self.needed(request, cached, end) - self.begun()

    def can_spare(self, room: int) -> bool:
        """Whether all blocks of a load can be taken at once: each request that runs can still compute a chunk."""
        grows = self.chunk // self.managers[0].block_size
        return not self.is_given and room >= grows * len(self.scheduler.running)

    def begun(self) -> int:
        """Blocks that all loads and all running prefills still take from the pool.

        All requests are counted once in a step. After that the scheduler gives blocks only to requests that it lets in,
        one after the other: to the load that was let in last, and to requests that it adds at the end of `running`.
        """
        running = self.scheduler.running
        if self.changed is None:
            self.changed = [load.request for load in self.loads.values()]
        for other in (*self.changed, *running[self.seen :]):
            name = other.request_id
            if name in self.loads or other.num_computed_tokens < other.num_prompt_tokens:
                needed = self.needed(other, 0, other.num_computed_tokens)
                self.sum += needed - self.needs.get(name, 0)
                self.needs[name] = needed
        self.changed.clear()
        self.seen = len(running)
        return self.sum

    def needed(self, request: Any, cached: int, computed: int) -> int:
        """Blocks that a request takes from the pool until it can answer with its first token, by the release's count.

        Where it gives blocks back as its window moves on, it never holds more than the release says at most.
        """
        scheduler = self.scheduler
        tokens = min(request.num_tokens + 1, scheduler.max_model_len)
        known: dict[str, Any] = {
            "num_tokens": min(tokens + scheduler.num_lookahead_tokens, scheduler.max_model_len),
            "total_computed_tokens": computed,
            "num_local_computed_tokens": cached,
            "num_tokens_main_model": tokens,
        }
        hits = self.hits(request) if cached else [()] * len(self.managers)
        total = 0
        for manager, hit in zip(self.managers, hits, strict=True):
            most = getattr(manager, "_max_admission_blocks_per_request", None)
            known["apply_admission_cap"] = most is None
            blocks = manager.get_num_blocks_to_allocate(
                request_id=request.request_id,
                new_computed_blocks=hit[: cached // manager.block_size],
                **{name: value for name, value in known.items() if name in self.asks_for},
            )
            if most is not None:
                held = manager.req_to_blocks.get(request.request_id, ())
                blocks = min(blocks, most - sum(not block.is_null for block in held))
            total += max(0, blocks)
        return total

    def found(self, original: Callable[..., Any], coordinator: Any, *asked: Any, **named: Any) -> Any:
        """Wraps the coordinator's `find_longest_cache_hit`. What the scheduler has looked for, it asks for next.

        A prompt of 262,144 tokens has 16,384 blocks, and is looked for in each step in which it waits.
        """
        answer = original(*asked, **named)
        self.latest = asked, answer[0]
        return answer

    def hits(self, request: Any) -> Any:
        """The blocks of a request that the pool has, for each group."""
        asked, found = self.latest
        length = request.num_tokens - 1
        if len(asked) == 2 and asked[0] is request.block_hashes and asked[1] == length:
            return found
        return self.coordinator.find_longest_cache_hit(request.block_hashes, length)[0]

    # Each step.

    def begin_step(self) -> None:
        """Load the next part of what has arrived, and see what waits to run."""
        self.refused = None
        self.in_vain = any(
            other.status.name in ("WAITING", "PREEMPTED") and not other.num_computed_tokens for other in self.let_in
        )
        self.let_in.clear()
        self.arrived.clear()
        self.needs.clear()
        self.sum, self.changed, self.seen = 0, None, 0
        received, failed = self.scheduler.finished_recving_kv_req_ids, self.scheduler.failed_recving_kv_req_ids
        for name, load in list(self.loads.items()):
            request = load.request
            if request.status.name == "WAITING_FOR_REMOTE_KVS":
                if name not in received:
                    continue
                if name in failed:
                    self.let_go(load)
                    if not request.num_computed_tokens:
                        del self.loads[name]  # the release gives its blocks back amid the step, and asks for it anew
                elif load.at < load.end and self.load_more(load):
                    continue
                else:
                    self.note(load.tracker, vllm_hit=load.start)
                self.arrived.append(request)
            elif not 0 < request.num_computed_tokens < load.tokens:  # not admitted, or prefilled, or preempted
                self.uncap(load)
                del self.loads[name]
            elif request.status.name != "RUNNING":
                self.arrived.append(request)

    def load_more(self, load: _Load) -> bool:
        """Begin a load's next part; False where there are no blocks for it now, or it is given up."""
        scheduler, request, manager = self.scheduler, load.request, self.scheduler.kv_cache_manager
        before, at = load.at, self.part_end(load.at, load.end)
        # Releases to 0.17 leave the computed tokens at 0 until the load has arrived, and then count its blocks.
        begun = request.num_computed_tokens
        try:
            waiting_for_load = type(load.tracker.state).WAITING_FOR_LOAD
            if manager.allocate_slots(request, at - begun, delay_cache_blocks=True) is None:
                if scheduler.running or len(scheduler.requests) > sum(scheduler.get_request_counts()):
                    self.short.append(request)  # somebody will give blocks back
                    scheduler.finished_recving_kv_req_ids.discard(request.request_id)
                else:
                    self.livepatch.count("prefilled_instead")
                    self.let_go(load)
                return False
            self.note(load.tracker, vllm_hit=load.at, lmcache_hit=at if at < load.end else load.locked)
            load.tracker.allocated_block_ids.clear()  # all are given again, and to 0.17 they are appended
            self.connector.update_state_after_alloc(request, manager.get_blocks(request.request_id), at - load.at)
            self.under_way(load, at, waiting_for_load)
        except Exception:
            request.num_computed_tokens = load.at  # the blocks that follow are there, and have nothing in them
            scheduler.failed_recving_kv_req_ids.add(request.request_id)
            raise
        if hasattr(scheduler, "_set_kv_fetch_stage"):
            scheduler._set_kv_fetch_stage(request, "in_progress")
        self.tell_statistics(load, before)
        self.livepatch.count("further_parts")
        return True

    def under_way(self, load: _Load, at: int, waiting_for_load: Any) -> None:
        """From here on the connector loads the part, and its request waits. Nothing of this can fail halfway."""
        request = load.request
        self.scheduler.finished_recving_kv_req_ids.discard(request.request_id)
        vars(request).pop(ARRIVED, None)  # that was the part before
        if request.num_computed_tokens:
            request.num_computed_tokens = at
        load.at = at
        load.tracker.state = waiting_for_load

    def tell_statistics(self, load: _Load, before: int) -> None:
        """What the release counts as loaded of a request: it counted the first part when it was admitted."""
        request, stats = load.request, self.scheduler.connector_prefix_cache_stats
        if hasattr(request, "num_external_computed_tokens"):  # to 0.19; 0.14 and 0.15 count it when it has arrived
            request.num_external_computed_tokens += load.at - before
        if stats is not None and not hasattr(self.scheduler, "_update_connector_prefix_cache_stats"):
            hits = "preempted_hits" if request.num_preemptions else "hits"
            setattr(stats, hits, getattr(stats, hits) + load.at - before)
        prefill = getattr(request, "prefill_stats", None)
        if prefill is not None and not request.num_preemptions:
            prefill.set(
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=load.start,
                num_external_cached_tokens=load.at - load.start,
            )

    def end_step(self) -> None:
        """What found no blocks has arrived all the same: an abort must free its blocks at once."""
        self.latest = (), None
        if self.stopped:
            self.stopped = False
            manager = self.scheduler.kv_cache_manager
            if self.allocates is None:
                del manager.allocate_slots
            else:
                manager.allocate_slots = self.allocates
        for request in self.short:
            if request.status.name == "WAITING_FOR_REMOTE_KVS":
                self.scheduler.finished_recving_kv_req_ids.add(request.request_id)
        self.short.clear()

    def put_back(self) -> None:
        """Leave the loads to the release: what has arrived is computed from there, what is under way is waited for."""
        with contextlib.ExitStack() as each:  # all, also where one cannot be given back
            each.callback(self.end_step)
            for load in self.loads.values():
                each.callback(self.let_go, load)
                each.callback(self.uncap, load)

    def uncap(self, load: _Load) -> None:
        """Let the tracker have all of a hit again, where its request was not let in."""
        if load.tracker.state.name == "PREFETCHING":
            self.note(load.tracker, lmcache_hit=load.locked)
            load.at = load.end  # its locks are the connector's affair, or `finished`'s

    # Read locks.

    def let_go(self, load: _Load) -> None:
        """Load no more parts."""
        if load.at < load.end:
            self.unlock(load.tracker, load.at, load.locked)
            load.end = load.at

    def finished(self, request: Any) -> None:
        """A request ends, perhaps before all was loaded, or any."""
        load = self.loads.pop(request.request_id, None)
        tracker = self.connector.request_trackers.get(request.request_id)
        if tracker is not None and tracker.state.name == "PREFETCHING":  # looked up, never admitted
            self.unlock(tracker, 0, load.locked if load is not None else self.hit(tracker))
        elif load is not None:
            self.let_go(load)

    def unlock(self, tracker: Any, start: int, end: int) -> None:
        """Release the read locks of chunks that will not be loaded. The first connectors know of none."""
        release = getattr(self.connector.scheduler_adapter, "free_lookup_locks", None)
        if release is None or start >= end:
            return
        token_ids = tracker.get_token_ids() if hasattr(tracker, "get_token_ids") else list(tracker.all_token_ids)
        known = inspect.signature(release).parameters
        more = {name: getattr(tracker, name) for name in ("cache_salt", "request_configs") if name in known}
        release(token_ids=token_ids, start=start, end=end, request_id=tracker.request_id, **more)


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    """A look at each scheduler that is made: what it calls in each step is wrapped where its connector asks for it."""
    all_loads: weakref.WeakSet[_Loads] = weakref.WeakSet()  # an engine that is dropped goes, and takes its own along

    def put_back() -> None:
        with contextlib.ExitStack() as each:
            for loads in all_loads:
                each.callback(loads.put_back)

    livepatch.on_stand_aside(put_back)

    def made(_: None, scheduler: Any, *rest: Any, **named: Any) -> None:
        """Serve a scheduler whose connector is LMCache's MP connector. One with another has nothing of this patch."""
        connector = scheduler.connector
        if not (hasattr(connector, "request_trackers") and hasattr(connector, "scheduler_adapter")):
            return
        loads = _Loads(scheduler, livepatch)
        setattr(scheduler, KEPT_AS, loads)
        all_loads.add(loads)

        def schedule(original: Callable[..., Any], scheduler: Any, *rest: Any, **named: Any) -> Any:
            loads.begin_step()
            try:
                return original(*rest, **named)
            finally:
                loads.end_step()

        def connector_finished(
            original: Callable[..., Any], scheduler: Any, request: Any, *rest: Any, **named: Any
        ) -> Any:
            loads.finished(request)
            return original(request, *rest, **named)

        livepatch.around_its(scheduler, "schedule", schedule)
        livepatch.around_its(scheduler, "_connector_finished", connector_finished)

    return {f"{SCHEDULER}.__init__": livepatch.after(made)}

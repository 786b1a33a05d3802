"""Where a part of a load ends, and who is left alone. What needs a scheduler is in tests/releases."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_livepatch.patches.chunked_lmcache_load import wrappers as patch
from vllm_livepatch.patches.stale_finished_recving import wrappers as stale
from vllm_livepatch.sitecustomize import settings
from vllm_livepatch.sitecustomize.context import PatchContext
from vllm_livepatch.tools.bundles import catalogue

NAME = "chunked-lmcache-load"
INIT = f"{patch.SCHEDULER}.__init__"
TOGGLE = "LIVEPATCH_CHUNKED_LMCACHE_LOAD"
FROM_THE_FIELD = "CHUNKED_LMCACHE_MAX_TOKENS_PER_LOAD"


def context(max_tokens: int = 32768) -> PatchContext:
    return PatchContext(NAME, {"max_tokens": max_tokens}, {}, lambda: None)


class FullAttentionManager:
    def __init__(self) -> None:
        self.block_size = 16
        self.req_to_blocks: dict[str, list[int]] = {}

    def get_num_blocks_to_allocate(self) -> int:
        raise NotImplementedError


def scheduler(connector: Any) -> Any:
    coordinator = SimpleNamespace(
        single_type_managers=[FullAttentionManager()], find_longest_cache_hit=lambda hashes, tokens: ([[]],)
    )
    return SimpleNamespace(
        connector=connector,
        block_size=16,
        finished_recving_kv_req_ids=set(),
        failed_recving_kv_req_ids=set(),
        kv_cache_manager=SimpleNamespace(coordinator=coordinator),
    )


def lmcache(chunk: int) -> Any:
    adapter = SimpleNamespace(num_blocks_per_chunk=lambda: chunk // 16)
    return SimpleNamespace(
        request_trackers={},
        scheduler_adapter=adapter,
        vllm_block_size=16,
        get_num_new_matched_tokens=lambda request, computed: (None, True),
    )


@given(
    chunk=st.integers(1, 64).map(lambda blocks: blocks * 16),
    max_tokens=st.integers(1, 5000),
    blocks=st.integers(0, 300),
    more=st.integers(1, 5000),
)
def test_parts_are_whole_chunks_and_use_up_the_hit(chunk: int, max_tokens: int, blocks: int, more: int) -> None:
    loads = patch._Loads(scheduler(lmcache(chunk)), context(max_tokens))
    start = blocks * 16
    end, parts = start + more, 0
    while start < end:
        at = loads.part_end(start, end)
        assert start < at <= end
        assert at == end or at % chunk == 0
        assert at - start <= max(max_tokens, chunk)
        start, parts = at, parts + 1
    assert parts <= 2 + more // max(1, min(max_tokens // chunk, 1) * chunk)


def test_an_answer_to_come_later_passes_through() -> None:
    connector = lmcache(64)
    loads = patch._Loads(scheduler(connector), context())
    assert connector.get_num_new_matched_tokens is not loads.ask
    assert connector.get_num_new_matched_tokens(SimpleNamespace(request_id="one"), 0) == (None, True)


def test_an_error_of_its_own_is_answered_by_the_connector_asked_once() -> None:
    asked = []

    def ask(request: Any, computed: int) -> tuple[int, bool]:
        asked.append(request.request_id)
        return 640, True

    connector = lmcache(64)
    connector.get_num_new_matched_tokens = ask
    livepatch = context()
    patch._Loads(scheduler(connector), livepatch)
    one = SimpleNamespace(request_id="one")  # the connector knows of no tracker of it
    assert connector.get_num_new_matched_tokens(one, 0) == (640, True)
    assert (asked, livepatch.aside) == (["one"], True)
    assert connector.get_num_new_matched_tokens(one, 0) == (640, True)
    assert asked == ["one", "one"]


def test_a_field_that_the_tracker_lacks_is_not_made() -> None:
    loads = patch._Loads(scheduler(lmcache(64)), context())
    tracker = SimpleNamespace(num_lmcache_hit_tokens=128)
    with pytest.raises(AttributeError):
        loads.note(tracker, vllm_hit=64)
    assert vars(tracker) == {"num_lmcache_hit_tokens": 128}


@pytest.mark.parametrize("connector", [SimpleNamespace(get_num_new_matched_tokens=None), None])
def test_a_scheduler_with_another_connector_or_none_has_nothing_of_this_patch(connector: Any) -> None:
    made = scheduler(connector)
    as_it_was = dict(vars(made))
    patch.wrappers(context())[INIT].look(None, made)
    assert vars(made) == as_it_was
    assert connector is None or connector.get_num_new_matched_tokens is None


@pytest.mark.parametrize(
    ("environ", "toggle", "tokens"),
    [
        ({}, "auto", -1),
        ({f"{TOGGLE}_MAX_TOKENS": "4096"}, "auto", 4096),
        ({FROM_THE_FIELD: "4096"}, "auto", 4096),
        ({f"{TOGGLE}_MAX_TOKENS": ""}, "auto", -1),  # counts as unset
        ({f"{TOGGLE}_MAX_TOKENS": "0"}, "off", 0),
        ({FROM_THE_FIELD: "0"}, "off", 0),
        ({TOGGLE: "on", f"{TOGGLE}_MAX_TOKENS": "0"}, "on", 0),
    ],
)
def test_options(environ: dict[str, str], toggle: str, tokens: int) -> None:
    found = settings.read([catalogue.load()[NAME].patch], environ)
    assert (found.toggles[NAME], found.options[NAME]["max_tokens"], found.errors) == (toggle, tokens, ())


@pytest.mark.parametrize("value", ["-1", "many", "1.5"])
def test_what_is_no_number_of_tokens_counts_as_the_default(value: str) -> None:
    found = settings.read([catalogue.load()[NAME].patch], {f"{TOGGLE}_MAX_TOKENS": value})
    assert (found.toggles[NAME], found.options[NAME]["max_tokens"]) == ("auto", -1)
    assert f"{TOGGLE}_MAX_TOKENS" in found.errors[0]


def test_without_parts_all_is_loaded_at_once() -> None:
    loads = patch._Loads(scheduler(lmcache(64)), context(0))
    assert loads.part_end(0, 100_000) == 100_000


def test_what_has_arrived_comes_first_where_somebody_was_let_in_in_vain() -> None:
    """The step before ended at a request that should have fitted: the next one looks at what has arrived instead."""
    connector = lmcache(64)
    asked: list[Any] = []

    def matched(request: Any, computed: int) -> tuple[None, bool]:
        asked.append(request)
        return None, True

    connector.get_num_new_matched_tokens = matched
    loads = patch._Loads(scheduler(connector), context())
    waiting = SimpleNamespace(name="WAITING")
    tracker = SimpleNamespace(state=SimpleNamespace(name="READY"))
    there = SimpleNamespace(request_id="there", status=waiting, num_computed_tokens=64, num_tokens=128)
    new = SimpleNamespace(request_id="new", status=waiting, num_computed_tokens=0)
    loads.loads["there"] = patch._Load(there, tracker, 0, 64, 64, 64)
    loads.begin_step()
    assert connector.get_num_new_matched_tokens(new, 0) == (None, True)
    loads.let_in.append(new)
    loads.begin_step()
    assert connector.get_num_new_matched_tokens(new, 0) == (None, False)
    loads.begin_step()
    assert connector.get_num_new_matched_tokens(new, 0) == (None, True)
    assert len(asked) == 2


def test_a_part_under_way_has_not_arrived() -> None:
    """`stale-finished-recving` keeps a preempted request's blocks for it: the part before does not count."""
    request = SimpleNamespace(request_id="a", num_computed_tokens=64, num_tokens=200)
    setattr(request, stale.ARRIVED, 1)
    load = patch._Load(request, SimpleNamespace(state=None), 0, 64, 192, 192)
    patch._Loads(scheduler(lmcache(64)), context()).under_way(load, 128, "waiting")
    assert (load.at, request.num_computed_tokens, load.tracker.state) == (128, 128, "waiting")
    assert not hasattr(request, stale.ARRIVED)


# What is admitted


class Pool(FullAttentionManager):
    """As the release counts: the blocks that so many tokens take, less those that the request has."""

    def get_num_blocks_to_allocate(  # type: ignore[override]
        self, request_id: str, num_tokens: int, new_computed_blocks: Any, total_computed_tokens: int
    ) -> int:
        held = len(self.req_to_blocks.get(request_id, ())) + len(new_computed_blocks)
        return -(-num_tokens // self.block_size) - held


def with_pool(free: int, *running: Any, lookahead: int = 0, max_model_len: int = 4096, given: int = 32768) -> Any:
    made = scheduler(lmcache(64))
    pool = Pool()
    pool.req_to_blocks = {other.request_id: other.held for other in running}
    made.kv_cache_manager.coordinator = SimpleNamespace(
        single_type_managers=[pool],
        find_longest_cache_hit=lambda hashes, tokens: ([list(range(tokens // 16))],),
    )
    made.kv_cache_manager.block_pool = SimpleNamespace(get_num_free_blocks=lambda: free)
    made.running = list(running)
    made.num_lookahead_tokens = lookahead
    made.max_model_len = max_model_len
    return patch._Loads(made, context(given))


def asks(tokens: int, computed: int = 0, held: int = 0) -> Any:
    return SimpleNamespace(
        request_id=f"{tokens}-{held}",
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        num_computed_tokens=computed,
        block_hashes=[],
        held=list(range(held)),
    )


@pytest.mark.parametrize(
    ("tokens", "lookahead", "longest", "blocks"),
    [
        (159, 0, 4096, 10),
        (160, 0, 4096, 11),  # the first token that it answers with needs a slot too
        (160, 15, 4096, 11),
        (160, 16, 4096, 12),  # and what a drafter proposes beside it
        (160, 16, 160, 10),  # but none is longer than the model allows
    ],
)
def test_a_request_fits_where_its_first_answer_does(tokens: int, lookahead: int, longest: int, blocks: int) -> None:
    for free, fits in ((blocks, True), (blocks - 1, False)):
        loads = with_pool(free, lookahead=lookahead, max_model_len=longest)
        assert (loads.room(asks(tokens), 0, tokens) >= 0) is fits


def test_what_is_cached_takes_no_block() -> None:
    assert with_pool(7).room(asks(160), 64, 160) == 0
    assert with_pool(6).room(asks(160), 64, 160) == -1


def test_a_prefill_that_runs_keeps_what_it_still_needs() -> None:
    """320 tokens take 21 blocks with the answer's first; it has 4 so far."""
    prefill, done = asks(320, computed=64, held=4), asks(48, computed=48, held=3)
    assert with_pool(10 + 17, prefill, done).room(asks(159), 0, 159) == 0
    assert with_pool(10 + 16, prefill, done).room(asks(159), 0, 159) == -1


def test_a_sliding_window_takes_no_more_than_its_own_most() -> None:
    """Of 8 the prefill has 3: the null block stands for what the window has left behind. The other has none."""
    prefill = asks(320, computed=64, held=4)
    for free, fits in ((5 + 8, True), (5 + 7, False)):
        loads = with_pool(free, prefill)
        (manager,) = loads.managers
        manager._max_admission_blocks_per_request = 8
        manager.req_to_blocks[prefill.request_id] = [SimpleNamespace(is_null=number == 0) for number in range(4)]
        assert (loads.room(asks(159), 0, 159) >= 0) is fits


@pytest.mark.parametrize(("start", "end", "released"), [(64, 128, [(64, 128)]), (64, 64, []), (128, 64, [])])
def test_only_chunks_that_are_not_loaded_are_unlocked(start: int, end: int, released: list[tuple[int, int]]) -> None:
    connector = lmcache(64)
    seen: list[tuple[int, int]] = []

    def free_lookup_locks(token_ids: list[int], start: int, end: int, request_id: str) -> None:
        seen.append((start, end))

    tracker = SimpleNamespace(request_id="one", all_token_ids=[1, 2, 3])
    loads = patch._Loads(scheduler(connector), context())
    loads.unlock(tracker, start, end)  # the first connectors know of no locks
    connector.scheduler_adapter.free_lookup_locks = free_lookup_locks
    loads.unlock(tracker, start, end)
    assert seen == released


def test_a_further_part_is_counted_as_loaded_where_the_release_counts() -> None:
    """The release counts a load when it admits it, which is the first part alone."""
    loads = with_pool(100)
    reported: list[dict[str, int]] = []

    class Waits:
        WAITING_FOR_LOAD = "waits"

    request = SimpleNamespace(
        request_id="one",
        num_computed_tokens=64,
        num_external_computed_tokens=64,
        num_prompt_tokens=200,
        num_tokens=200,
        num_preemptions=0,
        prefill_stats=SimpleNamespace(set=lambda **known: reported.append(known)),
    )
    tracker = SimpleNamespace(
        state=Waits(), allocated_block_ids=[1], num_vllm_hit_tokens=0, num_lmcache_hit_tokens=64, num_stored_tokens=0
    )
    manager = loads.scheduler.kv_cache_manager
    manager.allocate_slots = lambda request, tokens, delay_cache_blocks: [0]
    manager.get_blocks = lambda request_id: [0]
    loads.connector.update_state_after_alloc = lambda request, blocks, tokens: None
    loads.scheduler.connector_prefix_cache_stats = SimpleNamespace(hits=64, preempted_hits=0)
    load = patch._Load(request, tracker, 0, 64, 192, 192)
    assert loads.load_more(load)
    assert (request.num_external_computed_tokens, loads.scheduler.connector_prefix_cache_stats.hits) == (192, 192)
    assert reported == [{"num_prompt_tokens": 200, "num_local_cached_tokens": 0, "num_external_cached_tokens": 192}]
    assert (request.num_computed_tokens, tracker.state) == (192, "waits")


# What a step and an end leave behind


class Slots:
    """The pool's manager: as many blocks as anybody asks for."""

    def allocate_slots(self, request: Any, tokens: int) -> str:
        return f"blocks of {request.request_id}"


def test_who_does_not_fit_finds_no_blocks_until_the_step_ends() -> None:
    loads = with_pool(0)
    loads.end_step()  # of a step in which all fitted
    pool = loads.scheduler.kv_cache_manager = Slots()
    one, two = asks(16), asks(32)
    loads.refused = one.request_id
    assert loads.look_no_further()
    assert pool.allocate_slots(one, 16) is None
    assert pool.allocate_slots(request=one, tokens=16) is None
    assert pool.allocate_slots(two, 32) == "blocks of 32-0"
    assert not loads.livepatch.aside
    loads.end_step()
    assert vars(pool) == {}, "nothing of the patch stays on it"
    assert pool.allocate_slots(one, 16) == "blocks of 16-0"


@pytest.mark.parametrize(
    ("given", "free", "at"),
    [
        (-1, 6400 + 1 + 4, 102_400),  # whole: the one that runs can compute a chunk of 64 beside it
        (-1, 6400 + 1 + 3, 32_768),
        (32_768, 20_000, 32_768),  # as an operator has said
        (0, 20_000, 102_400),
    ],
)
def test_a_load_is_whole_where_the_pool_can_spare_its_blocks(given: int, free: int, at: int) -> None:
    loads = with_pool(free, asks(48, computed=48, held=3), max_model_len=1 << 20, given=given)
    loads.part_tokens = patch.PART_TOKENS if given else 0  # as of one group of full attention
    asked = asks(102_400)
    loads.connector.request_trackers[asked.request_id] = SimpleNamespace(
        num_lmcache_hit_tokens=102_400, num_stored_tokens=0
    )
    assert loads.bounded(lambda request, computed: (102_400, True), asked, 0) == (at, True)


def load_of(loads: Any, state: str, at: int) -> tuple[Any, list[tuple[int, int]]]:
    """A load of 192 tokens of which `at` are there; and what is unlocked from now on."""
    unlocked: list[tuple[int, int]] = []

    def free_lookup_locks(token_ids: list[int], start: int, end: int, request_id: str) -> None:
        unlocked.append((start, end))

    loads.connector.scheduler_adapter.free_lookup_locks = free_lookup_locks
    tracker = SimpleNamespace(
        request_id="one", all_token_ids=[], state=SimpleNamespace(name=state), num_lmcache_hit_tokens=at
    )
    loads.connector.request_trackers["one"] = tracker
    request = SimpleNamespace(request_id="one", num_tokens=200)
    return patch._Load(request, tracker, 0, at, 192, 192), unlocked


@pytest.mark.parametrize(
    ("state", "hit", "expected"), [("PREFETCHING", 192, []), ("WAITING_FOR_LOAD", 64, [(64, 192)])]
)
def test_where_the_patch_stands_aside_each_load_is_the_releases_again(
    state: str, hit: int, expected: list[tuple[int, int]]
) -> None:
    """One that was not let in may be loaded whole; of one that was, what is not loaded any more is unlocked."""
    livepatch = context()
    schedulers = [with_pool(100).scheduler for _ in range(2)]
    for one in schedulers:
        one.schedule = one._connector_finished = lambda: None
        patch.wrappers(livepatch)[INIT].look(None, one)
    gone = weakref.ref(schedulers.pop()._livepatch_loads)
    del one
    gc.collect()
    assert gone() is None, "an engine that is dropped is held by nobody"
    loads = schedulers[0]._livepatch_loads
    load, unlocked = load_of(loads, state, 64)
    loads.loads["one"] = load
    livepatch.withdraw()
    assert (load.tracker.num_lmcache_hit_tokens, unlocked) == (hit, expected)


@pytest.mark.parametrize(
    ("state", "loads_it", "expected"),
    [
        ("PREFETCHING", True, [(0, 192)]),  # nothing of it was loaded
        ("PREFETCHING", False, [(0, 64)]),  # it was looked up, and no load begun: all that the tracker has
        ("READY", True, [(64, 192)]),
        ("READY", False, []),
    ],
)
def test_a_request_that_ends_unlocks_what_it_has_not_loaded(
    state: str, loads_it: bool, expected: list[tuple[int, int]]
) -> None:
    loads = with_pool(100)
    load, unlocked = load_of(loads, state, 64)
    if loads_it:
        loads.loads["one"] = load
    loads.finished(load.request)
    assert unlocked == expected
    assert loads.loads == {}
    loads.finished(SimpleNamespace(request_id="another"))  # which the connector never heard of
    assert unlocked == expected


def with_looks(*running: Any) -> tuple[Any, list[int]]:
    """Loads, and how many tokens the pool's prefix cache was looked through for, each time."""
    looked_up: list[int] = []

    def find_longest_cache_hit(hashes: Any, tokens: int) -> Any:
        looked_up.append(tokens)
        return ([list(range(tokens // 16))],)

    scheduler = with_pool(100, *running).scheduler
    scheduler.kv_cache_manager.coordinator.find_longest_cache_hit = find_longest_cache_hit
    return patch._Loads(scheduler, context()), looked_up


def test_only_a_request_that_comes_is_looked_up_in_the_prefix_cache() -> None:
    """What runs holds its blocks: to look it up costs a walk over its blocks, and would count some of them twice."""
    loads, looked_up = with_looks(asks(320, computed=64, held=4))
    assert loads.room(asks(160), 64, 160) >= 0
    assert looked_up == [159]


def test_what_the_scheduler_has_looked_up_is_not_looked_up_again() -> None:
    """A long prompt that waits is looked up in each step: a walk over its blocks, which is most of what that costs."""
    loads, looked_up = with_looks()
    one, other = asks(160), asks(320)
    loads.coordinator.find_longest_cache_hit(one.block_hashes, 159)
    assert loads.room(one, 64, 160) >= 0
    assert looked_up == [159]
    assert loads.room(other, 64, 320) >= 0, "of another request nothing was looked up"
    assert looked_up == [159, 319]
    loads.coordinator.find_longest_cache_hit(one.block_hashes, 159)
    loads.end_step()
    assert loads.room(one, 64, 160) >= 0
    assert looked_up == [159, 319, 159, 159], "the pool may have given the blocks to others since"

"""`failed-loads`: what LMCache's connector is told of a request that begins anew, who ran on lost blocks, and what of a
step on lost KV is delivered.

The rest is in tests/releases.
"""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.failed_loads import lmcache
from vllm_livepatch.patches.failed_loads import wrappers as patch
from vllm_livepatch.patches.failed_loads.losses import Table, spread, tables_given
from vllm_livepatch.sitecustomize import guard
from vllm_livepatch.sitecustomize.context import PatchContext


@pytest.mark.parametrize(("hit", "noted"), [(64, 32), (16, 16)])
@pytest.mark.parametrize("child", [False, True])
def test_where_it_begins_is_noted(hit: int, noted: int, child: bool) -> None:
    """Where the request's prefix cache ends, and no hit goes beyond; another's note, and other connectors, stay."""
    specs = {
        name: SimpleNamespace(vllm_cached_tokens=101, lmcache_cached_tokens=hit, can_load=False) for name in ("a", "b")
    }
    connector: Any = SimpleNamespace(_lmcache_engine=SimpleNamespace(load_specs=specs))
    if child:
        connector = SimpleNamespace(_connectors=[SimpleNamespace(), connector])
    lmcache.begins_at(connector, "a", 32)
    assert [(spec.vllm_cached_tokens, spec.lmcache_cached_tokens) for spec in specs.values()] == [
        (32, noted),
        (101, hit),
    ]
    lmcache.begins_at(connector, "unknown", 32)
    assert len(specs) == 2


class State(enum.Enum):
    """Of a request, in LMCache's connector to 0.5.4."""

    PREFETCHING = enum.auto()
    READY = enum.auto()


class LaterState(enum.Enum):
    """From 0.5.5 on."""

    READY = enum.auto()
    BYPASS_LMCACHE = enum.auto()


@pytest.mark.parametrize(
    ("state", "hit", "kept"),
    [
        (State.READY, 64, False),
        (State.READY, 0, False),
        (State.PREFETCHING, 64, True),
        (LaterState.READY, 0, False),
        (LaterState.READY, 64, True),
        (LaterState.BYPASS_LMCACHE, 0, True),
    ],
)
@pytest.mark.parametrize("child", [False, True])
@pytest.mark.parametrize("status", ["WAITING", "PREEMPTED"])
def test_who_lost_all_blocks_is_begun_anew(state: Any, hit: int, kept: bool, child: bool, status: str) -> None:
    """But who was not let in, who was preempted, and from LMCache 0.5.5 on who had a hit: its connector does that itself.

    Others stay.
    """
    trackers = {name: SimpleNamespace(state=state, num_lmcache_hit_tokens=hit) for name in ("a", "b")}
    connector: Any = SimpleNamespace(request_trackers=trackers)
    if child:
        connector = SimpleNamespace(_connectors=[SimpleNamespace(), connector])
    for name in ("a", "unknown"):
        lmcache.begin_anew(connector, SimpleNamespace(request_id=name, status=SimpleNamespace(name=status)))
    assert list(trackers) == (["a", "b"] if kept or status == "PREEMPTED" else ["b"])


@pytest.mark.parametrize("unit", ["blocks", "tokens"])
def test_what_is_computed_of_it_is_counted(unit: str) -> None:
    """From where it begins on, and without what was found and not loaded."""
    hits = {f"num_vllm_hit_{unit}": 12, f"num_lmcache_hit_{unit}": 8}
    tracker = SimpleNamespace(**hits, num_scheduled_tokens=0)
    lmcache.counts(SimpleNamespace(request_trackers={"a": tracker}), "a", 48)
    assert vars(tracker) == dict.fromkeys(hits, 0) | {"num_scheduled_tokens": 48}


class Status:
    WAITING_FOR_REMOTE_KVS = object()


def step(**given: list[int]) -> Any:
    """A step in which requests began on blocks."""
    new = [SimpleNamespace(req_id=name, block_ids=(blocks,)) for name, blocks in given.items()]
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    return SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached)


def test_who_began_anew_elsewhere_runs_on() -> None:
    """Where a request began last decides: it may have left the lost blocks, or a window may have passed them."""
    now = {"left": [3, 4], "passed": [0, 10], "there": [5, 6], "grew": [11, 5]}
    requests = {name: SimpleNamespace(request_id=name, status=Status()) for name in now}
    scheduler = SimpleNamespace(
        requests=requests,
        running=list(requests.values()),
        kv_cache_manager=SimpleNamespace(
            block_pool=SimpleNamespace(blocks=range(20)), get_block_ids=lambda name: (now[name],)
        ),
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))]
        ),
    )
    loads = patch._Loads()
    loads.answering = step(left=[1, 2], passed=[8], there=[5, 6], grew=[11])
    loads.steps.append(step(left=[3, 4], passed=[2, 9]))
    lost = patch._Losses(scheduler, loads, {2, 5, 20})
    assert 20 not in lost.blocks, "the pool has none of that number"
    assert [request.request_id for request in lost.running] == ["passed", "there", "grew"]
    assert [request.request_id for request in lost.gone] == ["left"]
    assert list(lost.steps_on_lost_blocks("left")) == []  # the step that is answered is none under way
    assert list(lost.steps_on_lost_blocks("passed")) == list(loads.steps)


@pytest.mark.parametrize(
    ("reported", "tables", "sizes", "lost", "hit"),
    [
        ({5}, {"a": ([1, 5, 6],)}, [16], {5, 6}, {"a"}),
        ({0, 5}, {"a": ([0, 3],)}, [16], {5}, set()),
        ({5}, {"a": ([5, 6], [0, 7]), "b": ([8, 9], [0, 10])}, [16, 16], {5, 6, 7}, {"a"}),
        ({5}, {"a": ([1, 5, 6], [7, 8])}, [16, 32], {1, 5, 6, 7, 8}, {"a"}),
        ({6}, {"a": ([1, 2, 5], [3, 6])}, [16, 32], {5, 6}, {"a"}),
        ({5}, {"b": ([6, 9],), "a": ([5, 6],)}, [16], {5, 6, 9}, {"a", "b"}),
    ],
    ids=["behind it", "null block", "window", "whole of a larger block", "group", "shared"],
)
def test_what_lies_behind_a_lost_block_is_lost(
    reported: set[int], tables: dict[str, Table], sizes: list[int], lost: set[int], hit: set[str]
) -> None:
    assert spread(reported, tables, sizes) == (lost, hit)


def test_only_who_began_in_a_step_was_given_a_whole_table() -> None:
    """What others are given, is added to the table that they have."""
    given = step(new=[1])
    given.scheduled_cached_reqs = SimpleNamespace(
        req_ids=["again", "grew", "nothing"], new_block_ids=[([2],), ([3],), None], resumed_req_ids={"again", "nothing"}
    )
    assert tables_given(given) == {"new": ([1],), "again": ([2],)}


class Scheduler:
    """A scheduler whose steps are under way; of an answer it delivers all."""

    connector = SimpleNamespace()

    def _update_after_schedule(self, scheduler_output: Any) -> None: ...

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> None: ...

    @classmethod
    def patched(cls, context: PatchContext) -> Any:
        own = {}
        for name in ("_update_after_schedule", "update_from_output"):
            target = f"{patch.SCHEDULER}.{name}"
            own[name] = guard.in_place_of(vars(Scheduler)[name], patch.wrappers(context)[target], context, target)
        return type("Scheduler", (cls,), own)()


@pytest.fixture
def context() -> PatchContext:
    return PatchContext("failed-loads", {"ON_LOSS": "recompute"}, {}, lambda: None)


@pytest.fixture
def scheduler(context: PatchContext) -> Any:
    return Scheduler.patched(context)


def under_way(scheduler: Any, withheld: str = "") -> Any:
    """A step of the requests a and b, of which a request's token is not to be delivered."""
    output = SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 1})
    scheduler._update_after_schedule(output)
    getattr(scheduler, patch.STATE).withhold(withheld, [output])
    return output


def answered(scheduler: Any, output: Any) -> list[Any]:
    """What is delivered of a step: tokens, what was pooled, and whose prompts' log probabilities."""
    answer = SimpleNamespace(
        req_id_to_index={"a": 0, "b": 1},
        sampled_token_ids=[[1], [2]],
        pooler_output=["of a", "of b"],
        prompt_logprobs_dict={"a": "of a", "b": "of b"},
        kv_connector_output=None,
    )
    scheduler.update_from_output(output, answer)
    return [answer.sampled_token_ids, answer.pooler_output, sorted(answer.prompt_logprobs_dict)]


ALL, OF_B = [[[1], [2]], ["of a", "of b"], ["a", "b"]], [[[], [2]], [None, "of b"], ["b"]]


@pytest.mark.parametrize("aside", [False, True])
def test_nothing_of_a_step_on_lost_kv_is_delivered(aside: bool, scheduler: Any, context: PatchContext) -> None:
    """Also when the patch has stood aside meanwhile."""
    first, second, third = under_way(scheduler), under_way(scheduler, "a"), under_way(scheduler)
    assert answered(scheduler, first) == ALL
    if aside:
        context.withdraw()
    assert [answered(scheduler, second), answered(scheduler, third)] == [OF_B, ALL]


def test_of_steps_that_are_never_answered_nothing_is_kept(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another step's output may come to lie where theirs was."""
    monkeypatch.setattr(patch, "DEEPEST", 2)
    loads = patch._Loads()
    loads.steps = type(loads.steps)(maxlen=patch.DEEPEST)
    setattr(scheduler, patch.STATE, loads)
    outputs = [under_way(scheduler, "a"), under_way(scheduler, "a"), under_way(scheduler)]
    assert list(loads.withheld) == [id(outputs[1])]
    assert answered(scheduler, outputs[2]) == ALL
    assert (loads.withheld, list(loads.steps)) == ({}, [])


def test_a_table_of_other_groups_is_an_error() -> None:
    """Whose blocks are compared with other groups' sizes, would be found to have lost what they have not."""
    with pytest.raises(ValueError, match="zip"):
        spread({5}, {"a": ([5], [6])}, [16])


def test_what_the_worker_knows_of_failed_blocks_is_reported_once(context: PatchContext) -> None:
    """The release's own answer stands where the worker knows of none."""
    failed = {3, 4}
    connector = SimpleNamespace(worker_adapter=SimpleNamespace(error_block_ids=failed))
    load_errors = patch.wrappers(context)[f"{patch.LMCACHE}.get_block_ids_with_load_errors"]
    assert load_errors(lambda: {9}, connector) == {3, 4}
    assert failed == set(), "it is the worker's own set: what is left in it would be reported again"
    assert load_errors(lambda: {9}, connector) == {9}
    assert load_errors(lambda: {9}, SimpleNamespace(worker_adapter=SimpleNamespace())) == {9}


def test_an_answer_of_an_unknown_step_leaves_those_under_way() -> None:
    """And an answer ends the steps before it too, with what of them was withheld."""
    loads = patch._Loads()
    steps = [SimpleNamespace(num_scheduled_tokens={"a": 1}) for _ in range(3)]
    loads.steps.extend(steps)
    loads.withhold("a", steps[:2])
    assert list(loads.answered(SimpleNamespace())) == []
    assert (list(loads.steps), set(loads.withheld)) == (steps, {id(step) for step in steps[:2]})
    assert list(loads.answered(steps[1])) == ["a"]
    assert (list(loads.steps), loads.withheld) == (steps[2:], {})


@pytest.mark.parametrize(
    ("on_loss", "facts", "recomputes"),
    [
        ("recompute", {}, True),
        ("recompute", {"fails_by_default": False}, False),  # there `fail` is an operator's choice
        ("engine", {}, False),
    ],
)
def test_a_lost_load_is_computed_where_nobody_chose_otherwise(
    on_loss: str, facts: dict[str, Any], recomputes: bool
) -> None:
    scheduler = Scheduler.patched(PatchContext("failed-loads", {"ON_LOSS": on_loss}, facts, lambda: None))
    scheduler.recompute_kv_load_failures = False
    under_way(scheduler)
    assert scheduler.recompute_kv_load_failures is recomputes


def test_of_a_request_whose_load_was_lost_nothing_is_loaded_again(scheduler: Any, context: PatchContext) -> None:
    scheduler.connector = SimpleNamespace(
        get_num_new_matched_tokens=lambda request, computed: (request.num_tokens - computed, True),
        update_state_after_alloc=lambda request, blocks, external: None,
    )
    scheduler.recompute_kv_load_failures = True
    requests = {
        name: SimpleNamespace(request_id=name, num_tokens=64, status=SimpleNamespace(name="WAITING"))
        for name in ("a", "b")
    }
    scheduler.requests = requests
    output = under_way(scheduler)
    for reported in (None, SimpleNamespace(failed_recving={"a", "gone"})):
        answer = SimpleNamespace(
            req_id_to_index={},
            sampled_token_ids=[],
            pooler_output=[],
            prompt_logprobs_dict={},
            kv_connector_output=reported,
        )
        scheduler.update_from_output(output, answer)
        output = under_way(scheduler)
    asked = {name: scheduler.connector.get_num_new_matched_tokens(one, 16) for name, one in requests.items()}
    assert asked == {"a": (0, False), "b": (48, True)}
    assert not context.aside


@pytest.mark.parametrize(("computed", "begins"), [(0, 16), (32, 32)])
def test_where_it_begins_is_counted_when_its_blocks_are_allocated(
    computed: int, begins: int, scheduler: Any, context: PatchContext
) -> None:
    """Behind what the prefix cache has of it, or what was loaded of it and not lost. Another's count stays."""
    tracker, others = SimpleNamespace(num_scheduled_tokens=0), SimpleNamespace(num_scheduled_tokens=0)
    tracker.state = State.PREFETCHING
    scheduler.connector = SimpleNamespace(
        get_num_new_matched_tokens=lambda request, computed: (0, False),
        update_state_after_alloc=lambda request, blocks, external: None,
        request_trackers={"a": tracker, "b": others},
    )
    scheduler.recompute_kv_load_failures = True
    waiting = SimpleNamespace(name="WAITING")
    requests = [
        SimpleNamespace(request_id=name, num_tokens=64, num_computed_tokens=computed, status=waiting)
        for name in ("a", "b")
    ]
    scheduler.requests = {request.request_id: request for request in requests}
    answer = SimpleNamespace(req_id_to_index={}, kv_connector_output=SimpleNamespace(failed_recving={"a"}))
    scheduler.update_from_output(under_way(scheduler), answer)
    for request in requests:
        scheduler.connector.get_num_new_matched_tokens(request, 16)
        scheduler.connector.update_state_after_alloc(request, None, 0)
    assert (tracker.num_scheduled_tokens, others.num_scheduled_tokens) == (begins, 0)
    assert not context.aside

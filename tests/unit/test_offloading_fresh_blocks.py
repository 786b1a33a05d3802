"""`offloading-fresh-blocks`: which schedulers are told of which blocks, and what a request's end leaves to store.

The connectors are stand-ins: what of a release is concerned is in tests/releases/test_offloading_fresh_blocks.py.
"""

from __future__ import annotations

from types import SimpleNamespace as Some
from typing import Any

import pytest
from vllm_livepatch.patches.offloading_fresh_blocks import wrappers as patch
from vllm_livepatch.sitecustomize.context import PatchContext

UPDATE, CALC, BUILD = (
    f"{patch.MULTI}.update_state_after_alloc",
    f"{patch.SCHEDULER}._calc_num_offloadable_tokens",
    f"{patch.SCHEDULER}.build_connector_meta",
)


def context(**facts: Any) -> PatchContext:
    return PatchContext("offloading-fresh-blocks", {}, facts, lambda: None)


def around(made: PatchContext, target: str, function: Any) -> Any:
    return made.around(function, patch.wrappers(made)[target])


def scheduler(**more: Any) -> Any:
    return Some(_block_id_to_pending_jobs={3: {7, 8}, 4: {8}, 9: {9}}, _current_batch_jobs_to_flush={1}, **more)


def blocks(*groups: tuple[int, ...]) -> Any:
    return Some(blocks=tuple([Some(block_id=number, is_null=not number) for number in group] for group in groups))


class Multi:
    """A MultiConnector, as far as it is asked."""

    def __init__(self, *children: Any) -> None:
        self._connectors = children

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...


def told(made: PatchContext, multi: Multi, tokens: int, *groups: tuple[int, ...], by_name: bool = False) -> None:
    update = around(made, UPDATE, multi.update_state_after_alloc)
    if by_name:
        update(request=None, blocks=blocks(*groups), num_external_tokens=tokens)
    else:
        update(None, blocks(*groups), tokens)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_load_is_told_to_every_offloading_child_at_any_depth(by_name: bool) -> None:
    first, second = scheduler(), scheduler(_current_batch_allocated_block_ids={5})
    nixl = Some(connector_scheduler=Some())
    multi = Multi(nixl, Some(connector_scheduler=first), Multi(Some(connector_scheduler=second)), Some())
    made = context()
    told(made, multi, 32, (0, 3, 4), (0, 6), by_name=by_name)
    assert first._current_batch_jobs_to_flush == second._current_batch_jobs_to_flush == {1, 7, 8}
    assert second._current_batch_allocated_block_ids == {3, 4, 5, 6}
    assert not hasattr(first, "_current_batch_allocated_block_ids")
    assert made.counters == {"awaited_stores": 4}


@pytest.mark.parametrize(("tokens", "table"), [(0, (3, 4)), (32, (5, 6))])
def test_without_a_load_or_a_store_under_way_nothing_is_waited_for(tokens: int, table: tuple[int, ...]) -> None:
    one, made = scheduler(), context()
    told(made, Multi(Some(connector_scheduler=one)), tokens, table)
    assert one._current_batch_jobs_to_flush == {1}
    assert made.counters == {}


def offloadable(made: PatchContext, tables: list[list[int]], **request: Any) -> int:
    class Scheduler:
        def _calc_num_offloadable_tokens(self, req_status: Any, num_computed_tokens: int) -> int:
            return min(num_computed_tokens, int(req_status.req.num_tokens))

    req = Some(is_finished=lambda: request["finished"], **request)
    status = Some(req=req, group_states=tuple(Some(block_ids=table) for table in tables))
    calc = around(made, CALC, Scheduler()._calc_num_offloadable_tokens)
    return int(calc(status, request["num_tokens"]))


@pytest.mark.parametrize(
    ("stored", "finished", "computed", "prompt", "tokens", "tables"),
    [
        (80, False, 64, 74, 80, [[1]]),  # it runs: what this step computes is stored as well
        (79, True, 79, 74, 80, [[1]]),  # the last token was never computed
        (79, True, 81, 74, 80, [[1]]),  # a step that was begun before its end counts tokens that it does not have
        (74, True, 74, 74, 74, [[1]]),  # it hung up when its prompt was computed
        (40, True, 40, 74, 74, [[1], [2]]),  # it hung up amid its prompt
        (0, True, 0, 74, 80, [[1]]),  # it was preempted
        (0, True, 64, 74, 74, [[], []]),  # it waits for a load
        (0, True, 64, 74, 74, [[1], []]),
    ],
)
def test_of_a_request_that_ended_only_computed_tokens_are_stored(
    stored: int, finished: bool, computed: int, prompt: int, tokens: int, tables: list[list[int]]
) -> None:
    made = context(beyond_computed=True)
    request = {"num_computed_tokens": computed, "num_prompt_tokens": prompt, "num_tokens": tokens}
    assert offloadable(made, tables, finished=finished, **request) == stored
    assert made.counters == ({"not_computed": 1} if stored < tokens else {})
    if finished:
        assert offloadable(context(), tables, finished=True, **request) == tokens  # of a release that does so itself


class Core:
    """A scheduler that a reset of the prefix cache has preempt all but one request."""

    def __init__(self, connector: Any, fails: bool) -> None:
        self.connector, self.fails = connector, fails
        self.running = [Some(request_id=name) for name in ("stays", "storing", "unknown")]

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        if reset_running_requests:
            del self.running[1:]
        if self.fails and reset_running_requests:
            raise RuntimeError("waits for remote KV")
        return True


@pytest.mark.parametrize("fails", [False, True])
def test_stores_of_requests_that_a_reset_preempts_are_waited_for_in_the_next_step(fails: bool) -> None:
    made = context(resets_unseen=True)
    one = Building({}, stays={1}, storing={2, 3, 4, 9})
    one._jobs = {1: Some(is_store=True), 2: Some(is_store=True), 3: Some(is_store=True), 4: Some(is_store=False)}
    core = Core(Multi(Some(connector_scheduler=one)), fails)
    reset = around(made, f"{patch.CORE}.reset_prefix_cache", core.reset_prefix_cache)
    reset()
    if fails:
        with pytest.raises(RuntimeError):
            reset(reset_running_requests=True)
    else:
        assert reset(reset_running_requests=True) is True
    assert one._current_batch_jobs_to_flush == set()  # a reset of the connector's cache wants it so
    del one._jobs[3]  # ended meanwhile
    build = around(made, BUILD, one.build_connector_meta)
    for _ in range(2):
        assert build(Some(preempted_req_ids=set())) == "metadata"
        assert one._current_batch_jobs_to_flush == {2}
    assert made.counters == {"awaited_stores": 1}


def test_a_reset_of_a_release_that_sees_it_is_left_alone() -> None:
    one = Building({}, storing={2})
    one._jobs = {2: Some(is_store=True)}
    core = Core(Some(connector_scheduler=one), fails=False)
    around(context(), f"{patch.CORE}.reset_prefix_cache", core.reset_prefix_cache)(reset_running_requests=True)
    assert not hasattr(one, patch.UNFENCED)


class Building:
    """An offloading scheduler's part where a step's metadata are built: as the release, it takes jobs for stores."""

    def __init__(self, loads: dict[int, Any], **jobs: set[int]) -> None:
        self._block_id_to_pending_jobs: dict[int, set[int]] = {}
        self._jobs: dict[int, Any] = {}
        self._current_batch_jobs_to_flush: set[int] = set()
        self._current_batch_load_jobs = loads
        self._req_status = {name: Some(transfer_jobs=set(one)) for name, one in jobs.items()}
        self.flushed: set[int] = set()

    def build_connector_meta(self, scheduler_output: Any) -> str:
        for name in scheduler_output.preempted_req_ids or ():
            if name in self._req_status:
                self.flushed |= self._req_status[name].transfer_jobs
        if 13 in self.flushed:
            raise KeyError(13)
        return "metadata"


@pytest.mark.parametrize("preempted", [None, set(), {"loading", "storing", "unknown"}])
def test_a_load_that_a_step_begins_is_no_store_to_flush(preempted: set[str] | None) -> None:
    made, one = context(), Building({5: None}, loading={5}, storing={2}, other={3})
    build = around(made, BUILD, one.build_connector_meta)
    assert build(Some(preempted_req_ids=preempted)) == "metadata"
    assert one.flushed == ({2} if preempted else set())
    assert [state.transfer_jobs for state in one._req_status.values()] == [{5}, {2}, {3}]
    assert made.counters == ({"reloaded": 1} if preempted else {})


def test_the_loads_are_put_back_where_the_release_raises() -> None:
    one = Building({5: None}, loading={5}, storing={13})
    with pytest.raises(KeyError):
        around(context(), BUILD, one.build_connector_meta)(Some(preempted_req_ids=["loading", "storing"]))
    assert one._req_status["loading"].transfer_jobs == {5}

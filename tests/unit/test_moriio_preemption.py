"""`moriio-preemption`: which fields are refused, and what is answered of whom. What releases do is in tests/releases."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.moriio_preemption import parameters, wrappers
from vllm_livepatch.sitecustomize.context import PatchContext

ADD = "vllm.v1.core.sched.scheduler:Scheduler.add_request"
ODD_BLOCKS: tuple[Any, ...] = (None, [], {}, "123", [1, 2], [1, 2, -1], ["1"], [[1, 2, 3]], [None])
LOAD = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_id": "tx-1",
    "remote_block_ids": [1, 2, 3],
    "remote_engine_id": "prefill",
    "remote_host": "10.0.0.1",
    "remote_handshake_port": 6301,
    "remote_notify_port": 61005,
    "remote_dp_size": 2,
    "remote_dp_rank": 1,
    "tp_size": 8,
}
SEND = {
    **LOAD,
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": None,
    "remote_engine_id": None,
}


class Metadata:
    """A release's reader of parameters, as far as its callers see it."""

    def __init__(self) -> None:
        self.reqs_to_recv: dict[str, Any] = {}
        self.reqs_to_save: dict[str, Any] = {}

    def add_new_req(self, request_id: str, blocks: Any, params: Any, write_mode: bool = False) -> None:
        assert (params["remote_block_ids"], params["remote_engine_id"], params["transfer_id"]) is not None
        read = {name: int(params[name]) for name in ("remote_handshake_port", "remote_notify_port")}
        ranks = {"remote_dp_size": params.get("remote_dp_size", 1), "remote_dp_rank": params.get("remote_dp_rank", 0)}
        found = SimpleNamespace(remote_host=params["remote_host"], **read, **ranks)
        (self.reqs_to_save if write_mode else self.reqs_to_recv)[request_id] = found


@pytest.fixture(autouse=True)
def release(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("moriio_common")
    module.MoRIIOConnectorMetadata = Metadata  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"{wrappers.MORIIO}.moriio_common", module)


class MoRIIOConnector:
    def __init__(self, mode: str = "READ", producer: bool = False, **more: Any) -> None:
        shape = {"tp_size": 1, "_reqs_need_pending_save": {}, "blocks_per_sw": [0], **more}
        self.connector_scheduler = SimpleNamespace(is_producer=producer, mode=SimpleNamespace(name=mode), **shape)


class VendorsConnector(MoRIIOConnector):
    """A subclass in a vendor's package."""


class MultiConnector:
    def __init__(self, *children: Any) -> None:
        self._connectors = children


def context(**facts: bool) -> PatchContext:
    return PatchContext("moriio-preemption", {}, facts, lambda: None)


def left(params: Any, connector: Any, **facts: bool) -> Any:
    """What a request of 11 tokens, in blocks of 4, is left with."""
    livepatch = context(**facts)
    request = SimpleNamespace(request_id="r", kv_transfer_params=params, num_prompt_tokens=11)
    scheduler = SimpleNamespace(connector=connector, block_size=4)
    wrappers.wrappers(livepatch)[ADD](lambda request: None, scheduler, request)
    assert bool(livepatch.counters) == (request.kv_transfer_params is not params)
    return request.kv_transfer_params


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        LOAD,
        {**LOAD, "remote_notify_port": "61005", "remote_block_ids": (1, 2, 3, 4)},
        {**LOAD, "tp_size": None, "remote_dp_size_local": 0, "remote_hosts": ["10.0.0.1", "pod-2.prefill"]},
        {"another": "connector's"},
        {**LOAD, "transfer_id": "tx-\u65e5".encode().decode("latin-1"), "remote_engine_id": "p\u65e5"},
        OrderedDict(LOAD),
    ],
)
def test_what_can_be_used_is_left_as_it_is(params: Any) -> None:
    assert left(params, VendorsConnector()) is params
    assert left(params, MultiConnector(object(), MoRIIOConnector("WRITE"))) is params


def test_what_a_release_does_not_read_may_be_missing() -> None:
    written = {name: LOAD[name] for name in LOAD if name not in (*wrappers.UNREAD, "transfer_id")}
    assert left(written, MoRIIOConnector("WRITE"), names_transfers=True) is written
    assert left(written, MoRIIOConnector("WRITE")) is None
    plain = {"do_remote_decode": True, "transfer_id": "tx-1"}
    assert left(plain, MoRIIOConnector(producer=True)) is plain
    assert left(plain, MoRIIOConnector(producer=True), saves_for_reads=True) is None
    assert left(SEND, MoRIIOConnector("WRITE", producer=True)) is SEND


def test_a_size_of_nobody_knows_what() -> None:
    """From 0.28.0 on a release takes 0 ranks as its own number."""
    for name in ("remote_tp_size", "tp_size"):
        params = {**LOAD, name: 0}
        assert left(params, MoRIIOConnector(), names_transfers=True) is params
        assert left(params, MoRIIOConnector()) is None
        assert left({**LOAD, name: False}, MoRIIOConnector(), names_transfers=True) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (name, value)
            for name in ("transfer_id", "remote_engine_id")
            for value in (None, "", 7, ["a"], "x" * 5000, "\n", "\ud800")
        ),
        *(("remote_host", value) for value in (None, "", 7, "a b", "x/y", "-", ["h"])),
        *(("remote_notify_port", value) for value in (None, "", 0, -1, 65535, "x", [1])),
        *(("remote_dp_rank", value) for value in (None, "0", -1, 2, 1 << 40, True)),
        *((name, value) for name in ("tp_size", "remote_dp_size") for value in ("many", -1, 0, [1], 1 << 40)),
        ("remote_hosts", "10.0.0.1"),
        ("remote_hosts", ["a b"]),
        *[("remote_block_ids", value) for value in ODD_BLOCKS],
        ("do_remote_decode", True),
    ],
)
def test_what_cannot_be_used_is_taken_off(field: str, value: Any) -> None:
    assert left({**LOAD, field: value, "another": 1}, MoRIIOConnector()) == {"another": 1}
    assert left(json.loads(json.dumps({**LOAD, field: value})), MoRIIOConnector()) is None


def test_an_engine_that_only_prefills_or_only_decodes() -> None:
    assert left(LOAD, MoRIIOConnector(producer=True)) is None
    assert left(SEND, MoRIIOConnector()) is None
    assert left(["do_remote_prefill"], MoRIIOConnector()) is None


def test_blocks_by_group() -> None:
    windows = MoRIIOConnector(blocks_per_sw=[0, 1])
    for blocks in ([[1, 2], [3]], [[1, 2, 3], [4, 5]]):  # the last token is computed here
        params = {**LOAD, "remote_block_ids": blocks}
        assert left(params, windows, in_groups=True) is params
    odd: tuple[Any, ...] = ([[1], [3]], [[1, 2], []], [[1, 2]], [1, 2, 3], [[1, 2], [3], [4]])
    for named in odd:
        assert left({**LOAD, "remote_block_ids": named}, windows, in_groups=True) is None
    states = MoRIIOConnector(_has_mamba=True, _mamba_group_ids=[1], blocks_per_sw=[0, 0])
    params = {**LOAD, "remote_block_ids": [[1], []]}
    assert left(params, states, in_groups=True) is params


def matched(half: Any, params: Any, answer: tuple[int, bool], preemptions: int = 0) -> tuple[Any, dict[str, int]]:
    livepatch = context()
    request = SimpleNamespace(request_id="r", kv_transfer_params=params, num_preemptions=preemptions)
    wrapper = wrappers.wrappers(livepatch)[f"{wrappers.HALF}.get_num_new_matched_tokens"]
    return wrapper(lambda request, number: answer, half, request, 0), dict(livepatch.counters)


def test_kv_is_promised_only_where_it_will_be_asked_for() -> None:
    decode = MoRIIOConnector().connector_scheduler
    assert matched(decode, LOAD, (10, True)) == ((10, True), {})
    asked = {**LOAD, "do_remote_prefill": False}
    assert matched(decode, asked, (10, True), preemptions=1) == ((0, False), {"computed_again": 1})
    for params in (None, {}, {"another": 1}, ["do_remote_prefill"]):
        assert matched(decode, params, (10, False)) == ((0, False), {"computed_here": 1})
    for number in (0, -1):
        assert matched(decode, LOAD, (number, True)) == ((0, False), {})


def test_a_prefill_that_begins_again_forgets_its_blocks() -> None:
    prefill = MoRIIOConnector(producer=True, _reqs_need_pending_save={"r": 1, "other": 2}).connector_scheduler
    assert matched(prefill, SEND, (0, False)) == ((0, False), {})
    assert prefill._reqs_need_pending_save == {"other": 2}


def test_only_what_asks_for_a_transfer_reaches_the_release() -> None:
    seen: list[Any] = []
    wrapper = wrappers.wrappers(context())[f"{wrappers.HALF}.update_state_after_alloc"]
    for params in (None, {}, {"another": 1}, {**LOAD, "do_remote_prefill": False}, LOAD, SEND):
        wrapper(
            lambda request, *rest: seen.append(request.kv_transfer_params),
            None,
            SimpleNamespace(kv_transfer_params=params),
            1,
            2,
        )
    assert seen == [LOAD, SEND]


def test_a_step_is_planned_of_what_was_noted() -> None:
    class Plan:
        def __init__(self) -> None:
            self.scheduled_new_reqs = ["new"]
            self.scheduled_cached_reqs = SimpleNamespace(req_ids=["a", "b"], new_block_ids=[([1],), None])

    def plan(mode: str, **facts: bool) -> Any:
        half = MoRIIOConnector(mode, _reqs_need_pending_save={"b": 1}).connector_scheduler
        output = Plan()
        wrapper = wrappers.wrappers(context(**facts))[f"{wrappers.HALF}.build_connector_meta"]
        seen = wrapper(lambda scheduler_output: scheduler_output, half, output)
        assert output.scheduled_cached_reqs.req_ids == ["a", "b"]
        return seen.scheduled_new_reqs, seen.scheduled_cached_reqs.req_ids, seen.scheduled_cached_reqs.new_block_ids

    assert plan("WRITE", indexes_all=True) == ([], ["b"], [None])
    assert plan("READ", indexes_all=True) == plan("WRITE") == (["new"], ["a", "b"], [([1],), None])


def test_what_a_client_sent_is_logged_in_a_few_words() -> None:
    assert parameters.described("x" * 100) == "'" + "x" * 56 + "..."
    assert parameters.described({"a": 1}) == "a dict"

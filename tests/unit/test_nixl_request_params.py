"""`nixl-request-params`: which fields of `kv_transfer_params` are refused. What a release does with them is in tests/releases."""

from __future__ import annotations

import json
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.nixl_request_params import parameters, wrappers
from vllm_livepatch.sitecustomize.context import PatchContext

PULL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2], [3]],
    "remote_engine_id": "prefill",
    "remote_request_id": "p-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 2,
}
ODD_BLOCKS: tuple[Any, ...] = (None, [], [[]], [[-1]], [["1"]], [1, [2]], [[1], 2], [[True]], "1")
ADD = "vllm.v1.core.sched.scheduler:Scheduler.add_request"


class Half(SimpleNamespace):
    """A connector's scheduler half, in vLLM's own package."""


Half.__module__ = f"{wrappers.CONNECTORS}.nixl.pull_scheduler"


class NixlConnector:
    connector_scheduler: Any = Half(is_bidirectional_kv_xfer_enabled=False)


class VendorsConnector(NixlConnector):
    """A subclass in a vendor's package, with vLLM's scheduler half."""


class NixlPushConnector(NixlConnector):
    pass


class MultiConnector:
    def __init__(self, *children: Any) -> None:
        self._connectors = children


class MooncakeConnector:
    def __init__(self, role: str) -> None:
        self.connector_scheduler: Any = Half(is_kv_producer=role == "kv_producer", is_kv_consumer=role == "kv_consumer")


def left(params: Any, connector: Any = None, hosts: str = "") -> tuple[Any, dict[str, int]]:
    """What a request is left with, and what was counted."""
    context = PatchContext("nixl-request-params", {"HOSTS": hosts}, {}, lambda: None)
    request = SimpleNamespace(request_id="r", kv_transfer_params=params, sampling_params=None)
    scheduler = SimpleNamespace(connector=NixlConnector() if connector is None else connector)
    wrappers.wrappers(context)[ADD](lambda request: None, scheduler, request)
    return request.kv_transfer_params, dict(context.counters)


@pytest.mark.parametrize(
    "params",
    [
        None,
        PULL,
        {**PULL, "remote_port": "5600"},
        {**PULL, "remote_block_ids": [1, 2]},
        {**PULL, "remote_block_ids": ((), (1,))},
        {**PULL, "remote_blocks_expiry_time": 12.5, "remote_num_tokens": 40, "pp_size": 1},
        {name: value for name, value in PULL.items() if name != "tp_size"},
        {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(("remote_host", "remote_block_ids"))},
        {"another": "connector's"},
    ],
)
def test_what_can_be_used_is_left_as_it_is(params: Any) -> None:
    assert left(params) == (params, {})
    assert left(params, MultiConnector(object(), VendorsConnector())) == (params, {})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, None) for name in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")),
        ("remote_engine_id", ""),
        ("remote_engine_id", ["a"]),
        ("remote_request_id", "\ud800"),
        ("remote_request_id", "line\nbreak"),
        ("remote_request_id", "x" * 4097),
        ("remote_port", 0),
        ("remote_port", 65536),
        ("remote_port", True),
        ("remote_port", "0x50"),
        ("remote_port", "\u0665"),
        ("tp_size", 0),
        ("dcp_size", None),
        ("pp_size", "1"),
        ("remote_num_tokens", -1),
        ("remote_blocks_expiry_time", json.loads("NaN")),
        ("remote_blocks_expiry_time", json.loads("1e999")),
        *[("remote_block_ids", value) for value in ODD_BLOCKS],
    ],
)
def test_what_cannot_be_used_is_computed_here(field: str, value: Any) -> None:
    others = {"lmcache.tag": "kept"}
    assert left({**PULL, field: value, **others}) == (others, {"refused": 1})


@pytest.mark.parametrize("params", ["text", ["do_remote_prefill"], 1, True])
def test_what_is_no_object_is_nothing(params: Any) -> None:
    assert left(params) == (None, {"refused": 1})


def test_a_connector_that_is_neither_of_them_is_left_alone() -> None:
    assert left({"do_remote_prefill": True}, object()) == ({"do_remote_prefill": True}, {})


def test_a_vendors_connector_of_the_same_name_reads_its_own_fields() -> None:
    """vllm-ascend's MooncakeConnector has vLLM's name, and is given what NIXL is given."""
    ascend = MooncakeConnector("kv_consumer")
    ascend.connector_scheduler = SimpleNamespace(kv_role="kv_consumer")
    assert left(PULL, ascend) == (PULL, {})
    assert left({**PULL, "_p_side_truncated": True}, ascend)[0]["_p_side_truncated"]


def test_who_loads_may_keep_it_for_another_engine() -> None:
    both = {**PULL, "do_remote_decode": True}
    assert left(both) == left(both, NixlPushConnector()) == (both, {})
    assert left({"do_remote_prefill": True, "do_remote_decode": True}) == (None, {"refused": 1})
    by_host = NixlConnector()
    by_host.connector_scheduler = Half(use_host_buffer=True, is_bidirectional_kv_xfer_enabled=True)
    assert left(both, by_host) == (None, {"refused": 1}), "the KV would be saved, and never loaded"
    assert left(PULL, by_host) == (PULL, {})
    assert left({**both, "do_remote_prefill": False}, by_host)[1] == {"refused_return": 1}
    consumer = {"do_remote_prefill": True, "do_remote_decode": True, **MOONCAKE}
    assert left(consumer, MooncakeConnector("kv_both")) == (consumer, {})
    assert left(consumer, MooncakeConnector("kv_consumer")) == (None, {"refused": 1})


@pytest.mark.parametrize("mark", parameters.MARKS)
def test_what_the_originals_note_themselves_does_not_come_from_outside(mark: str) -> None:
    params = {"do_remote_decode": True, mark: True}
    assert left(dict(params)) == ({"do_remote_decode": True}, {})
    assert left(dict(params), object()) == (params, {})


def test_of_several_connectors_the_first_loads() -> None:
    of_mooncake = {"do_remote_prefill": True, **MOONCAKE}
    nixl, mooncake = NixlConnector(), MooncakeConnector("kv_both")
    assert left(PULL, MultiConnector(object(), nixl, mooncake)) == (PULL, {})
    assert left(of_mooncake, MultiConnector(mooncake, nixl)) == (of_mooncake, {})
    assert left(of_mooncake, MultiConnector(nixl, mooncake)) == (None, {"refused": 1})
    assert left(PULL, MultiConnector(mooncake, nixl)) == (None, {"refused": 1})
    # NIXL notes whom to send heartbeats, whoever loads.
    assert left({**of_mooncake, "remote_host": ["a"]}, MultiConnector(mooncake, nixl)) == (None, {"refused": 1})
    assert left(PULL, MultiConnector(nixl, MooncakeConnector("kv_producer"))) == (None, {"refused": 1})


def test_what_is_to_be_read_back_is_left_out_where_nobody_reads_it() -> None:
    back = {**PULL, "do_remote_prefill": False, "do_remote_decode": True}
    kept = {"do_remote_prefill": False, "do_remote_decode": True, "tp_size": 2}
    assert left(back) == (kept, {"refused_return": 1})
    enabled = NixlConnector()
    enabled.connector_scheduler = Half(is_bidirectional_kv_xfer_enabled=True)
    assert left(back, enabled) == (back, {})
    assert left({**back, "remote_port": None}, enabled) == (kept, {"refused_return": 1})


MOONCAKE = {"remote_engine_id": "prefill", "remote_bootstrap_addr": "http://10.0.0.1:8998", "transfer_id": "t"}


@pytest.mark.parametrize(
    ("role", "params", "refused"),
    [
        ("kv_consumer", {"do_remote_prefill": True, **MOONCAKE}, False),
        ("kv_producer", {"do_remote_prefill": True, **MOONCAKE}, True),
        ("kv_both", {"do_remote_prefill": True, **MOONCAKE, "transfer_id": ["t"]}, True),
        ("kv_both", {"do_remote_decode": True, "transfer_id": "t"}, False),
        ("kv_both", {"do_remote_decode": True}, False),
        ("kv_both", {"do_remote_decode": True, "transfer_id": ["t"]}, True),
        ("kv_consumer", {"do_remote_decode": True, "transfer_id": "t"}, True),
    ],
)
def test_mooncake(role: str, params: dict[str, Any], refused: bool) -> None:
    found, counted = left(params, MooncakeConnector(role))
    assert (found, counted) == ((None, {"refused": 1}) if refused else (params, {}))


def test_only_the_listed_hosts() -> None:
    assert left(PULL, hosts="10.0.0.2, 10.0.0.1")[1] == {}
    assert left(PULL, hosts="10.0.0.2")[1] == {"refused": 1}
    load = {"do_remote_prefill": True, **MOONCAKE}
    assert left(load, MooncakeConnector("kv_both"), hosts="10.0.0.1")[1] == {}
    assert left(load, MooncakeConnector("kv_both"), hosts="10.0.0.2")[1] == {"refused": 1}
    # NIXL does not read the field from which Mooncake's host is taken.
    for decoy in ("http://10.0.0.2:8998", 5):
        assert left({**PULL, "remote_bootstrap_addr": decoy}, hosts="10.0.0.2")[1] == {"refused": 1}
        assert left({**PULL, "remote_bootstrap_addr": decoy}, hosts="10.0.0.1")[1] == {}
    several = MultiConnector(MooncakeConnector("kv_both"), NixlConnector())
    assert left({**load, "remote_host": "10.0.0.2"}, several, hosts="10.0.0.1")[1] == {"refused": 1}
    assert left(load, several, hosts="10.0.0.1")[1] == {}


def test_a_read_that_the_worker_does_not_know_how_to_do_has_failed() -> None:
    """Of engines whose cache groups differ, the worker asks for fields that a client may leave out."""
    context = PatchContext("nixl-request-params", {"HOSTS": ""}, {}, lambda: None)
    read = wrappers.wrappers(context)[
        f"{wrappers.CONNECTORS}.nixl.pull_worker:NixlPullConnectorWorker._read_blocks_for_req"
    ]
    failed: list[str] = []
    worker = SimpleNamespace(
        _recving_transfers={}, _recv_failures={}, _failed_recv_reqs=SimpleNamespace(put=failed.append)
    )

    def unknown(request_id: str, meta: Any) -> None:
        raise NotImplementedError

    assert read(unknown, worker, "r", None) is None
    assert (failed, context.counters["unreadable"]) == (["r"], 1)
    worker._recving_transfers["r"] = [object()]  # a read of another rank's part is under way
    with pytest.raises(NotImplementedError):
        read(unknown, worker, "r", None)


def test_a_value_is_described_in_a_few_words() -> None:
    assert parameters.described("x" * 500) == f"'{'x' * 56}..."
    assert parameters.described([1] * 500) == "a list"


@pytest.mark.parametrize(
    "one", ["p-\u65e5", "p-\u65e5".encode().decode("latin-1"), "p-\u00a0", "p-\u00ad", type("Id", (str,), {})("p")]
)
def test_any_id_that_can_be_encoded_is_one(one: str) -> None:
    """An API server reads `X-Request-Id` as Latin-1."""
    whole = {**PULL, "remote_request_id": one, "remote_engine_id": one}
    assert left(whole) == (whole, {})


@pytest.mark.parametrize("one", ["p\n", "p\0", "p\x7f", "p\ud800"])
def test_no_other_text_is_one(one: str) -> None:
    assert left({**PULL, "remote_request_id": one}) == (None, {"refused": 1})
    assert left({**PULL, "remote_host": "\u00a0"}) == (None, {"refused": 1})


def test_parameters_may_be_of_a_kind_of_dict() -> None:
    """An engine in the program's own process is given what the program has."""
    whole = OrderedDict(PULL)
    found, counted = left(whole)
    assert (found is whole, counted) == (True, {})

"""`failed-loads`: what LMCache's connector is told of a request that begins anew, and who ran on lost blocks.

The rest is in tests/releases.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.failed_loads import wrappers as patch
from vllm_livepatch.patches.failed_loads.wrappers import begins_at


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
    begins_at(connector, "a", 32)
    assert [(spec.vllm_cached_tokens, spec.lmcache_cached_tokens) for spec in specs.values()] == [
        (32, noted),
        (101, hit),
    ]
    begins_at(connector, "unknown", 32)
    assert len(specs) == 2


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
    lost = patch._Losses(scheduler, loads, {2, 5})
    assert [request.request_id for request in lost.running] == ["passed", "there", "grew"]
    assert [request.request_id for request in lost.gone] == ["left"]
    assert list(lost.steps_on_lost_blocks("left")) == []  # the step that is answered is none under way
    assert list(lost.steps_on_lost_blocks("passed")) == list(loads.steps)

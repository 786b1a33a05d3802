"""`failed-loads`: what LMCache's connector is told of a request that begins anew; the rest is in tests/releases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
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

"""`multi-connector-metrics`: what is left out, however the release's method is called.

The metrics are a stand-in: what of a release is concerned is in tests/releases/test_multi_connector_metrics.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.multi_connector_metrics import wrappers as patch
from vllm_livepatch.sitecustomize.context import PatchContext

METRICS = SimpleNamespace(_prom_metrics={"LMCacheMPConnector": None})
KNOWN = {"LMCacheMPConnector": {"data": 1}}


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("unknown", [{}, {"MooncakeConnector": {"data": 2}}])
def test_what_a_child_without_metrics_tells_is_left_out_of_them(by_name: bool, unknown: dict[str, Any]) -> None:
    context = PatchContext("multi-connector-metrics", {}, {}, lambda: None)
    (wrapper,) = patch.wrappers(context).values()
    reported = {**KNOWN, **unknown}
    args, kwargs = ((), {"transfer_stats_data": reported, "engine_idx": 3}) if by_name else ((reported, 3), {})
    seen: list[Any] = []

    def observe(transfer_stats_data: Any, engine_idx: int) -> None:
        seen.append((transfer_stats_data, engine_idx))

    wrapper(observe, METRICS, *args, **kwargs)
    assert seen == [(KNOWN, 3)]
    assert context.counters == ({"left_out": 1} if unknown else {})
    assert reported == {**KNOWN, **unknown}

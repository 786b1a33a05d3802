"""`lmcache-finished-ids`: what counts as a store of a request whose id was used before.

The worker is a stand-in: what of a release is concerned is in tests/releases/test_lmcache_finished_ids.py.
"""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.lmcache_finished_ids import wrappers as patch
from vllm_livepatch.sitecustomize.context import PatchContext


def worker(futures: dict[str, Any]) -> Any:
    return SimpleNamespace(store_futures=futures, finished_stores={"reported"})


def submit(adapter: Any, request_id: str, begun: Any) -> PatchContext:
    """Ask for a store; `begun` is its future, None where the release begins none."""
    context = PatchContext("lmcache-finished-ids", {}, {}, lambda: None)

    def stored(request_id: str) -> None:
        if begun is not None:
            adapter.store_futures[request_id] = begun

    patch.wrappers(context)[f"{patch.ADAPTER}.submit_store_request"](stored, adapter, request_id)
    return context


@pytest.mark.parametrize("before", [{}, {"reported": Future()}])
def test_a_store_that_is_not_begun_changes_nothing(before: dict[str, Any]) -> None:
    """The end that was reported stands, and the store that is under way is waited for as it is."""
    adapter = worker(dict(before))
    context = submit(adapter, "reported", None)
    assert adapter.finished_stores == {"reported"}
    assert adapter.store_futures == before
    assert context.counters == {}


def test_a_store_of_an_id_that_was_reported_is_waited_for() -> None:
    adapter = worker({})
    context = submit(adapter, "reported", Future())
    assert adapter.finished_stores == set()
    assert context.counters == {"store_after_another": 1}

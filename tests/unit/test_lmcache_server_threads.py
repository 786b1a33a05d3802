"""A store behind LMCache's memory that raises when it is asked again for what was given up."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.lmcache_server_threads import wrappers
from vllm_livepatch.sitecustomize import guard
from vllm_livepatch.sitecustomize.context import PatchContext


class Adapter:
    """It begins every load, answers none, and raises once its store was restarted."""

    restarted = False

    def submit_load_task(self, keys: list[str], objects: list[Any]) -> int:
        return 0

    def query_load_result(self, task_id: int) -> Any:
        if self.restarted:
            raise OSError("the store was restarted")
        return None

    def nothing(self, *args: Any) -> None: ...

    submit_lookup_and_lock_task = query_lookup_and_lock_result = submit_unlock = nothing
    submit_store_task = pop_completed_store_tasks = nothing


def test_the_patch_goes_on_and_the_memory_is_given_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, wrappers.PREFETCH, SimpleNamespace(Bitmap=lambda number: [False] * number))
    failed: list[str] = []
    context = PatchContext("lmcache-server-threads", {"SECONDS": -1.0}, {}, lambda: None, failed=failed.append)
    made = wrappers.wrappers(context)
    adapter = Adapter()
    controller = SimpleNamespace(_l2_adapters=[adapter])
    made[f"{wrappers.PREFETCH}:PrefetchController.__init__"].look(None, controller)
    memory = SimpleNamespace(valid=True)
    memory.invalidate = lambda: setattr(memory, "valid", False)
    assert adapter.query_load_result(adapter.submit_load_task(["key"], [memory])) == [False]

    def begin(controller: Any) -> str:
        return "started"

    target = f"{wrappers.PREFETCH}:PrefetchController._start_pending_requests"
    start = guard.in_place_of(begin, made[target], context, target)
    adapter.restarted = True
    assert [start(controller), start(controller)] == ["started", "started"]
    assert failed == []
    assert (memory.valid, vars(adapter)[wrappers.SHIELD].given_up) == (False, {})
    assert context.counters == {"given_up": 1, "adapter_errors": 1}

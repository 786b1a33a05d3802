"""`lmcache-instance-ids`: a process's number becomes a random one, and no other does.

The adapter is a stand-in: what of a release is concerned is in tests/releases/test_lmcache_instance_ids.py.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from vllm_livepatch.patches.lmcache_instance_ids import wrappers as patch
from vllm_livepatch.sitecustomize.context import PatchContext


def numbered(*numbers: int) -> tuple[list[int], dict[str, int]]:
    """What adapters that were made with these numbers have, and what is counted."""
    context = PatchContext("lmcache-instance-ids", {}, {}, lambda: None)
    (after,) = patch.wrappers(context).values()
    adapters = [SimpleNamespace(instance_id=number) for number in numbers]
    for adapter in adapters:
        after.look(None, adapter, "tcp://127.0.0.1:1", parallel_strategy=None)
    return [adapter.instance_id for adapter in adapters], dict(context.counters)


def test_each_worker_of_a_process_has_a_number_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    numbers, counted = numbered(1, 1, 1)
    assert len({*numbers, 1}) == 4
    assert all(0 <= number < 1 << 63 for number in numbers)
    assert counted == {"numbered": 3}


def test_a_number_that_is_not_the_processs_stays() -> None:
    others = [0, os.getpid() + 1, (1 << 63) - 1]
    assert numbered(*others) == (others, {})

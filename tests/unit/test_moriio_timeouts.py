"""What the release tests of `moriio-timeouts` leave out: a request that ends twice."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.moriio_timeouts import reads
from vllm_livepatch.patches.moriio_timeouts.wrappers import Writes


class Transfer:
    pending = True


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    monkeypatch.setattr(reads, "in_progress", lambda status: status.pending)
    return Writes()


def test_a_request_ends_once(writes: Writes) -> None:
    """Whoever ends it first reports it; a second report would be of the next request with its id."""
    assert writes.end("one")
    assert not writes.end("one")
    assert writes.end("two")


def test_what_was_reported_may_end_again_under_its_id(writes: Writes) -> None:
    assert writes.end("one")
    writes.ended["one"] = 5.0  # reported: what was queued before is of no use
    assert writes.is_past(SimpleNamespace(request_id="one", enqueue_time=5.0))
    assert not writes.is_past(SimpleNamespace(request_id="one", enqueue_time=5.1))
    assert writes.end("one")
    assert writes.ended["one"] == math.inf


def test_a_request_that_was_given_up_is_released_when_its_last_transfer_has_ended(writes: Writes) -> None:
    first, second = Transfer(), Transfer()
    transfers: list[Any] = [first, second]
    writes.statuses["one"] = transfers
    writes.end("one")
    first.pending = False
    assert writes.take_released() == []
    second.pending = False
    assert writes.take_released() == ["one"]
    assert writes.take_released() == []

"""`lmcache-bounded-waits`: a store that the server made room for too late. Its waits are in tests/releases."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.lmcache_bounded_waits import wrappers as patch
from vllm_livepatch.sitecustomize.context import PatchContext


class EngineDrivenTransferContext:
    """By its name the patch tells that a worker copies in the step. It has a server's pool mapped."""

    def __init__(self, pool: str = "pool") -> None:
        self._engine_driven_context = SimpleNamespace(_shm_name=pool)


class Adapter:
    """A worker whose server is back, and has made room for one store."""

    def __init__(self) -> None:
        self.context = PatchContext("lmcache-bounded-waits", {"SECONDS": 30.0}, {}, lambda: None)
        self.transfer_ctx = EngineDrivenTransferContext()
        self.health = threading.Event()
        self.room = [SimpleNamespace(copy_=lambda chunk: self.filled.append(chunk))]
        self.filled: list[Any] = []
        self.committed: Callable[[], None] = lambda: None
        self.late = patch.Late(
            SimpleNamespace(
                query=lambda: True,
                result=lambda: SimpleNamespace(context={"slots": ["a slot"], "chunk_indices": [1]}),
            ),
            SimpleNamespace(
                _build_slot_tensors=lambda slots: self.room,
                commit_store=lambda *asked: self.committed(),
                mq_timeout=0.0,
                _shm_name="pool",
            ),
        )
        self.late.stored, self.late.chunks = ("key", 7), ["first", "second"]
        self.wait_for(self.late)

    def wait_for(self, *late: Any) -> None:
        setattr(self, patch._LATE, list(late))

    def recover(self) -> bool:
        return True

    def beat(self) -> None:
        beat = SimpleNamespace(_recover_callback=self.recover, _health_event=self.health, _interval=10.0)
        patch.wrappers(self.context)[f"{patch.MODULE}:HeartbeatThread._execute"](
            lambda: beat._health_event.set(), beat, (), {}
        )


def test_a_late_store_is_filled_once() -> None:
    """Also if a step gives another store up while the first is being committed."""
    adapter = Adapter()
    adapter.committed = lambda: adapter.wait_for(*getattr(adapter, patch._LATE))
    adapter.beat()
    adapter.beat()
    assert adapter.filled == ["second"]
    assert adapter.context.counters == {"stored_late": 1}


@pytest.mark.parametrize(("silent", "filled"), [(19.0, ["second"]), (21.0, [])])
def test_after_a_long_silence_the_room_may_be_anothers(
    monkeypatch: pytest.MonkeyPatch, silent: float, filled: list[str]
) -> None:
    """The server forgets a worker that is stopped, and gives its room to others."""
    adapter = Adapter()
    now = adapter.late.heard
    for after in (10.0, 10.0 + silent):  # not the whole time counts: it is heard of in between
        monkeypatch.setattr(patch, "clock", lambda after=after: now + after)
        adapter.late.answer.query = lambda after=after: after > 10.0
        adapter.beat()
    adapter.beat()
    assert adapter.filled == filled
    assert (adapter.late.context, adapter.late.chunks) == (None, [])


@pytest.mark.parametrize(("pool", "kept"), [("pool", True), ("another", False)])
def test_of_a_server_that_was_restarted_nothing_is_kept(pool: str, kept: bool) -> None:
    """Its pool's memory would stay for as long as it is mapped."""
    adapter = Adapter()
    adapter.late.answer.query = lambda: False
    adapter.transfer_ctx = EngineDrivenTransferContext(pool)
    adapter.beat()
    assert (adapter.late.context is not None, bool(adapter.late.chunks)) == (kept, kept)

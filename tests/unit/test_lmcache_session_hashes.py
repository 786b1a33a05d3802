"""`lmcache-session-hashes`: when a session's hashes are made anew, and when they are not.

The session is a stand-in: the releases' own is in tests/releases/test_lmcache_session_hashes.py.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from vllm_livepatch.patches.lmcache_session_hashes import wrappers as patch
from vllm_livepatch.sitecustomize.context import PatchContext

CHUNK = 2


class Asked:
    """A session behind the patch, which counts what it hashes."""

    def __init__(self) -> None:
        self.context = PatchContext("lmcache-session-hashes", {}, {}, lambda: None)
        self.set_tokens, self.get_hashes = patch.wrappers(self.context).values()
        self.hashed = 0
        self.session = SimpleNamespace(
            token_ids=[],
            chunk_hashes=[],
            last_prefix_hash=None,
            num_chunks_processed=0,
            hasher=SimpleNamespace(chunk_size=CHUNK),
        )

    def original(self, start: int, end: int | None) -> list[tuple[int, ...]]:
        session = self.session
        for number in range(session.num_chunks_processed, (len(session.token_ids) if end is None else end) // CHUNK):
            session.chunk_hashes.append(tuple(session.token_ids[: (number + 1) * CHUNK]))
            session.num_chunks_processed += 1
            self.hashed += 1
        return list(session.chunk_hashes[start // CHUNK : None if end is None else end // CHUNK])

    def name(self, tokens: list[int]) -> None:
        self.set_tokens(lambda named: setattr(self.session, "token_ids", named), self.session, tokens)

    def get(self, end: int | None, start: int = 0) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = self.get_hashes(self.original, self.session, start, end)
        return found


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch, "PIECE", 3)


def of(tokens: list[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[:end]) for end in range(CHUNK, len(tokens) + 1, CHUNK)]


def test_one_request_is_hashed_once_whether_it_names_more_or_less() -> None:
    asked, tokens = Asked(), list(range(12))
    for end in (4, 12, 8, 12, 2):
        asked.name(tokens[:end])
        assert asked.get(end) == of(tokens[:end])
    asked.name([*tokens, 99])
    assert asked.get(12, 10) == of(tokens)[5:]
    assert asked.hashed == 6
    assert not asked.context.counters


@pytest.mark.parametrize("place", [0, 3, 4, 7])
def test_another_request_is_given_its_own(place: int) -> None:
    asked, tokens = Asked(), list(range(8))
    other = [*tokens[:place], 99, *tokens[place + 1 :]]
    for one in (tokens, other, other[:4], tokens):
        asked.name(list(one))
        assert asked.get(len(one)) == of(one)
    assert asked.context.counters["hashed_anew"] >= 2


def test_a_message_that_comes_in_between_changes_nothing() -> None:
    asked, one, other = Asked(), [1] * 8, [2] * 8
    asked.name(one)
    between = threading.Thread(target=asked.name, args=(other,))
    between.start()
    between.join()
    assert asked.get(8) == of(one)


def test_the_end_asks_for_all_that_there_is() -> None:
    """Not for what this thread's last message has named: a lookup, before the answer was stored by another thread."""
    asked, tokens = Asked(), list(range(8))
    asked.name(tokens[:4])
    storing = threading.Thread(target=asked.name, args=(tokens,))
    storing.start()
    storing.join()
    assert asked.get(None) == of(tokens)

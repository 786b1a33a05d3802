"""A session of LMCache's server gives hashes of the tokens that the message at hand names.

The server keeps a session for each request id, whoever's it is, with the hashes of the chunks so far. It asks for a
message's hashes in two calls: `set_tokens` names its tokens, `get_hashes` answers from what is kept. Where two
requests have one id, the second is given the hashes of the first one's tokens: it loads and stores under another
prompt's keys.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...sitecustomize.kit import attached

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

SESSION = "lmcache.v1.multiprocess.session:Session"

_TURN = "_livepatch_turn"
"""Attribute of a session: held while its tokens are named, or hashes asked for. To 0.4.2 it has no lock."""
_HASHED = "_livepatch_hashed"
"""Attribute of a session: tokens that begin with those that its hashes are of."""

CHANGED = (
    "a request came to LMCache's server with other tokens than before: another request has its id, or had it. Each "
    "message is answered for its own tokens; give each request an id of its own"
)

PIECE = 4096
"""So many tokens are compared at once: two prompts of a million are compared without a copy of either."""


class Named(threading.local):
    """What this thread's last message has named. A server handles a message in one thread, and many at once."""

    session: Any = None
    tokens: Any = None


def begin_alike(one: Any, other: Any, length: int) -> bool:
    """Return whether the first `length` tokens of two lists are the same, and both have so many."""
    if min(len(one), len(other)) < length:
        return False
    return all(
        one[begin : min(begin + PIECE, length)] == other[begin : min(begin + PIECE, length)]
        for begin in range(0, length, PIECE)
    )


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    """The wrappers of the two targets."""
    named_here = Named()

    def set_tokens(original: Any, session: Any, full_token_ids: Any, *rest: Any, **named: Any) -> Any:
        with attached(session, _TURN, threading.Lock):
            result = original(full_token_ids, *rest, **named)
        named_here.session, named_here.tokens = session, full_token_ids
        return result

    def get_hashes(original: Any, session: Any, start: Any, end: Any = None, *rest: Any, **named: Any) -> Any:
        with attached(session, _TURN, threading.Lock):
            # Without an end it is asked for all that it has, when it ends, and not for a message's tokens.
            if end is not None and named_here.session is session:
                session.token_ids = named_here.tokens  # another message may have named its own since
            tokens, hashed = session.token_ids, session.num_chunks_processed * session.hasher.chunk_size
            # A message may name fewer tokens than are hashed: a load, behind a store of more.
            if hashed and not begin_alike(tokens, vars(session).get(_HASHED, ()), min(hashed, len(tokens))):
                livepatch.tell("hashed_anew", CHANGED)
                session.chunk_hashes, session.last_prefix_hash, session.num_chunks_processed = [], None, 0
            try:
                return original(start, end, *rest, **named)
            finally:
                if session.num_chunks_processed * session.hasher.chunk_size <= len(tokens):
                    setattr(session, _HASHED, tokens)

    return {f"{SESSION}.set_tokens": set_tokens, f"{SESSION}.get_hashes": get_hashes}

"""What one ask to one of prefill's workers is for, and what has become of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from .lines import Line

LOAD = "_livepatch_load"
"""Attribute of a pull: its `Load`."""


class Load:
    """Of one pull: how many of prefill's workers may still write for it, and whether one has failed.

    `counts_asks`: the workers that are asked are not known beforehand; each counts when its ask begins.
    """

    __slots__ = ("counts_asks", "failed", "left")

    def __init__(self, left: int, *, counts_asks: bool = False) -> None:
        self.left = left
        self.counts_asks = counts_asks
        self.failed = False


class Asked(dict[str, Any]):
    """The pulls of one ask to one worker of prefill's: what is answered, what is held, and if more answers come.

    0.33.0 copies what it is given and takes out what is answered: here that is to be seen.
    """

    def __init__(self, pulls: Mapping[str, Any]) -> None:
        super().__init__(pulls)
        self.engines = {pull.remote_engine_id for pull in pulls.values()}
        self.open = set(pulls)  # not answered
        self.held: dict[str, str] = {}  # whose load may still be written; from 0.30.0 on the key of what is held
        self.named: set[str] = set()  # in an answer, from 0.30.0 on
        self.broken: set[str] = set()  # of these, whose write has failed: no answer says when its rest has ended
        self.line: Line | None = None  # its socket, unless prefill's worker has answered that it began nothing
        self.unwatched = False  # it has a socket of which nothing is known
        self.closed = False  # the connection was seen to be closed
        self.over = False  # prefill's worker has sent its last answer, and does no more for this ask

    @property
    def sent(self) -> bool:
        """Prefill's worker may have it, and has not answered that it began nothing."""
        return self.unwatched or (self.line is not None and self.line.left)

    def copy(self) -> Asked:
        return self


ASKED: ContextVar[Asked | None] = ContextVar("asked", default=None)


class Decoder:
    """In the place of a worker's decoder of answers: the ask that is being answered sees each of them first."""

    def __init__(self, own: Any, read: Callable[[Asked, Any], None]) -> None:
        self.own = own
        self._read = read

    def decode(self, data: Any) -> Any:
        response = self.own.decode(data)
        asked = ASKED.get()
        if asked is not None:
            self._read(asked, response)
        return response


def writes_no_more(pull: Any, well: bool) -> bool:
    """One worker of prefill's writes no more for this pull. Whether it was the last one, and the load has failed."""
    load: Load = getattr(pull, LOAD)
    load.left -= 1
    load.failed |= not well
    return load.failed and not load.left


def blocks_of(pull: Any) -> set[int]:
    """The blocks that a pull asks to be filled; to 0.23 they are not by groups."""
    blocks: set[int] = set()
    for entry in pull.local_block_ids:
        blocks.update(entry if isinstance(entry, (list, tuple)) else (entry,))
    return blocks


def emptied(pull: Any) -> Any:
    """For a load that was reported as failed: it only tells prefill to let go, and nothing is reported of it again."""
    own = copy.copy(pull)
    own.local_block_ids, own.failed = [], True
    return own

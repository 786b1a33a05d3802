"""What a decode worker asks for, request by request, and what of it has left early."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from .layers import Begun


@dataclass(frozen=True)
class Group:
    """Which of a model's groups of KV caches leaves early: the only one of full attention. Others leave at the end.

    All groups have their blocks of one pool, so a block is one group's at a time, also where layers of several groups
    share memory; and the release writes blocks of a group to nothing but memory that these blocks are.
    """

    index: int = 0
    number: int = 1  # of groups

    def instead(self, groups: Sequence[list[int]], blocks: list[int]) -> list[list[int]]:
        """Blocks of all groups, with these in the place of this one's."""
        return [blocks if index == self.index else other for index, other in enumerate(groups)]

    def alone(self, blocks: list[int]) -> list[list[int]]:
        """Blocks of all groups, where the others have none."""
        return self.instead([[] for _ in range(self.number)], blocks)


Send = Callable[[bytes, Any, Any], Awaitable[None]]
"""The release's `send_kv_to_decode`: identity, socket, ask."""


@dataclass(eq=False)
class Part:
    """One request of one ask: `remote` are decode's blocks of a group, in order, for the last ones of the prompt."""

    ask: Ask
    name: str
    transfer: str
    remote: list[int]
    group: Group = Group()
    local: list[int] = field(default_factory=list)  # prefill's blocks that were sent, as many of `remote`
    begun: Begun | None = None  # the next ones, of which some layers were sent
    entry: Any = None  # of the release's, what it keeps of the transfer, as the first write found it
    blocks: int = 0  # of the whole prompt, as the first write found it
    closed: bool = False  # nothing more is begun
    void: bool = False  # what was sent, or is under way, counts for nothing
    failed: str | None = None  # the error of a write that failed, of which a rest may be under way
    under_way: asyncio.Task[None] | None = None
    reads: frozenset[int] = frozenset()  # prefill's blocks that are read by what is under way

    async def drained(self) -> None:
        """Nothing of it is under way, nor will be."""
        self.closed = True
        if self.under_way is not None:
            await asyncio.wait([self.under_way])

    def may_read(self, entries: Sequence[Any] | None, blocks: Collection[int]) -> bool:
        """Whether what is under way, or will be, may read what is kept as one of these (None: as any), or these blocks.

        The release may keep blocks that are read as another entry than it kept them when they began to be.
        """
        kept = entries is None or self.entry is None or any(self.entry is entry for entry in entries)
        return kept or not self.reads.isdisjoint(blocks)

    def sent_of(self, entry: Any) -> tuple[int, Begun | None]:
        """How many of its blocks need not be sent any more, where the release is about to send what it keeps.

        And the next ones, where some of their layers need not be.
        """
        if self.void or entry is not self.entry or len(entry.local_block_ids) != self.group.number:
            return 0, None
        own = entry.local_block_ids[self.group.index]
        if len(own) != self.blocks:
            return 0, None
        behind = own[self.blocks - len(self.remote) :]
        if behind[: len(self.local)] != self.local:
            return 0, None
        begun, number = self.begun, len(self.local)
        same = begun is not None and behind[number : number + len(begun.local)] == begun.local
        return number, begun if same else None


@dataclass(eq=False)
class Ask:
    """What a decode worker asks for, and the release's code that answers it."""

    identity: bytes
    meta: Any
    send: Send
    parts: dict[str, Part] = field(default_factory=dict)
    unanswered: set[str] = field(default_factory=set)
    withheld: set[str] = field(default_factory=set)  # requests that are not answered: a write for them failed


class Answer:
    """In the place of the socket, for an ask of our own."""

    data: bytes = b""

    async def send_multipart(self, parts: Any) -> None:
        _, self.data = parts

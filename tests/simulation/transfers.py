"""Requests as clients see them, and the transfers that read and write their blocks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.plan import BLOCK, RequestPlan

OUTPUT = 7
"""The token that the model answers with, where all that it read is the request's own KV."""
WRONG_OUTPUT = 99
"""The token that it answers with on lost KV."""

Touch = tuple[int, int, int]
"""Block, place in it, and what a transfer writes there or expects there."""


@dataclass(eq=False)
class Loss:
    """KV that a load of the step that computes did not bring: what is in its slots, and in those computed on them."""

    reported: int | None = None
    """How many steps had been scheduled when the scheduler had heard of it: none but these may run on it."""


@dataclass(eq=False)
class Transfer:
    """A load or a send of one request. Its touches are done in order, some a step, from step `begins` on."""

    kind: str  # "load" or "send"
    owner: Client
    touches: list[Touch]
    begins: int
    a_step: int  # touches done in a step
    until: int  # ends not before this step, whatever it has done
    fails: bool = False
    lost_from: int = 0  # where it fails: from which touch on
    lost: bool = False
    unheard: bool = False  # the worker has not been told yet that the request has ended
    # What is lost of it: see losses.py and answers.py.
    fate: str = ""
    asked_at: int = 0
    store: bool = False  # between the engine and an LMCache server
    stopped_at: int | None = None  # nobody does what was left of it from this step on
    lease_ends: int | None = None  # the step from which on the blocks that it reads may be another's
    loss: Loss = field(default_factory=Loss)
    foreign: str = ""  # what it read that was another's, under a lease
    early: bool = False  # its word is given, or was, though it may still touch its blocks
    silent: bool = False  # its word never comes, and should
    done: int = 0
    ended: bool = False
    reported: bool = False  # the scheduler has processed the word that it ended

    @property
    def blocks(self) -> set[int]:
        """Blocks that it may still touch."""
        return {block for block, _, _ in self.touches[self.done :]}

    @property
    def outstanding(self) -> bool:
        """Whether it may still touch its blocks, or will yet be reported."""
        return not (self.ended and (self.reported or self.lost or self.silent))

    @property
    def reach(self) -> int:
        """How many of its touches are done, if nobody stops it."""
        return self.lost_from if self.fails and not self.early else len(self.touches)

    @property
    def has_word(self) -> bool:
        """Whether the worker may say that it ended."""
        return (self.ended or self.early) and not self.silent


@dataclass(eq=False)
class Client:
    """A request from its arrival to its end. Two of one name are two of these."""

    plan: RequestPlan
    generation: int
    tokens: list[int]
    contents: list[int] = field(default_factory=list)
    request: Any = None
    arrived_at: int = 0
    ended: str = ""  # why, once the client has heard, or hung up
    delivered: int = 0
    local: int = 0  # tokens found in the engine's own cache when it was last matched
    asked: int = 0  # how often its lookup was asked for
    loaded_before: bool = False
    ran: bool = False
    failures: int = 0
    transfers: list[Transfer] = field(default_factory=list)

    def __post_init__(self) -> None:
        held = 0
        for token in [*self.tokens, *[OUTPUT] * (self.plan.outputs + 8)]:
            held = hash((held, token))
            self.contents.append(held)

    def __str__(self) -> str:
        return self.plan.name + "'" * self.generation

    def outstanding(self, kind: str) -> bool:
        """Whether a transfer of the kind is."""
        return any(each.kind == kind and each.outstanding for each in self.transfers)

    def content(self, place: int, group: int) -> int:
        """What a slot holds once its KV is there; each KV group has its own."""
        return self.contents[place] ^ group


class Memory:
    """The slots of all blocks: what is in each."""

    def __init__(self, blocks: int) -> None:
        self.slots: list[list[int | Loss]] = [[0] * BLOCK for _ in range(blocks)]

    def holds(self, client: Client, group: int, table: list[int], start: int, end: int) -> int | None:
        """The first place in [start, end) whose slot is not the client's; None where all are."""
        contents, slots = client.contents, self.slots
        for first in range(start - start % BLOCK, end, BLOCK):
            low, high = max(first, start), min(first + BLOCK, end)
            expected = contents[low:high] if not group else [each ^ group for each in contents[low:high]]
            if first // BLOCK >= len(table) or slots[table[first // BLOCK]][low - first : high - first] != expected:
                return low
        return None

    def write(self, client: Client, group: int, table: list[int], start: int, end: int, loss: Loss | None) -> None:
        """The model's own KV, computed; or what comes of lost KV."""
        for place in range(start, min(end, len(client.contents))):
            index = place // BLOCK
            if index < len(table) and table[index]:
                self.slots[table[index]][place % BLOCK] = client.content(place, group) if loss is None else loss

    def losses(self, client: Client, group: int, table: list[int], start: int, end: int) -> list[Loss | None]:
        """Of each slot in [start, end) that is not the client's, what was lost there; None where it is another's."""
        found: list[Loss | None] = []
        for place in range(start, end):
            index = place // BLOCK
            slot = self.slots[table[index]][place % BLOCK] if index < len(table) else 0
            if slot != client.content(place, group):
                found.append(slot if isinstance(slot, Loss) else None)
        return found


def places(client: Client, tables: tuple[list[int], ...], start: int, end: int) -> list[Touch]:
    """The slots of [start, end) in every KV group, but for what a sliding window has left behind (block 0)."""
    found: list[Touch] = []
    for place in range(start, end):
        for group, table in enumerate(tables):
            index = place // BLOCK
            if index < len(table) and table[index]:
                found.append((table[index], place % BLOCK, client.content(place, group)))
    return found


def prompt(plan: RequestPlan, generation: int) -> list[int]:
    """The tokens of a request: the family's first, then its own."""
    family = random.Random(plan.family)
    own = random.Random(f"{plan.name} {generation}")
    shared = [family.randrange(10, 200) for _ in range(plan.shared)]
    return shared + [own.randrange(10, 200) for _ in range(plan.prompt - plan.shared)]

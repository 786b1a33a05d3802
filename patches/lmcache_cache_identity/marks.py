"""Token ids for keys only: the first ids of a chunk whose KV depends on more than token ids are replaced by a digest.

A key is a hash over a chunk's ids and the hash before it, so a chunk that differs makes all later ones differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

WORDS = 5
"""So many ids at a chunk's beginning are replaced."""

BITS = 30
"""Of the digest, in each id: five have 150 bits. With the bit above, which is always set, an id fits a signed 32-bit
number, as it must (LMCache packs ids as 32 bits), and is none that a tokenizer has."""

Identity = tuple[tuple[str, ...], ...]
"""What decides the KV of a whole request beside its ids and images."""


class Marks:
    """The marks of one request. They are made of its own ids, so that marking ids twice is marking them once."""

    __slots__ = ("_embeds", "_made", "chunk", "identity", "request")

    def __init__(self, request: Any, identity: Identity, chunk: int) -> None:
        """`chunk` is LMCache's, in tokens."""
        self.request = request
        self.identity = identity
        self.chunk = chunk
        self._embeds: dict[int, str] = {}
        self._made: dict[int, tuple[list[int], int, list[int]]] = {}
        """A whole chunk's: of which ids, of how many images (a session gets more), and the marks."""

    def put(self, ids: list[int], start: int = 0) -> None:
        """Mark, in place, ids of which the first is the request's id number `start`."""
        end, images = start + len(ids), len(self.request.mm_features or ())
        for first in range(start - start % self.chunk, end, self.chunk):
            made, at = self._made.get(first), first - start
            if made is not None and at >= 0 and made[1] == images and made[0] == ids[at : at + WORDS]:
                # As nearly always: a long request's ids are asked for in each step in which it gets a block.
                if made[2]:
                    ids[at : at + WORDS] = made[2]
                continue
            for place, mark in enumerate(self._at(first), first):
                if start <= place < end:
                    ids[place - start] = mark

    def _at(self, first: int) -> list[int]:
        """The marks of the chunk that begins there; none where its KV depends on ids alone, or it is too short yet."""
        all_ids = self.request.all_token_ids
        ids = list(all_ids[first : first + WORDS])
        if len(ids) < WORDS:
            return []
        made, images = self._made.get(first), len(self.request.mm_features or ())
        if made is not None and made[:2] == (ids, images):
            return made[2]
        more = self._more(first)
        marks = marks_of((self.identity, more), tuple(ids)) if self.identity or more else []
        if len(all_ids) >= first + self.chunk:
            self._made[first] = ids, images, marks
        return marks

    def _more(self, first: int) -> list[tuple[Any, ...]]:
        """What decides the KV of one chunk, as vLLM's `generate_block_hash_extra_keys` has it for a block."""
        end = first + self.chunk
        found = images_of(self.request, first, end)
        embeds = getattr(self.request, "prompt_embeds", None)
        if embeds is not None and first < len(embeds):
            if first not in self._embeds:
                self._embeds[first] = digest_of(embeds[first:end])
            found.append(("embeds", self._embeds[first]))
        return found


class MarkedIds(Sequence[int]):
    """A request's ids, as many as there are at the time, with its marks: what LMCache makes keys of."""

    __slots__ = ("marks",)

    def __init__(self, marks: Marks) -> None:
        self.marks = marks

    def __len__(self) -> int:
        return len(self.marks.request.all_token_ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            place = range(len(self))[index]
            return self[place : place + 1][0]
        start, stop, step = index.indices(len(self))
        if step != 1:
            return self[:][index]
        ids: list[int] = self.marks.request.all_token_ids[start:stop]  # of vLLM's ConstantList: a list of its own
        self.marks.put(ids, start)
        return ids


def images_of(request: Any, first: int, end: float) -> list[tuple[Any, ...]]:
    """The images, and where they begin, of which tokens lie in a part of a request."""
    found: list[tuple[Any, ...]] = []
    for feature in request.mm_features or ():
        position = feature.mm_position
        if position.offset < end and position.offset + position.length > first:
            found.append(("mm", str(feature.identifier), position.offset))
    return found


def more_than_ids(request: Any) -> bool:
    """Whether a request has images or embeddings."""
    return bool(request.mm_features) or getattr(request, "prompt_embeds", None) is not None


def marks_of(identity: object, ids: tuple[int, ...]) -> list[int]:
    """As many marks as there are ids, which go into them: they are not in the key otherwise."""
    text = repr((identity, ids)).encode("utf-8", "surrogatepass")
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=20, person=b"livepatch-kv").digest(), "big")
    return [1 << BITS | (digest >> BITS * place) & ((1 << BITS) - 1) for place in range(WORDS)]


def digest_of(embeds: Any) -> str:
    """128 bits, in hexadecimal, of a tensor's type, shape and contents."""
    digest = hashlib.blake2b(f"{embeds.dtype} {tuple(embeds.shape)}".encode(), digest_size=16)
    uint8 = __import__("torch").uint8  # a tensor is here, so torch is imported
    digest.update(embeds.detach().cpu().contiguous().view(uint8).numpy())
    return digest.hexdigest()

"""Token ids for keys only: the first ids of a chunk whose KV depends on more than token ids are replaced by a digest.

A key is a hash over a chunk's ids and the hash before it, so a chunk that differs makes all later ones differ.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
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

    __slots__ = ("_alone", "_embeds", "_images", "_made", "chunk", "identity", "request")

    def __init__(self, request: Any, identity: Identity, chunk: int) -> None:
        """`chunk` is LMCache's, in tokens."""
        self.request = request
        self.identity = identity
        self.chunk = chunk
        self._alone = begun(identity, [])
        self._embeds: dict[int, str] = {}
        self._images = Images([])
        self._made: dict[int, tuple[list[int], int, list[int]]] = {}
        """A whole chunk's: of which ids, of how many images (a session gets more), and the marks."""

    def put(self, ids: list[int], start: int = 0) -> None:
        """Mark, in place, ids of which the first is the request's id number `start`."""
        request, made_of = self.request, self._made.get
        images, number = len(request.mm_features or ()), len(request.all_token_ids)
        alone = bool(self.identity) and not images and getattr(request, "prompt_embeds", None) is None
        for first in range(start - start % self.chunk, start + len(ids), self.chunk):
            made, at = made_of(first), first - start
            if at >= 0:
                here = ids[at : at + WORDS]
                if made is not None and made[1] == images:
                    # As nearly always: a long request's ids are asked for in each step in which it gets a block.
                    if not made[2] or here == made[2]:  # the latter: marked before
                        continue
                    if here == made[0]:
                        ids[at : at + WORDS] = made[2]
                        continue
                elif alone and made is None and len(here) == WORDS and here[0] < _ABOVE:
                    # A long prompt has thousands of chunks, all of which are marked in one step.
                    marks = ids[at : at + WORDS] = marks_of(self._alone, here)
                    if first + self.chunk <= number:
                        self._made[first] = here, images, marks
                    continue
            for place, mark in enumerate(self._at(first), at):
                if 0 <= place < len(ids):
                    ids[place] = mark

    def _at(self, first: int) -> list[int]:
        """The marks of the chunk that begins there; none where its KV depends on ids alone, or it is too short yet."""
        all_ids = self.request.all_token_ids
        ids = list(all_ids[first : first + WORDS])
        if len(ids) < WORDS:
            return []
        made, images = self._made.get(first), len(self.request.mm_features or ())
        if made is not None and made[0] == ids and made[1] == images:
            return made[2]
        more = self._more(first)
        marks: list[int] = []
        if self.identity or more:
            marks = marks_of(begun(self.identity, more) if more else self._alone, ids)
        if len(all_ids) >= first + self.chunk:
            self._made[first] = ids, images, marks
        return marks

    def _more(self, first: int) -> list[tuple[Any, ...]]:
        """What decides the KV of one chunk, as vLLM's `generate_block_hash_extra_keys` has it for a block."""
        end = first + self.chunk
        features = self.request.mm_features or ()
        if len(features) != len(self._images):
            self._images = Images(features)
        found = self._images.within(first, end) if features else []
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


class Images:
    """The images of a request, to be looked up by place: a prompt may have thousands, and as many chunks."""

    __slots__ = ("_all", "_begins", "_longest", "_order")

    def __init__(self, features: Sequence[Any]) -> None:
        self._all = tuple((one.mm_position.offset, one.mm_position.length, str(one.identifier)) for one in features)
        self._order = sorted(range(len(self._all)), key=lambda number: self._all[number][0])
        self._begins = tuple(self._all[number][0] for number in self._order)
        self._longest = max((length for _, length, _ in self._all), default=0)

    def __len__(self) -> int:
        return len(self._all)

    def within(self, first: int, end: float) -> list[tuple[Any, ...]]:
        """Those of which tokens lie in a part of the request, and where they begin, in the request's own order."""
        from_, to = bisect_right(self._begins, first - self._longest), bisect_left(self._begins, end)
        found = [self._all[number] for number in sorted(self._order[from_:to])]
        return [("mm", name, offset) for offset, length, name in found if offset + length > first]


def more_than_ids(request: Any) -> bool:
    """Whether a request has images or embeddings."""
    return bool(request.mm_features) or getattr(request, "prompt_embeds", None) is not None


def begun(identity: Identity, more: list[tuple[Any, ...]]) -> Any:
    """A hasher of what decides a chunk's KV beside its ids: a copy of it is cheaper than the text once more."""
    return hashlib.blake2b(
        f"({(identity, more)!r}, ".encode("utf-8", "surrogatepass"), digest_size=20, person=b"livepatch-kv"
    )


_ABOVE, _ALL = 1 << BITS, (1 << BITS) - 1


def marks_of(begun: Any, ids: list[int], above: int = _ABOVE, all_: int = _ALL) -> list[int]:
    """As many marks as there are ids, which go into them: they are not in the key otherwise."""
    hasher = begun.copy()
    hasher.update(b"(%d, %d, %d, %d, %d))" % tuple(ids))
    of = int.from_bytes(hasher.digest(), "big")
    # No loop: it costs as much as the digest.
    return [
        above | of & all_,
        above | of >> 30 & all_,
        above | of >> 60 & all_,
        above | of >> 90 & all_,
        above | of >> 120 & all_,
    ]


def digest_of(embeds: Any) -> str:
    """128 bits, in hexadecimal, of a tensor's type, shape and contents."""
    digest = hashlib.blake2b(f"{embeds.dtype} {tuple(embeds.shape)}".encode(), digest_size=16)
    uint8 = __import__("torch").uint8  # a tensor is here, so torch is imported
    digest.update(embeds.detach().cpu().contiguous().view(uint8).numpy())
    return digest.hexdigest()

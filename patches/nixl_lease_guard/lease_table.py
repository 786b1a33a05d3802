"""The memory in which a worker says whose leases it holds, for others to read, and into which it reads theirs.

The first part is the table: BUCKETS buckets of ENTRIES entries, each the digest of a request id, or zeros. A request's
entry may only lie in the bucket that its digest names, so a reader needs one bucket, with one small read, and nobody's
help. The second part has places for buckets that were read from others.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import re

from ...sitecustomize.kit import Remembered

DIGEST = 16
ENTRIES = 8
BUCKETS = 4096
"""With 2,000 leases at a time, one table in a thousand million has a bucket with more than ENTRIES of them."""
LANDINGS = 256
BUCKET = ENTRIES * DIGEST

FREE = bytes(DIGEST)
ASIDE = b"\xff" * BUCKET
"""A bucket of a worker whose patch stood aside: it says nothing of any lease."""

REMEMBERED = 65536
"""How many ids are remembered whose lease ended unread."""

_NAME = re.compile(r"\+livepatch-lease1-([0-9a-f]+)$")


class LeaseTable:
    """`address` is where others read; the memory lives as long as the process, since NIXL has it registered."""

    __slots__ = ("_ended", "_memory", "_places", "address", "free_landings", "size")

    def __init__(self) -> None:
        self.size = (BUCKETS + LANDINGS) * BUCKET
        self._memory = mmap.mmap(-1, self.size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._places: dict[str, int] = {}  # request id: where its entry begins
        # Digests of ids whose lease ended unread, oldest first: a client may choose an id of many kilobytes.
        self._ended: Remembered[bytes, None] = Remembered(REMEMBERED)
        self.free_landings = list(range(LANDINGS))
        _KEPT.append(self)

    # What this worker says

    def publish(self, request_id: str) -> bool:
        """Publish that the request's blocks are kept for its reader; False where that is not possible.

        An id whose lease has ended unread is not vouched for again: a late reader of the first request's blocks could
        not tell them from the second's.
        """
        if request_id in self._places:
            return True
        digest = digest_of(request_id)
        if digest in self._ended:
            return False
        first = bucket_of(request_id) * BUCKET
        for place in range(first, first + BUCKET, DIGEST):
            if self._memory[place : place + DIGEST] == FREE:
                self._memory[place : place + DIGEST] = digest
                self._places[request_id] = place
                return True
        return False

    def withdraw(self, request_id: str, unread: bool = False) -> bool:
        """Take the request's entry back; whether there was one. Call it before its blocks can be given away."""
        place = self._places.pop(request_id, None)
        if place is None:
            return False
        self._memory[place : place + DIGEST] = FREE
        if unread:
            self._ended.remember(digest_of(request_id), None)
        return True

    def stand_aside(self) -> None:
        """Say of no lease anything, from now on."""
        self._memory[: BUCKETS * BUCKET] = ASIDE * BUCKETS

    # What it reads of others

    def landing(self, number: int) -> int:
        """The address of a landing, emptied: what an earlier read left there must not answer for this one."""
        place = (BUCKETS + number) * BUCKET
        self._memory[place : place + BUCKET] = bytes(BUCKET)
        return self.address + place

    def landed(self, number: int) -> bytes:
        place = (BUCKETS + number) * BUCKET
        return self._memory[place : place + BUCKET]


_KEPT: list[LeaseTable] = []


def name_with(name: str, table: LeaseTable) -> str:
    """The name of an agent whose worker has a lease table: it travels in NIXL's metadata, unread by NIXL."""
    return f"{name}+livepatch-lease1-{table.address:x}"


def table_at(agent_name: str | bytes) -> int | None:
    """The address of the lease table of another worker, by its agent's name; None where it has none that we can read.

    NIXL gives the name as bytes.
    """
    found = _NAME.search(agent_name if isinstance(agent_name, str) else agent_name.decode(errors="replace"))
    return int(found[1], 16) if found else None


def digest_of(request_id: str) -> bytes:
    return hashlib.blake2b(request_id.encode(), digest_size=DIGEST).digest()


def bucket_of(request_id: str) -> int:
    return int.from_bytes(digest_of(request_id)[:4], "little") % BUCKETS


def held(bucket: bytes, request_id: str) -> bool:
    """Whether a bucket that was read says that the request's lease is held."""
    digest = digest_of(request_id)
    return any(bucket[place : place + DIGEST] == digest for place in range(0, BUCKET, DIGEST))

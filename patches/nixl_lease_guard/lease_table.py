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
"""A bucket with more leases than entries says nothing of any, until they fit again: readers read as on stock."""

FREE = bytes(DIGEST)
ASIDE = b"\xff" * BUCKET
"""A bucket that says nothing of any lease: it is too small for its own, or the worker's patch stood aside."""

REMEMBERED = 65536
"""How many ids are remembered whose lease ended unread."""

_NAME = re.compile(r"\+livepatch-lease1-([0-9a-f]+)$")


class LeaseTable:
    """`address` is where others read; the memory lives as long as the process, since NIXL has it registered."""

    __slots__ = ("_ended", "_held", "_memory", "address", "free_landings", "size")

    def __init__(self) -> None:
        self.size = (BUCKETS + LANDINGS) * BUCKET
        self._memory = mmap.mmap(-1, self.size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        # Digests of ids whose lease is held, by bucket and entry; FREE where there is none. An entry does not move
        # while others may read it.
        self._held: dict[int, list[bytes]] = {}
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
        number, digest = bucket_of(request_id), digest_of(request_id)
        held = self._held.get(number, [])
        if digest in held:
            return True
        if digest in self._ended:
            return False
        if FREE in held:
            held[held.index(FREE)] = digest
        else:
            held.append(digest)
        self._held[number] = held
        self._write(number)
        return True

    def withdraw(self, request_id: str, unread: bool = False) -> bool:
        """Take the request's entry back; whether there was one. Call it before its blocks can be given away."""
        number, digest = bucket_of(request_id), digest_of(request_id)
        held = self._held.get(number, [])
        if digest not in held:
            return False
        held[held.index(digest)] = FREE
        self._write(number)
        if unread:
            self._ended.remember(digest, None)
        return True

    def _write(self, number: int) -> None:
        """Write a bucket as it is now."""
        held = self._held[number]
        leases = len(held) - held.count(FREE)
        if leases <= ENTRIES < len(held):  # they fit again, and nobody has read an entry meanwhile
            held[:] = [digest for digest in held if digest != FREE]
        if not leases:
            del self._held[number]
        bucket = ASIDE if leases > ENTRIES else b"".join(held).ljust(BUCKET, b"\0")
        self._memory[number * BUCKET : (number + 1) * BUCKET] = bucket

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

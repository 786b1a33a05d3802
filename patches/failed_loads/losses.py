"""Which blocks hold lost KV, or KV that was computed on it, and whose they are. Nothing here is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Table = tuple[list[int], ...]
"""A request's block ids, a list for each KV cache group, by position. A block is of one pool, whatever its group."""


def block_sizes(scheduler: Any) -> list[int]:
    """Tokens of a block, for each KV cache group."""
    return [int(group.kv_cache_spec.block_size) for group in scheduler.kv_cache_config.kv_cache_groups]


def first_lost(table: Table, sizes: list[int], lost: set[int]) -> int | None:
    """The first token whose KV lies in a lost block, of any group; None where there is none."""
    places = (
        index * size
        for blocks, size in zip(table, sizes, strict=True)
        for index, block in enumerate(blocks)
        if block in lost
    )
    return min(places, default=None)


def spread(reported: Iterable[int], tables: Mapping[Any, Table], sizes: list[int]) -> tuple[set[int], set[Any]]:
    """All lost blocks, given those whose load failed; and the keys of the tables that have one.

    What a request computed behind a lost block was computed on it, in every group. Who shares such a block, has lost
    what lies behind it in turn, with a sliding window also without the first of them in its table.
    """
    lost = set(reported) - {0}  # the null block, which stands for what a sliding window has left behind, is nobody's
    hit: set[Any] = set()
    while True:
        before = len(lost)
        for key, table in tables.items():
            first = first_lost(table, sizes, lost)
            if first is not None:
                hit.add(key)
                for blocks, size in zip(table, sizes, strict=True):
                    lost.update(block for block in blocks[first // size :] if block)
        if len(lost) == before:
            return lost, hit


def tables_given(scheduled: Any) -> dict[str, Table]:
    """The whole block tables of the requests that began, or began anew, in a step: only they load in it."""
    given = {new.req_id: new.block_ids for new in scheduled.scheduled_new_reqs}
    cached = scheduled.scheduled_cached_reqs
    for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if name in cached.resumed_req_ids and blocks is not None:
            given[name] = blocks
    return given

"""Checks what a client or router sent to a MoRI-IO engine as `kv_transfer_params`, before the connector reads it.

The release's own reader of the fields says whether they are there. Types and bounds, which that reader takes as they
come, are checked here. Hosts and ids go into addresses and messages between engines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

OURS = (
    "do_remote_prefill",
    "do_remote_decode",
    "transfer_id",
    "remote_block_ids",
    "remote_engine_id",
    "remote_host",
    "remote_hosts",
    "remote_port",
    "remote_handshake_port",
    "remote_notify_port",
    "remote_dp_rank",
    "remote_dp_rank_override",
    "remote_dp_size",
    "remote_dp_size_local",
    "remote_tp_size",
    "tp_size",
    "is_request_leader",
)
"""Fields that MoRI-IO reads. All others in `kv_transfer_params` stay."""

TEXT_CHARACTERS = 4096
RANKS = 4096
BLOCKS = range(1 << 31)
HOST = re.compile(r"[A-Za-z0-9\[:][A-Za-z0-9.\-:%\[\]_]{0,253}")
"""What ZeroMQ takes as a host. It raises at anything else, in the engine core."""

Check = Callable[[Any], bool]


NO_NAME = re.compile(r"[\0-\x1f\x7f\ud800-\udfff]")


def text(value: Any) -> bool:
    """Return whether a value is an id: not empty, of a bounded length, without control characters and halves of others.

    An engine's ids hold what a client has sent as `X-Request-Id`. UTF-8 in that is read as Latin-1, of which some
    characters cannot be printed.
    """
    return isinstance(value, str) and 0 < len(value) <= TEXT_CHARACTERS and NO_NAME.search(value) is None


def host(value: Any) -> bool:
    return type(value) is str and HOST.fullmatch(value) is not None


def rank(value: Any) -> bool:
    return type(value) is int and 0 <= value < RANKS


def number_of_ranks(value: Any) -> bool:
    return type(value) is int and 0 < value <= RANKS


def absent_or(check: Check) -> Check:
    return lambda value: value is None or check(value)


GIVEN: dict[str, Check] = {
    "transfer_id": text,
    "remote_dp_rank": rank,
    "remote_dp_size": number_of_ranks,
    "remote_dp_size_local": absent_or(rank),  # 0: one pod
    "remote_tp_size": absent_or(number_of_ranks),
    "tp_size": absent_or(number_of_ranks),
    "remote_hosts": absent_or(lambda value: type(value) is list and all(map(host, value))),
}
"""Of fields that may be absent, what their values may be."""
SIZES = ("remote_tp_size", "tp_size")


def odd_field(parameters: Mapping[str, Any], zero_is_unknown: bool) -> str | None:
    """Return what is wrong with a field that is there, None where nothing is.

    `zero_is_unknown`: the release takes a 0 of SIZES as its own number of ranks.
    """
    for name, check in GIVEN.items():
        if zero_is_unknown and name in SIZES and type(parameters.get(name)) is int and parameters[name] == 0:
            continue
        if name in parameters and not check(parameters[name]):
            return f"{name} is {described(parameters[name])}"
    return None


def odd_peer(found: Any, offset: int, reads: bool) -> str | None:
    """Return what is wrong with a peer as the release read it (its ReqMeta), None where nothing is.

    `offset`: how far behind the notification port the ports of the peer's ranks may lie. `reads`: KV is read
    from it, of ranks that are counted.
    """
    rank_read = getattr(found, "remote_dp_rank", 0)
    if reads and rank_read >= found.remote_dp_size:
        return f"remote_dp_rank is {rank_read} of {found.remote_dp_size}"
    if not host(found.remote_host):
        return f"remote_host is {described(found.remote_host)}"
    for name in ("remote_handshake_port", "remote_notify_port"):
        if not 0 < getattr(found, name) <= 65535 - offset:
            return f"{name} is {getattr(found, name)}"
    return None


def odd_blocks(value: Any, needed: list[int], in_groups: bool) -> str | None:
    """Return what is wrong with the blocks to read, None where nothing is.

    `needed`: how many blocks each KV cache group takes at least. Not `in_groups`: there is one group.
    """
    if type(value) not in (list, tuple) or not value:
        return f"remote_block_ids is {described(value)}"
    groups = list(value) if in_groups else [value]
    if len(groups) != len(needed):
        return f"remote_block_ids is of {len(groups)} KV cache groups, and here are {len(needed)}"
    for group, number in zip(groups, needed, strict=True):
        if type(group) not in (list, tuple) or not all(type(one) is int and one in BLOCKS for one in group):
            return "remote_block_ids has something else than numbers of blocks"
        if len(group) < number:
            return f"remote_block_ids has {len(group)} blocks, and the prompt takes {number}"
    return None


def described(value: Any) -> str:
    """Return a value in a few words: a client's text goes into a log."""
    shown = repr(value) if value is None or type(value) in (bool, int, float, str) else f"a {type(value).__name__}"
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def without_ours(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the parameters that are left for other connectors, None where there are none."""
    return {name: value for name, value in parameters.items() if name not in OURS} or None

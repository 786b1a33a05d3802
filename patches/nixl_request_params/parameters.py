"""Checks what a client or router sent as `kv_transfer_params`, before any connector reads it.

Pure: a dictionary in, a sentence out. Ids and hosts go into messages between engines, so they must be text that can be
encoded.

Source: vllm PR#56585 (open), vllm#52234.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

TEXT_CHARACTERS = 4096
PORTS = range(1, 65536)
SIZES = range(1, 65536)
BLOCKS = range(1 << 31)

OURS = (
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_bootstrap_addr",
    "remote_engine_id",
    "remote_host",
    "remote_port",
    "remote_request_id",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "remote_registration_generation",
    "remote_block_size",
    "tp_size",
    "dcp_size",
    "pp_size",
    "transfer_id",
)
"""Fields that connectors of prefill and decode read. All others in `kv_transfer_params` stay."""

MARKS = ("_remote_blocks_processed", "_p_side_truncated")
"""What the originals note in the parameters themselves. From outside, such a mark makes a request wait for ever."""

LIMIT = "lmcache.max_offload_tokens"
"""Of LMCache's server, from its 0.5.6 on: so many tokens of the request are stored. The engine counts with it."""
STATISTICS = frozenset(("cached_token_stats", "num_lmcache_extra_cached_tokens"))
"""Of LMCache's server, from its 0.4.6 on, and of vLLM's own connector: the answer says how many tokens were cached."""

PEERS = ("remote_prefiller", "remote_kv_source", "remote_decoder")
PEERS_BEFORE = ("prefill", "decode")
"""Of the OffloadingConnector's P2P tier, and what it called them to vLLM 0.26.0: another engine, in an object."""
PEERS_TO_SERVE = ("remote_decoder", "decode")
"""Of these, those who read here: such an object has no address."""

Problem = str | None
Check = Callable[[Any], bool]


NO_NAME = re.compile(r"[\0-\x1f\x7f\ud800-\udfff]")
HOST = re.compile(r"[A-Za-z0-9\[:][A-Za-z0-9.\-:%;\[\]_*]{0,1023}")
"""What ZeroMQ takes as a host. It raises at anything else, in the engine core."""


def text(value: Any) -> bool:
    """Return whether a value is an address: printable, not empty, and of a bounded length."""
    return name(value) and value.isprintable()


def name(value: Any) -> bool:
    """Return whether a value is an id: not empty, of a bounded length, without control characters and halves of others.

    An engine's ids hold what a client has sent as `X-Request-Id`. UTF-8 in that is read as Latin-1, of which some
    characters cannot be printed.
    """
    return isinstance(value, str) and 0 < len(value) <= TEXT_CHARACTERS and NO_NAME.search(value) is None


def host(value: Any) -> bool:
    return isinstance(value, str) and HOST.fullmatch(value) is not None


def whole(value: Any) -> bool:
    """Return whether a value is a whole number; a caller in the engine's own process may send numpy's."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def port(value: Any) -> bool:
    """Return whether a value is a port. A decimal string is one: the originals write it into an address as it is."""
    if type(value) is str:
        return value.isascii() and value.isdigit() and len(value) <= 5 and int(value) in PORTS
    return whole(value) and int(value) in PORTS


def size(value: Any) -> bool:
    return whole(value) and int(value) in SIZES


def count(value: Any) -> bool:
    """Return whether a value is a number of a block, or of tokens. Only for an `int`, `in` of a range is quick."""
    return value in BLOCKS if type(value) is int else whole(value) and int(value) in BLOCKS


def number(value: Any) -> bool:
    """Return whether a value is a finite number. JSON as Python reads it has NaN and infinities."""
    return abs(int(value)) < 1e18 if whole(value) else isinstance(value, float) and abs(value) < 1e18


def blocks(value: Any) -> bool:
    """Return whether a value names a block: a list of numbers, or one such list for each KV cache group."""
    if type(value) not in (list, tuple) or not value:
        return False
    groups = value if type(value[0]) in (list, tuple) else [value]
    return any(groups) and all(type(group) in (list, tuple) and all(map(count, group)) for group in groups)


def optional(check: Check) -> Check:
    """Return the check of a field that may be absent or null."""
    return lambda value: value is None or check(value)


NAMES: dict[str, Check] = {
    "remote_engine_id": name,
    "remote_request_id": name,
    "remote_host": text,
    "remote_port": port,
}
SHAPES: dict[str, Check] = {
    "remote_num_tokens": optional(count),
    "remote_blocks_expiry_time": optional(number),
    "remote_registration_generation": optional(count),
    "remote_block_size": optional(size),
}
PARALLEL: dict[str, Check] = {"dcp_size": size, "pp_size": size}
"""Absent, each counts as 1; null is passed on to arithmetic."""

PULL: dict[str, Check] = {**NAMES, **SHAPES, "remote_block_ids": blocks}
PUSH: dict[str, Check] = {**NAMES, **SHAPES, "tp_size": size}
MOONCAKE: dict[str, Check] = {"remote_engine_id": name, "remote_bootstrap_addr": text, "transfer_id": name}
MOONCAKE_DIRECT: dict[str, Check] = {"remote_host": text, "remote_port": port}
"""Mooncake of 0.14.1 and 0.15.1, where decode asks the worker itself."""


def missing(parameters: Mapping[str, Any], checks: Mapping[str, Check]) -> Problem:
    """Return what is wrong with the fields of a load, None where each is there and right."""
    for field, check in checks.items():
        if not check(parameters.get(field)):
            return f"{field} is {described(parameters[field])}" if field in parameters else f"{field} is missing"
    for field, check in {"tp_size": size, **PARALLEL}.items():
        if field in parameters and not check(parameters[field]):
            return f"{field} is {described(parameters[field])}"
    return None


def odd_peer(peer: Any, served: bool) -> Problem:
    """Return what is wrong with another engine of the P2P tier. With what is missing the tier loads nothing."""
    if peer is None:
        return None
    if not isinstance(peer, dict):
        return f"is {described(peer)}"
    checks = {"kv_request_id": name} if served else {"kv_request_id": name, "remote_host": host, "remote_port": port}
    odd = next((field for field, check in checks.items() if peer.get(field) and not check(peer[field])), None)
    return None if odd is None else f"has {odd} {described(peer[odd])}"


def limit(value: Any) -> bool:
    """Return whether a value limits what LMCache stores; null does not."""
    return value is None or isinstance(value, int)


def described(value: Any) -> str:
    """Return a value in a few words: a client's text goes into a log."""
    shown = repr(value) if value is None or type(value) in (bool, int, float, str) else f"a {type(value).__name__}"
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def host_of(url: str) -> str:
    """Return the host of Mooncake's bootstrap server."""
    try:
        return urlsplit(url if "//" in url else f"//{url}").hostname or ""
    except ValueError:
        return ""


def without_ours(parameters: Mapping[str, Any], names: tuple[str, ...] = OURS) -> dict[str, Any] | None:
    """Return the parameters that are left for other connectors, None where there are none."""
    return {field: value for field, value in parameters.items() if field not in names} or None

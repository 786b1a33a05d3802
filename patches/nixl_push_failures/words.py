"""What prefill and decode workers say to each other, as notifications between their NIXL agents.

A release takes each of them for a heartbeat, finds no request of that name, and does nothing: so a worker without this
patch may be sent them. Only agents that have a worker's NIXL metadata can send it notifications.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

SIGN = b"HB:livepatch-push/"
"""What a notification of ours begins with. No release gives a request such a name."""

REFUSED, WITHDRAW = "refused", "withdraw"
"""Prefill: nothing of this registration was written, or will be. Decode: leave it, unless it has begun."""

ADDED = "livepatch_push"
"""Key of a registration: the token, and how decode's agent is reached."""

TOKEN_LETTERS = 32
LONGEST_ADDRESS = 16384
"""Bytes of what NIXL needs to reach an agent; about 300 with one network card, some thousand with eight."""


class Added(NamedTuple):
    """What decode adds to a registration."""

    token: str  # names the registration, and proves who speaks of it: only its prefill worker has it too
    address: bytes  # NIXL's metadata of decode's agent without its memory; empty where NIXL gives none


def added_to(registration: Mapping[str, Any]) -> Added | None:
    """What a registration has besides the release's own; None where decode's worker is without this patch."""
    given = registration.get(ADDED)
    if not isinstance(given, (list, tuple)) or len(given) != 2:
        return None
    token, address = given
    if not isinstance(token, str) or len(token) != TOKEN_LETTERS or not isinstance(address, bytes):
        return None
    return Added(token, address if len(address) <= LONGEST_ADDRESS else b"")


def notification(kind: str, token: str) -> bytes:
    return SIGN + f"{kind}/{token}".encode()


def take(notifications: dict[Any, list[bytes]]) -> list[tuple[str, str]]:
    """Take ours out of what NIXL has received, by sender; return the kind and the token of each that can be read."""
    words = []
    for sender, received in notifications.items():
        ours = [one for one in received if one.startswith(SIGN)]
        if not ours:
            continue
        notifications[sender] = [one for one in received if not one.startswith(SIGN)]
        for one in ours:
            kind, _, token = one[len(SIGN) : len(SIGN) + 2 * TOKEN_LETTERS].decode("ascii", "replace").partition("/")
            if kind in (REFUSED, WITHDRAW) and len(token) == TOKEN_LETTERS:
                words.append((kind, token))
    return words

"""Ports for the servers of a driver, which no other driver takes between the choice and the bind."""

from __future__ import annotations

import contextlib
import random
import socket

_choice = random.SystemRandom()  # a driver may seed the module's own
_reserved: list[socket.socket] = []
"""An abstract Unix socket by the name of each port that was given out: open, and so its name taken, while this process lives."""


def free_port() -> int:
    """A port on which nobody listens, and which is reserved for this process.

    It is below those that Linux gives to connections: somebody's connection could have one of those by the time that a server
    binds it, or binds it again after a restart. It is above 17,000: Mooncake's engine takes its own from 15,000 to there.
    """
    while True:
        port = _choice.randrange(17_000, 32_000)
        reservation = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError), socket.socket() as probe:
            reservation.bind(f"\0livepatch-port-{port}")
            probe.bind(("0.0.0.0", port))
            _reserved.append(reservation)
            return port
        reservation.close()

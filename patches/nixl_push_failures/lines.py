"""Two connections from a prefill worker to a decode worker, which listens.

Over the first they say what will not be written: JSON objects, one a line. On the second, the life line, decode says
nothing. Prefill never closes it while decode's end is open, so that its end (FIN, which prefill's kernel sends) says
that prefill's process is gone. A reset or a time-out says nothing of it. On the first, what prefill has not read when
it is killed makes its kernel send a reset instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import queue
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

CONNECT_SECONDS = 10.0
LONGEST = 1 << 16
"""Bytes of a message, more than any of ours."""

Message = dict[str, Any]

_open: set[socket.socket] = set()
"""Connections that nobody is to close: one that is no longer referred to would be closed."""


class Line:
    """One connection. `heard` is called with each message, `ended` once with whether the other process is gone, and
    `failed` with what either of them raises.

    Each has a thread that reads and one that writes, so that nobody who says something waits for the network.
    """

    __slots__ = ("_ended", "_failed", "_heard", "_outgoing", "alive", "peer")

    def __init__(
        self,
        heard: Callable[[Line, Message], None],
        ended: Callable[[Line, bool], None],
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._heard = heard
        self._ended = ended
        self._failed = failed
        self._outgoing: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.alive = True
        self.peer: str | None = None  # of a life line: the other worker's agent

    def say(self, message: Message) -> None:
        self._outgoing.put(message)

    def call(self, address: tuple[str, int]) -> None:
        """Connect, in a thread; what is to be sent meanwhile waits."""
        _begin("calls", self._call, address)

    def take(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel looks after an idle connection, so that nothing on the way forgets it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), 30)
        _open.add(connection)
        _begin("hears", self._read, connection)
        _begin("says", self._write, connection)

    def _call(self, address: tuple[str, int]) -> None:
        try:
            with socket.create_connection(address, CONNECT_SECONDS) as low:
                connection = last_to_close(low)
            connection.settimeout(None)
        except OSError:
            self._end(False)
        else:
            self.take(connection)

    def _write(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the reader hears of it
            while True:
                message = self._outgoing.get()
                if not self.alive:
                    return
                connection.sendall(json.dumps(message).encode() + b"\n")

    def _read(self, connection: socket.socket) -> None:
        gone = False
        try:
            for message in _messages(connection):
                self._heard(self, message)
            gone = True
        except (OSError, _ProtocolError):
            pass
        except Exception as error:
            self._end(False)
            self._failed("what another worker says", error)
            return  # and leave it open: see above
        self._end(gone)
        _open.discard(connection)
        connection.close()

    def _end(self, gone: bool) -> None:
        self.alive = False
        self._outgoing.put({})  # lets the writer see it
        try:
            self._ended(self, gone)
        except Exception as error:
            self._failed("the end of a connection", error)


class _ProtocolError(Exception):
    """What came over a connection is no message of ours."""


def _messages(connection: socket.socket) -> Iterator[Message]:
    """Until the other end has ended. Raises OSError where the connection breaks, and _ProtocolError."""
    begun = b""
    while received := connection.recv(LONGEST):
        *whole, begun = (begun + received).split(b"\n")
        for text in whole:
            try:
                message = json.loads(text)
            except ValueError as error:
                raise _ProtocolError from error
            if not isinstance(message, dict):
                raise _ProtocolError
            yield message
        if len(begun) > LONGEST:
            raise _ProtocolError


def last_to_close(connection: socket.socket) -> socket.socket:
    """The same connection under a high number. A process's files are closed in their order when it ends: so those
    through which NIXL's network cards write are closed by the time that this one is."""
    highest = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        number = fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, min(highest // 2, 1 << 16))
    except OSError:
        return connection.dup()
    return socket.socket(fileno=number)


def listen(towards: tuple[str, int], on_connection: Callable[[socket.socket], None]) -> tuple[str, int]:
    """Listen where `towards` can reach this machine; `on_connection` gets each connection, in a thread. OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: the kernel chooses the way
        host = str(probe.getsockname()[0])
    listener = socket.create_server((host, 0), family=family, backlog=1024)
    _begin("listens", _accept, listener, on_connection)
    return host, int(listener.getsockname()[1])


def _accept(listener: socket.socket, on_connection: Callable[[socket.socket], None]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # it was gone again, or there are too many open files
            time.sleep(1)
        else:
            on_connection(connection)


def _begin(does: str, target: Callable[..., None], *args: object) -> None:
    threading.Thread(target=target, args=args, daemon=True, name=f"livepatch-push-{does}").start()

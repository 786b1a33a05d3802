"""What a prefill worker says of the registrations that decode workers sent to it, and that it will not serve.

Source: vllm PR#50754, vllm#48633, vllm#46283. Why it suffices: docs/nixl-push-failures.md.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .decode import HOST, PORT, TOKEN
from .lines import Line, Message

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

REMEMBERED = 65536
"""How many registrations that were refused, and how many requests that are over, are remembered."""


class Registered:
    """A registration that may still be served, by one write."""

    __slots__ = ("address", "done", "handle", "handshake", "posted", "starting", "token", "withdrawn")

    def __init__(self, token: str, address: tuple[str, int]) -> None:
        self.token = token
        self.address = address  # of the decode worker
        self.starting = False  # the writer is about to write
        self.handshake: Any = None  # the future of the handshake that the writer left it for
        self.withdrawn = False  # decode does not want it any more
        self.handle: Any = None  # the write's, NIXL's
        self.posted = False  # NIXL has begun to write
        self.done = False


class Answers:
    """Of one prefill worker. Its methods are called by the engine's thread, the release's writer, and lines."""

    def __init__(self, livepatch: PatchContext) -> None:
        self._livepatch = livepatch
        self._lock = threading.Lock()
        self._lines: dict[tuple[str, int], Line] = {}  # by the decode worker's address
        self._lives: dict[tuple[str, int], Line] = {}
        self._registered: dict[str, Registered] = {}  # by token
        self._refused: OrderedDict[str, bool] = OrderedDict()  # token: whether it was posted
        self._writes: dict[Any, Registered] = {}  # by NIXL's handle
        self._over: OrderedDict[str, None] = OrderedDict()  # requests, by base id, that have ended for the scheduler
        self.leases = threading.Lock()  # held while leases end, and while a write is begun
        self.writing_for: str | None = None  # the request that the writer is about to write for
        self._starting: Registered | None = None
        self.left: list[str] = []  # requests that are over, whose registrations the writer has not looked for
        self.tidy = False  # registrations were refused that the release still keeps
        livepatch.on_stand_aside(self.fall_silent)
        self._silent = False

    def fall_silent(self) -> None:
        """Say nothing any more: what is written is no longer noticed here."""
        with self._lock:
            self._silent = True

    # Registrations

    def take(self, registration: Mapping[str, Any]) -> Registered | None:
        """A decode worker has registered. None where it has no bundle, or where it was refused before."""
        token, host, port = (registration.get(key) for key in (TOKEN, HOST, PORT))
        if not isinstance(token, str) or not isinstance(host, str) or not isinstance(port, int):
            return None
        with self._lock:
            if token in self._refused:
                return None
            registered = self._registered.get(token)
            if registered is None:
                registered = self._registered[token] = Registered(token, (host, port))
                self._say(registered.address, {"taken": token})
        return registered

    def unwanted(self, registration: Mapping[str, Any]) -> bool:
        """Whether this registration is one that decode knows is not served."""
        return registration.get(TOKEN) in self._refused

    def refuse(self, registered: Registered) -> None:
        """Tell decode that nothing is written for a registration, or nothing more."""
        with self._lock:
            self._refuse(registered)

    def _refuse(self, registered: Registered) -> None:
        if self._silent or self._registered.pop(registered.token, None) is None:
            return
        _remember(self._refused, registered.token, registered.posted)
        self._livepatch.count("rejected")
        self._say(registered.address, {"refused": registered.token, "posted": registered.posted})

    # Requests

    def ended(self, base_ids: Iterable[tuple[str, str]]) -> None:
        """Requests have ended for the scheduler: (base id, id) each. Their blocks are no longer theirs."""
        for base_id, request_id in base_ids:
            _remember(self._over, base_id, None)
            self.left.append(request_id)

    def begun(self, base_id: str) -> None:
        """A request is computed, maybe under the id of one that is over."""
        self._over.pop(base_id, None)

    def over(self, base_id: str) -> bool:
        return base_id in self._over

    # Writes

    @contextlib.contextmanager
    def writing(self, registered: Registered) -> Iterator[None]:
        """While the release begins a write. What comes to nothing is refused; a handshake is waited for."""
        with self._lock:
            registered.starting, registered.handshake = True, None
        self._starting = registered
        try:
            yield
        finally:
            self._starting = None
            with self._lock:
                registered.starting = False
                waits = registered.handshake is not None and not registered.withdrawn
                if registered.handle is None and not waits:
                    self._refuse(registered)
            if registered.handle is None and waits:
                registered.handshake.add_done_callback(
                    lambda future: self.refuse(registered) if future.exception() else None
                )

    def shaking(self, future: Any) -> None:
        """The release has asked whether hands were shaken: None, or a future."""
        if self._starting is not None:
            self._starting.handshake = future

    def made(self, handle: Any) -> None:
        """The writer has a handle for the write that it begins."""
        registered = self._starting
        if registered is None:
            return
        if registered.handle is not None:
            self._livepatch.say("several", "one registration is served by several writes: failures are not reported")
            self._livepatch.withdraw()
        registered.handle = handle
        self._writes[handle] = registered

    def posting(self, handle: Any) -> None:
        if handle in self._writes:
            self._writes[handle].posted = True

    def state(self, handle: Any, state: Any) -> None:
        if state == "DONE" and handle in self._writes:
            self._writes[handle].done = True

    def released(self, handle: Any) -> None:
        """NIXL has let a write go: nothing of it is under way."""
        registered = self._writes.pop(handle, None)
        if registered is None:
            return
        if registered.done:
            with self._lock:
                self._registered.pop(registered.token, None)
        else:
            self.refuse(registered)

    # Lines

    def _say(self, address: tuple[str, int], message: Message) -> None:
        if "taken" in message and not _alive(self._lives.get(address)):
            self._lives[address] = self._line(address)
            self._lives[address].say({"life": message["taken"]})
        if not _alive(self._lines.get(address)):
            self._lines[address] = self._line(address)
        self._lines[address].say(message)

    def _line(self, address: tuple[str, int]) -> Line:
        line = Line(self._heard, lambda line, gone: None, self._livepatch.stand_aside)
        line.call(address)
        return line

    def _heard(self, line: Line, message: Message) -> None:
        token = message.get("withdraw")
        if not isinstance(token, str):
            return
        with self._lock:
            if self._silent:
                return
            registered = self._registered.get(token)
            if registered is None:
                # It is written, or the word that it was refused was lost, or it has not come, and is not served then.
                if token not in self._refused:
                    _remember(self._refused, token, False)
                line.say({"refused": token, "posted": self._refused[token]})
            elif registered.handle is not None or registered.starting:
                registered.withdrawn = True  # decode hears how it ends
            else:
                self._refuse(registered)
                self.tidy = True


def _alive(line: Line | None) -> bool:
    return line is not None and line.alive


def _remember(where: OrderedDict[str, Any], key: str, value: Any) -> None:
    where.pop(key, None)
    where[key] = value
    if len(where) > REMEMBERED:
        where.popitem(last=False)

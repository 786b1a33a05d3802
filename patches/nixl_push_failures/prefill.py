"""Which of decode workers' registrations a prefill worker may still serve, and which it has refused.

Source: vllm PR#50754, vllm#48633, vllm#46283. Why it suffices: docs/nixl.md.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ...sitecustomize.kit import Remembered
from .words import added_to

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

OVER = 8192
"""How many requests that have ended are remembered, so that who registers for them is refused at once."""

REMEMBERED = 1024
"""How many refusals are remembered, so that they can be told again."""

STATE, LATE = "livepatch_state", "livepatch_late"
"""Keys of a registration, on prefill: what has become of it; that its request ended while hands were shaken for it."""

WAITS, BEGINS, WRITTEN, REFUSED = "waits", "begins", "written", "refused"


class Registered:
    """A decode worker's registration. It is refused at most once, and only before NIXL was given its write."""

    __slots__ = ("address", "base_id", "engine_id", "registration", "state", "token")

    def __init__(self, token: str, address: bytes, registration: dict[str, Any], base_id: str) -> None:
        self.token = token
        self.address = address
        self.engine_id = registration["decode_engine_id"]
        self.base_id = base_id
        self.registration: dict[str, Any] | None = registration  # None once it is refused
        self.state = WAITS


class Answers:
    """Of one prefill worker. Its methods are called by the engine's thread, the release's writer, and handshakes.

    `tell` sends a refusal to decode. What is kept goes when a write begins, or with the refusal.
    """

    def __init__(self, livepatch: PatchContext, tell: Callable[[Registered], None]) -> None:
        self._livepatch = livepatch
        self._tell = tell
        self._lock = threading.Lock()
        self._waiting: dict[str, Registered] = {}  # by token
        self._of_request: dict[str, dict[str, Registered]] = {}  # the same, by base id
        self._refused: Remembered[str, Registered] = Remembered(REMEMBERED)  # by token, the last ones
        # Requests, by base id, that have ended for the scheduler, the last ones.
        self._over: Remembered[str, None] = Remembered(OVER)
        self._left: deque[Registered] = deque()  # that the writer is to refuse
        self._late: dict[str, dict[str, Any]] = {}  # by request: the registration for which hands are shaken
        self._closed = False
        self.leases = threading.Lock()  # held while leases end, and while a write is begun
        self.writing_for: str | None = None  # the request that the writer is about to write for
        self.posted = False  # whether NIXL was given a write since the writer began this one
        self._handshake: Any = None  # the future that the writer left it for
        self._engine_id: Any = None  # decode's, while the writer begins

    # Registrations

    def take(self, registration: dict[str, Any], base_of: Callable[[str], str]) -> Registered | None:
        """A decode worker has registered, now or before. None where it has no bundle."""
        known = registration.get(STATE)
        if isinstance(known, Registered):
            return known
        added = added_to(registration)
        if added is None or self._livepatch.aside:
            return None
        if not isinstance(registration.get("decode_engine_id"), str):
            return None  # a stranger's, which the release keeps as it came
        with self._lock:
            registered = self._waiting.get(added.token) or self._refused.get(added.token)
            if registered is None:
                registered = Registered(*added, registration, base_of(registration["request_id"]))
                self._waiting[added.token] = registered
                self._of_request.setdefault(registered.base_id, {})[added.token] = registered
        registration[STATE] = registered
        return registered

    def sweep(self, pending: dict[str, Any]) -> None:
        """The writer refuses what was left to it, and what the release keeps of it is forgotten."""
        while self._left:
            self.refuse(self._left.popleft(), pending)

    def withdraw(self, token: str, pending: dict[str, Any]) -> None:
        """Decode wants a registration left. Of what has begun, or is not known, nothing is said."""
        registered = self._waiting.get(token)
        if registered is not None:
            self.refuse(registered, pending)
        elif token in self._refused:
            self._tell(self._refused[token])  # the word was lost

    def refuse(self, registered: Registered, pending: dict[str, Any]) -> None:
        """Never serve a registration that has not begun, and tell decode so."""
        with self._lock:
            if registered.state != WAITS:
                return
            registration = registered.registration
            registered.registration = None
            registered.state = REFUSED
            self._drop(registered)
            self._refused.remember(registered.token, registered)
        if registration is not None:
            request_id = registration["request_id"]
            if pending.get(request_id) is registration:
                del pending[request_id]
        self._livepatch.count("rejected")
        self._tell(registered)

    def left(self, registered: Registered) -> None:
        """Let the writer refuse it."""
        self._left.append(registered)

    def close(self, pending: dict[str, Any]) -> None:
        """The worker ends: nothing more is begun."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting.values())
        for registered in waiting:
            self.refuse(registered, pending)

    def _drop(self, registered: Registered) -> None:
        self._waiting.pop(registered.token, None)
        of_request = self._of_request.get(registered.base_id)
        if of_request is not None:
            of_request.pop(registered.token, None)
            if not of_request:
                del self._of_request[registered.base_id]

    # Requests

    def ended(self, requests: Iterable[tuple[str, str]]) -> None:
        """Requests have ended for the scheduler: (base id, id) each. Their blocks are no longer theirs."""
        with self._lock:
            for base_id, request_id in requests:
                self._over.remember(base_id, None)
                self._left.extend(self._of_request.get(base_id, {}).values())
                late = self._late.pop(request_id, None)
                if late is not None:
                    late[LATE] = True

    def begun(self, base_id: str) -> None:
        """A request is computed, maybe under the id of one that is over."""
        self._over.pop(base_id, None)

    def over(self, base_id: str) -> bool:
        return base_id in self._over

    # Writes

    def begins(self, request_id: str, base_id: str, registration: dict[str, Any]) -> bool:
        """Whether the writer may begin to write; the request's lease then holds meanwhile."""
        registered = registration.get(STATE)
        with self.leases, self._lock:
            self._late.pop(request_id, None)
            if self._closed or base_id in self._over:
                return False
            if isinstance(registered, Registered):
                if registered.state != WAITS:
                    return False
                registered.state = BEGINS
            self.writing_for = request_id
            self._engine_id = registration.get("decode_engine_id")
            self.posted, self._handshake = False, None
        return True

    def shaking(self, engine_id: Any, handshake: Any) -> None:
        """The release waits for a handshake with a decode engine."""
        if self.writing_for is not None and engine_id == self._engine_id:
            self._handshake = handshake

    def began(self, request_id: str, registration: dict[str, Any]) -> None:
        """The release has begun a write, left it for a handshake, or left it for good."""
        registered = registration.get(STATE)
        handshake = None if self.posted else self._handshake
        with self._lock:
            self.writing_for = None
            if handshake is not None:
                self._late[request_id] = registration
            if not isinstance(registered, Registered):
                return
            registered.state = WRITTEN if self.posted else WAITS
            if self.posted:
                self._drop(registered)
                registered.registration = None
                return
        if handshake is None:
            self.left(registered)
        else:
            handshake.add_done_callback(
                lambda future: self.left(registered) if future.cancelled() or future.exception() else None
            )

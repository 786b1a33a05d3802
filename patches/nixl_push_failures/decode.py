"""What a decode worker waits for: registrations, and what prefill says of them.

Source: vllm PR#50754, vllm#48633, vllm#46283. Why it suffices: docs/nixl.md.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .words import TOKEN_LETTERS

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

LOOK_SECONDS = 0.25
ASK_AGAIN_SECONDS = 30.0
ASKS_AT_ONCE = 64
"""How many registrations are asked about at most in each LOOK_SECONDS."""


class Waiting:
    """A registration whose KV has not come."""

    __slots__ = ("agent", "ask_at", "asked", "request_id", "token")

    def __init__(self, request_id: str, agent: str, token: str, ask_at: float) -> None:
        self.request_id = request_id
        self.agent = agent  # prefill's
        self.token = token
        self.asked = False
        self.ask_at = ask_at  # from when on prefill is asked to leave it, by time.monotonic()


class Desk:
    """Of one decode worker. Its methods are called by the engine's thread and by the release's writer.

    What it keeps, a few objects for each registration whose KV has not come, goes with that registration.
    """

    def __init__(self, livepatch: PatchContext, wait: float) -> None:
        self._livepatch = livepatch
        self._wait = wait
        self._lock = threading.Lock()
        # By token, in the order of `ask_at`, like those that were asked about. A dict trimmed at its front gets slow.
        self._new: OrderedDict[str, Waiting] = OrderedDict()
        self._asked: OrderedDict[str, Waiting] = OrderedDict()
        self._of_request: dict[str, Waiting] = {}
        self._failed: deque[Waiting] = deque()
        self._look = 0.0

    def register(self, request_id: str, agent: str) -> str:
        """Wait for what is registered now with this agent of prefill; return the registration's token."""
        token = secrets.token_hex(TOKEN_LETTERS // 2)
        with self._lock:
            self._forget(request_id)
            waiting = Waiting(request_id, agent, token, time.monotonic() + self._wait)
            self._new[token] = self._of_request[request_id] = waiting
        return token

    def ended(self, request_id: str) -> None:
        """The release has heard that a request's KV has come, or has not."""
        if request_id in self._of_request:
            with self._lock:
                self._forget(request_id)

    def refused(self, token: str) -> None:
        """Prefill says that nothing of this registration was written, or will be."""
        with self._lock:
            waiting = self._new.pop(token, None) or self._asked.pop(token, None)
            if waiting is None:
                return  # it has ended, or somebody says so who does not know
            self._failed.append(waiting)
        self._livepatch.count("refused")

    def failed(self) -> Iterator[str]:
        """Requests whose KV will not come any more, each once. Called in each step."""
        while self._failed:
            waiting = self._failed.popleft()
            if self._of_request.get(waiting.request_id) is waiting:
                self.ended(waiting.request_id)
                yield waiting.request_id

    def overdue(self) -> list[Waiting]:
        """Registrations that prefill is to be asked about now."""
        now = time.monotonic()
        if now < self._look:
            return []
        self._look = now + LOOK_SECONDS
        found: list[Waiting] = []
        with self._lock:
            for waits in (self._asked, self._new):
                while waits and len(found) < ASKS_AT_ONCE:
                    waiting = next(iter(waits.values()))
                    if waiting.ask_at > now:
                        break
                    del waits[waiting.token]
                    found.append(waiting)
            for waiting in found:
                waiting.ask_at = now + ASK_AGAIN_SECONDS
                self._asked[waiting.token] = waiting
        for waiting in found:
            self._say(waiting)
        return found

    def _say(self, waiting: Waiting) -> None:
        if not waiting.asked:
            waiting.asked = True
            self._livepatch.count("withdrawn")
            return
        self._livepatch.tell(
            "unanswered",
            f"the KV of request {waiting.request_id} has not come, and agent {waiting.agent} does not say that it will "
            "not be written (has it no bundle? has it ended? did a write fail?): its blocks are held, since they may "
            "still be written",
        )

    def _forget(self, request_id: str) -> None:
        waiting = self._of_request.pop(request_id, None)
        if waiting is not None:
            self._new.pop(waiting.token, None)
            self._asked.pop(waiting.token, None)


def agent_name(name: object) -> str:
    """NIXL gives the name of an agent as bytes."""
    return bytes(name).decode(errors="replace") if isinstance(name, (bytes, bytearray)) else str(name)

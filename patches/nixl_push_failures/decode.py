"""What a decode worker waits for: registrations, and what prefill says of them.

Source: vllm PR#50754, vllm#48633, vllm#46283. Why it suffices: docs/nixl-push-failures.md.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .lines import Line, Message, listen

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

TOKEN, HOST, PORT = "livepatch_token", "livepatch_host", "livepatch_port"
"""What a registration has besides the release's own: a name that nobody can guess, and where decode listens."""

REMEMBERED = 4096
"""How many registrations are remembered at least, besides those whose KV has not come."""
LOOK_SECONDS = 0.25
ASK_AGAIN_SECONDS = 10.0


class Waiting:
    """A registration whose KV has not come. Times are time.monotonic()."""

    __slots__ = ("agent", "ask_at", "failed", "request_id")

    def __init__(self, request_id: str, agent: str, ask_at: float) -> None:
        self.request_id = request_id
        self.agent = agent  # prefill's
        self.ask_at = ask_at  # from when on prefill is asked to leave it
        self.failed: float | None = None  # from when on it counts as failed


class Desk:
    """Of one decode worker. Its methods are called by the engine's thread, the release's writer, and lines."""

    def __init__(self, livepatch: PatchContext, wait: float) -> None:
        self._livepatch = livepatch
        self._wait = wait
        self._settle: float = livepatch.options["SETTLE_SECONDS"]
        self._lock = threading.Lock()
        self._addresses: dict[str, tuple[str, int]] = {}  # where this worker listens, by prefill's host
        self._lines: dict[str, Line] = {}  # by prefill's agent, like the rest
        self.lives: set[str] = set()  # agents that would be missed
        self._gone: set[str] = set()  # agents whose process is gone
        self.waiting: dict[str, Waiting] = {}  # by token
        self._tokens: dict[str, str] = {}  # by request
        # By token, also of what has ended: prefill may call when it has written.
        self._agents: OrderedDict[str, str] = OrderedDict()
        self._look = 0.0

    def register(self, request_id: str, agent: str, prefill: tuple[str, int]) -> Message | None:
        """What is added to a request's registration with a prefill worker; None where that one's process is gone.

        Raises OSError where this worker cannot listen.
        """
        token = secrets.token_hex(16)
        if prefill[0] not in self._addresses:
            self._addresses[prefill[0]] = listen(prefill, self._on_connection)
        host, port = self._addresses[prefill[0]]
        with self._lock:
            waiting = self.waiting[token] = Waiting(request_id, agent, time.monotonic() + self._wait)
            self.waiting.pop(self._tokens.get(request_id, ""), None)
            self._tokens[request_id] = token
            self._agents[token] = agent
            if len(self._agents) > REMEMBERED:
                self._agents.popitem(last=False)
            if agent in self._gone:  # it was never registered there: nothing can come
                waiting.failed = 0.0
                self._look = 0.0
                return None
        return {TOKEN: token, HOST: host, PORT: port}

    def ended(self, request_id: str) -> None:
        """The release has heard that a request's KV has come, or has not."""
        if request_id in self._tokens:
            with self._lock:
                self.waiting.pop(self._tokens.pop(request_id), None)

    def failed(self) -> Iterator[str]:
        """Requests whose KV will not come any more. Called in each step; prefill is asked of those that wait long."""
        now = time.monotonic()
        if not self.waiting or now < self._look:
            return
        self._look = now + LOOK_SECONDS
        with self._lock:
            entries = list(self.waiting.items())
        for token, waiting in entries:
            if waiting.failed is not None:
                if waiting.failed <= now:
                    yield waiting.request_id
            elif waiting.ask_at <= now:
                waiting.ask_at = now + ASK_AGAIN_SECONDS
                self._withdraw(token, waiting)

    def _withdraw(self, token: str, waiting: Waiting) -> None:
        line = self._lines.get(waiting.agent)
        if line is not None and line.alive:
            self._livepatch.count("withdrawn")
            line.say({"withdraw": token})
            return
        self._livepatch.count("unanswered")
        self._livepatch.say(
            "unanswered",
            f"the KV of request {waiting.request_id} has not come, and agent {waiting.agent} cannot be asked (is the "
            "bundle there?): its blocks are held, since it may still write them",
        )

    # Called by lines

    def _on_connection(self, connection: socket.socket) -> None:
        Line(self._heard, self._left, self._livepatch.stand_aside).take(connection)

    def _heard(self, line: Line, message: Message) -> None:
        kind = next(iter(message), "")
        token = message.get(kind)
        with self._lock:
            if not isinstance(token, str):
                return
            # The token went to one agent alone, so who has it is that agent.
            waiting = self.waiting.get(token)
            agent = self._agents.get(token) if waiting is None else waiting.agent
            if agent is None:
                return  # somebody who does not know us
            if kind == "life":
                line.peer = agent
                self.lives.add(agent)
            elif kind == "taken":
                self._lines[agent] = line
            elif kind == "refused" and waiting is not None and waiting.failed is None:
                self._livepatch.count("refused")
                waiting.failed = time.monotonic() + self._settle if message.get("posted") else 0.0
            self._look = 0.0

    def _left(self, line: Line, gone: bool) -> None:
        agent = line.peer
        if agent is None:
            return
        with self._lock:
            self.lives.discard(agent)
            if not gone:
                return
            self._gone.add(agent)
            until = time.monotonic() + self._settle
            for waiting in self.waiting.values():
                if waiting.agent == agent and waiting.failed is None:
                    waiting.failed = until
        self._livepatch.count("prefill_gone")
        self._livepatch.say("prefill_gone", f"the process of agent {agent} is gone: what it was to write failed")


def agent_name(name: Any) -> str:
    """NIXL gives the name of an agent as bytes."""
    return name if isinstance(name, str) else bytes(name).decode(errors="replace")

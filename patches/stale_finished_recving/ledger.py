"""What one scheduler waits for on behalf of requests that have finished; nothing of a release is called here."""

from __future__ import annotations

from typing import Any

from ...sitecustomize.kit import Remembered, leaves

Ids = set[str] | None

ANNOUNCES_ALWAYS = "LMCacheMPConnector"
"""Class name of the connectors, LMCache's and vLLM's own, that announce a send of every request, whether it ran or not.

They report it at the next step, or never where their server was lost; and a load that they refuse is reported by its
blocks, to LMCache 0.4.7 by nothing else.
"""

REMEMBERED = 65536
"""How many ids are remembered of which a send was given up."""


class Held:
    """A finished request that keeps its blocks, and which of its transfers have not ended yet.

    `empty_send`: the connector announced a send of a request that never ran, so that there is nothing to send. Its
    completion may come, or not (see docs/connector-completions.md): nobody waits for it.
    `announced`: the scheduler's set in which the workers hear that it has finished, where a completion that comes
    before that must be distinguished; None otherwise, and once the step that announced it has ended.
    """

    __slots__ = ("announced", "empty_send", "receive", "request", "send")

    def __init__(self, request: Any, receive: bool, send: bool, empty_send: bool) -> None:
        self.request = request
        self.receive = receive
        self.send = send
        self.empty_send = empty_send
        self.announced: set[str] | None = None


class Ledger:
    """What one scheduler still waits for on behalf of requests that have finished."""

    __slots__ = (
        "announces_always",
        "empties",
        "finishing",
        "given_up",
        "held",
        "output",
        "parked",
        "raw",
        "receiving",
        "see",
        "unsorted",
    )

    def __init__(self, connector: Any) -> None:
        self.announces_always = announces_always(connector)
        self.held: dict[str, Held] = {}
        # New requests with the id of a held one. Workers tell transfers apart by request id alone.
        self.parked: dict[str, list[Any]] = {}
        # Sends whose blocks were freed without their completion (by the reaper), oldest first: should it come after
        # all, it is not the completion of a later request with the same id.
        self.given_up: Remembered[str, int] = Remembered(REMEMBERED)
        # Empty sends whose blocks were freed before their completion, and the set in which the workers hear of their
        # end: the step with that set may bring it, no later one.
        self.empties: dict[str, set[str]] = {}
        # The requests that are being finished while their receive is pending.
        self.receiving: set[str] = set()
        self.finishing = False  # whether that is at somebody's request: else a request ends by its own last token
        # Completions (received, sent) of held requests that an error of ours has kept us from sorting.
        self.unsorted: tuple[set[str], set[str]] = set(), set()
        # What stands in the place of the connector's `update_connector_output`; the output that the scheduler is acting
        # on; and what the connector left in that, (received, sent), while the scheduler sees what it can act on.
        self.see: Any = None
        self.output: Any = None
        self.raw: tuple[Ids, Ids] | None = None

    def came_late(self, request_id: str) -> None:
        """A send's completion was that of an earlier request, whose blocks were freed without it."""
        count = self.given_up.pop(request_id, 0)
        if count > 1:
            self.given_up[request_id] = count - 1

    def give_up_send(self, request_id: str) -> None:
        self.given_up.remember(request_id, self.given_up.get(request_id, 0) + 1)


class Sorted:
    """What is to be done about the completions of one worker's output. Nothing is changed while it is found out."""

    __slots__ = ("dropped", "late", "passed", "ready", "received", "sent")

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.received: list[Held] = []
        self.sent: list[Held] = []
        self.late: list[str] = []
        self.dropped: list[tuple[str, str]] = []  # kind, request id
        self.passed: set[str] = set()  # sends that are left to the release


def announces_always(connector: Any) -> bool:
    """Whether each send that this connector announces of a request that never ran is one of `ANNOUNCES_ALWAYS`.

    NIXL, the usual other child, announces none of an aborted request.
    """
    kinds = {type(leaf).__name__ for leaf in leaves(connector)}
    return ANNOUNCES_ALWAYS in kinds and all(kind == ANNOUNCES_ALWAYS or kind.startswith("Nixl") for kind in kinds)

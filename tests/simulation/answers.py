"""What a connector's worker says of transfers that somebody else has lost: as our patches have it, as stock, and wrongly.

Nothing of a worker is real in these worlds. What is tried here is whether answers such as these suffice: each wrong class
differs from the right one in one thing, and a set of worlds that lets one of them pass looks at too little. That our
patches make real workers answer as `Patched` does is shown on the workers themselves (tests/releases).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.transfers import Client, Transfer
    from tests.simulation.world import World

WAIT = 10
"""Steps after which a worker asks about, or gives up, what has not come."""
ON_ITS_WAY = 2
"""Steps in which what a writer had sent when it was killed still arrives."""
NOTICE = 3
"""Steps after which a server that does not answer is asked for nothing more, or is asked again."""


class Patched:
    """Evidence alone ends a transfer.

    A pushed load (`nixl-push-failures`): the writer refuses what it has not begun, or ends what it has begun. One whose writer
    is killed stands for a connector that can prove that end: the patch cannot, and holds its blocks. A read (`nixl-lease-guard`): it counts if the lease held when it had ended. LMCache (`lmcache-bounded-waits`,
    `lmcache-failed-loads`, `lmcache-finished-ids`): what a killed server was doing is over, loads failed; what one that is
    stopped was doing is waited for; each request is reported when all its stores have ended, whatever its id.
    """

    says_first_store = False
    """Whether the end of one of a request's stores is reported as that of all."""
    says_ids_once = False
    """Whether an id that was reported before is never reported again."""

    def __init__(self, world: World) -> None:
        self.world = world

    def touches(self, transfer: Transfer) -> bool:
        """Whether a transfer touches its blocks in this step, by what has become of it."""
        now = self.world.now
        if transfer.fate in ("unwritten", "late"):
            overdue = now >= transfer.asked_at + WAIT
            begun = transfer.fate == "late" and now >= transfer.begins
            if overdue and begun:
                self.overdue(transfer)
            elif overdue:
                self.not_begun(transfer)
            return begun and not transfer.ended
        if transfer.fate == "killed":
            return self._killed(transfer)
        if transfer.store:
            return self._served(transfer)
        if transfer.kind == "send" and transfer.lease_ends is not None and now >= transfer.lease_ends:
            transfer.early = True  # its blocks are given away, whoever reads them
        return now >= transfer.begins

    def _killed(self, transfer: Transfer) -> bool:
        now = self.world.now
        if transfer.stopped_at is None and transfer.done >= len(transfer.touches) // 2 and now >= transfer.begins:
            transfer.stopped_at = now
            self.process_ended(transfer)
        if transfer.stopped_at is not None and now >= transfer.stopped_at + ON_ITS_WAY:
            self.nothing_on_its_way(transfer)
            return False
        return now >= transfer.begins

    def _served(self, transfer: Transfer) -> bool:
        now = self.world.now
        for outage in self.world.plan.outages:
            if transfer.stopped_at is None and outage.begins <= now < outage.ends:
                if not outage.killed:
                    if now >= max(outage.begins, transfer.asked_at) + WAIT:
                        self.overdue(transfer)
                    return False
                transfer.stopped_at = now
        if transfer.stopped_at is not None and now >= transfer.stopped_at + WAIT:
            self.server_gone(transfer)
        return transfer.stopped_at is None and now >= transfer.begins

    def give_up(self, transfer: Transfer) -> None:
        """Nobody touches its blocks any more; of a load, nothing counts."""
        transfer.ended = True
        transfer.fails, transfer.lost_from = transfer.kind == "load", 0
        self.world.say(f"{transfer.owner}'s {transfer.kind} is given up")

    def never_reported(self, transfer: Transfer) -> None:
        """It is over, and nobody will say so."""
        transfer.ended = transfer.silent = True

    # What the classes below do otherwise.

    def not_begun(self, transfer: Transfer) -> None:
        """The deadline of a pushed load that its writer has not begun: it refuses, and will not write."""
        self.give_up(transfer)

    def overdue(self, transfer: Transfer) -> None:
        """The deadline of one that is under way, or that a stopped server may yet go on with: it is waited for."""

    def process_ended(self, transfer: Transfer) -> None:
        """The writer's process has ended: what it had sent may still arrive."""

    def nothing_on_its_way(self, transfer: Transfer) -> None:
        """And now it has arrived."""
        self.give_up(transfer)

    def server_gone(self, transfer: Transfer) -> None:
        """The server that was asked has been killed meanwhile."""
        self.give_up(transfer)

    def believes(self, transfer: Transfer) -> bool:
        """Whether a reader takes what it has read, all of it by now."""
        return transfer.lease_ends is None or self.world.now < transfer.lease_ends

    def knows_server_gone(self) -> bool:
        """Whether lookups are answered with nothing."""
        now = self.world.now
        return any(each.begins + NOTICE <= now < each.ends + NOTICE for each in self.world.plan.outages)

    # Of LMCache's ids.

    def silent(self, client: Client) -> bool:
        """Whether the end of a client's stores is never reported."""
        name = client.plan.name
        return self.says_ids_once and any(
            each.kind == "send" and each.reported and each.owner.plan.name == name for each in self.world.transfers
        )


class Stock(Patched):
    """As the releases have it: docs/nixl.md and connector-completions.md.

    A load that LMCache's server never answered counts as loaded, as to LMCache 0.5.4.
    """

    says_first_store = True
    says_ids_once = True

    def not_begun(self, transfer: Transfer) -> None:
        if transfer.fate == "unwritten":
            self.never_reported(transfer)

    def nothing_on_its_way(self, transfer: Transfer) -> None:
        self.never_reported(transfer)

    def server_gone(self, transfer: Transfer) -> None:
        transfer.ended = True

    def believes(self, transfer: Transfer) -> bool:
        return True


class ByTime(Patched):
    """Wrong: what is overdue is reported as failed, whoever may still write it."""

    def not_begun(self, transfer: Transfer) -> None:
        (self.overdue if transfer.fate == "late" else self.give_up)(transfer)

    def overdue(self, transfer: Transfer) -> None:
        if not transfer.early:
            transfer.early = True
            transfer.fails, transfer.lost_from = transfer.kind == "load", 0


class AtItsEnd(Patched):
    """Wrong: nothing is on its way any more when a process has ended."""

    def process_ended(self, transfer: Transfer) -> None:
        transfer.early, transfer.fails, transfer.lost_from = True, True, 0


class LooksBefore(Patched):
    """Wrong: a reader looks at the lease before it reads."""

    def believes(self, transfer: Transfer) -> bool:
        return transfer.lease_ends is None or transfer.begins < transfer.lease_ends


class TakenBackLate(Patched):
    """Wrong: a reader still finds an entry of a lease some steps after it has ended."""

    def believes(self, transfer: Transfer) -> bool:
        return transfer.lease_ends is None or self.world.now < transfer.lease_ends + 2 * NOTICE


class BelievesLoads(Patched):
    """Wrong: a load that was never answered counts as loaded."""

    def server_gone(self, transfer: Transfer) -> None:
        transfer.ended = True


class FirstStore(Patched):
    """Wrong: the end of the first of two stores is reported."""

    says_first_store = True


class IdsOnce(Patched):
    """Wrong: an id is reported once."""

    says_ids_once = True


WRONG: dict[str, type[Patched]] = {
    "by-time": ByTime,
    "at-its-end": AtItsEnd,
    "looks-before": LooksBefore,
    "taken-back-late": TakenBackLate,
    "believes-loads": BelievesLoads,
    "first-store": FirstStore,
    "ids-once": IdsOnce,
}
"""Each wrong worker by its name on the command line."""

ANSWERS: dict[str, type[Patched]] = {"patched": Patched, "stock": Stock, **WRONG}

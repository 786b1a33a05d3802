"""How connectors behave, as far as a scheduler can see: which completions they announce, and which they report.

Each class stands for what the sources named in it do. None of them moves anything: that is the world's part.
"""

from __future__ import annotations

from tests.simulation.plan import RequestPlan
from tests.simulation.transfers import Client


class Behaviour:
    """A connector whose load is reported when it ended, and which sends nothing."""

    class_name = ""
    """The class that vLLM and LMCache call it."""
    class_names: tuple[str, ...] = ()
    """Those of its children, if it has any."""
    loads_in_step = False
    """Whether a load is done, or has failed, when the step that asks for it computes."""
    loads_again = True
    """Whether a request that was preempted is loaded again."""
    served = False
    """Whether loads and stores are an LMCache server's."""
    stores_aborted_loads = False
    """Whether the send of a request that ended as it loaded reads what is there by then, or nothing."""

    def hit(self, client: Client, tokens: int) -> int:
        """How many leading tokens the connector has of a request that has `tokens` now."""
        if client.loaded_before and not self.loads_again:
            return 0
        return min(client.plan.hit, tokens - 1 if self.loads_in_step else tokens)

    def announces(self, plan: RequestPlan, finished: str) -> list[str]:
        """The sends that `request_finished` announces, by what becomes of them: see World.begin_sends."""
        return []


class LMCache(Behaviour):
    """LMCache's MP connector (0.4.5 to 0.5.6, and vLLM's copy).

    Every finished request's free is delayed until `finished_sending`. For one that was loading, the worker reports that
    in the step that tells it of the end, without a look at the load (`_process_finished_stores`); the load's own
    completion is reported when it ended. Where its server was lost, the send is announced and never reported.
    """

    class_name = "LMCacheMPConnector"
    served = True

    def announces(self, plan: RequestPlan, finished: str) -> list[str]:
        return ["store"]


class Nixl(Behaviour):
    """NIXL, both roles: a prompt's KV is read from the other side once, and announced to be read by a decode engine.

    A read is reported when it ended, aborted or not. What is announced is read some time later, or its lease ends.
    """

    class_name = "NixlConnector"

    loads_again = False

    def announces(self, plan: RequestPlan, finished: str) -> list[str]:
        return ["read"] if plan.sends and finished == "FINISHED_LENGTH_CAPPED" else []


class NixlPush(Nixl):
    """NIXL's push connector (0.24.0 to 0.33.0), the decode side: the other side writes, when it gets to it.

    What it does not write tells nobody, on stock; answers.py says what our patch has it say.
    """

    class_name = "NixlPushConnector"


class MoRIIOWrite(Behaviour):
    """MoRI-IO's write mode: the other side writes, and this side hears when all was written."""

    class_name = "MoRIIOConnector"

    loads_again = False

    def announces(self, plan: RequestPlan, finished: str) -> list[str]:
        return ["read"] if plan.sends and finished == "FINISHED_LENGTH_CAPPED" else []


class MoRIIORead(MoRIIOWrite):
    """MoRI-IO's read mode to 0.22.1: the answer is `(n, False)`, and the load is done in the step that computes."""

    loads_in_step = True


class Multi(Behaviour):
    """MultiConnector of NIXL, which loads, and LMCache: a send is reported when all that were announced have ended.

    (`_extra_async_saves` counts them; a receive is passed on as it comes.)
    """

    class_name = "MultiConnector"
    class_names = ("NixlConnector", "LMCacheMPConnector")

    loads_again = False

    def __init__(self) -> None:
        self.children: list[Behaviour] = [Nixl(), LMCache()]

    def announces(self, plan: RequestPlan, finished: str) -> list[str]:
        return [each for child in self.children for each in child.announces(plan, finished)]


class Store(Behaviour):
    """MooncakeStore as `kv_both`, 0.21.0 to 0.27.1 (docs/connector-completions.md): what is loaded is also stored.

    So a send with contents and a load of one request may be under way at once, and each is reported at its own end.
    """

    class_name = "MooncakeStoreConnector"

    stores_aborted_loads = True

    def announces(self, plan: RequestPlan, finished: str) -> list[str]:
        return ["read"] if plan.sends else []


BEHAVIOURS: dict[str, type[Behaviour]] = {
    "lmcache": LMCache,
    "nixl": Nixl,
    "push": NixlPush,
    "moriio-write": MoRIIOWrite,
    "moriio-read": MoRIIORead,
    "multi": Multi,
    "store": Store,
}

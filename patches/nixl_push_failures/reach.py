"""How a worker's NIXL agent sends the patch's notifications, also to decode agents that it does not know yet.

The release makes a decode worker's agent known to prefill's by a handshake before the first write. A registration that
is refused before, or because there can be no handshake, is answered by the address that came with it.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

from .words import REFUSED, notification

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

    from .prefill import Registered

GUESTS = 64
"""How many agents are known by their address alone at most."""


class Reach:
    """Of one worker's agent."""

    def __init__(self, livepatch: PatchContext, worker: Any) -> None:
        self._livepatch = livepatch
        self._worker = worker
        self.agent = worker.nixl_wrapper
        self._guests: dict[str, Any] = {}  # by engine, the names of agents that only we made known

    def address(self) -> bytes:
        """What another agent needs to send this one notifications: NIXL's metadata of it, without any memory."""
        try:
            nothing = self.agent.get_reg_descs([(0, 1, 0, "")], "DRAM")
            nothing.clear()
            return bytes(self.agent.get_partial_agent_metadata(nothing, True, []))
        except Exception as error:  # a NIXL that has none: prefill answers once hands were shaken
            self._livepatch.say("no_address", f"NIXL does not say how its agent is reached: {error!r}")
            return b""

    def send(self, agent: Any, kind: str, token: str) -> bool:
        """Whether NIXL took it; whether it arrives is not said."""
        try:
            self.agent.send_notif(agent, notif_msg=notification(kind, token))
        except Exception as error:  # the agent is not known any more, or its connection is broken
            self._livepatch.say("unsent", f"a notification for agent {agent!r} cannot be sent: {error!r}")
            return False
        return True

    def tell(self, registered: Registered) -> None:
        """Tell decode that a registration is refused."""
        try:
            agents = self._worker._remote_agents.get(registered.engine_id)
            agent = next(iter(agents.values())) if agents else self._guest(registered)
        except Exception as error:
            self._livepatch.say("unreached", f"decode engine {registered.engine_id} cannot be told: {error!r}")
        else:
            if self.send(agent, REFUSED, registered.token):
                return
        self._livepatch.count("untold")

    def forget(self, most: int = 0) -> None:
        """Let agents go that the release has not made known since, but for so many."""
        while len(self._guests) > most:
            engine_id = next(iter(self._guests))
            name = self._guests.pop(engine_id)
            with self._worker._handshake_lock:
                if engine_id in self._worker._remote_agents or engine_id in self._worker._handshake_futures:
                    continue  # the release lets it go
                # Who registers can name any engine, and send the address of an agent that the release works with.
                if any(name in agents.values() for agents in self._worker._remote_agents.values()):
                    continue
            with contextlib.suppress(Exception):
                self.agent.remove_remote_agent(name)

    def _guest(self, registered: Registered) -> Any:
        if not registered.address:
            raise LookupError("no handshake, and no address")
        # Past what others have put around it: this agent's memory is not to be read or written.
        name = inspect.unwrap(type(self.agent).add_remote_agent)(self.agent, registered.address)
        self._guests.pop(registered.engine_id, None)
        self._guests[registered.engine_id] = name
        self.forget(GUESTS)
        return name

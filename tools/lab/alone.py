"""The right answers of an engine that has no connector: what a deployment that moves KV about is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_livepatch.tools.lab import topology
from vllm_livepatch.tools.lab.client import Client
from vllm_livepatch.tools.lab.loads import Conversations, Storm
from vllm_livepatch.tools.lab.storm import Turn, Visitors
from vllm_livepatch.tools.lab.supervisor import Supervisor
from vllm_livepatch.tools.lab.tally import Tally
from vllm_livepatch.tools.lab.topology import Deployment

ENGINE = topology.load("engine")


async def answers(
    parts: Supervisor, deployed: Deployment, spec: Storm | Conversations, seed: int
) -> Sequence[Sequence[Turn]]:
    """Bring the engine up, ask it for everything once, and stop it. Raises as ``Setup.prepare`` does."""
    async with parts, Client(deployed.url, topology.MODEL_NAME, spec.timeout) as client:
        await parts.start(deployed.parts)
        visitors = Visitors(client, spec, 0, seed, Tally())
        await parts.guard(visitors.undisturbed())
        return visitors.turns

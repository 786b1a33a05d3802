"""What else is lost in a world, drawn by a second stream, so that the plans of `draw` stay what they are.

Each plan here is the seed's own with losses laid over it, of one kind: loads that fail where a release has no way to go
on, a peer that does not write or is killed as it writes, a lease that ends in the midst of a read, an LMCache server that
is gone for some steps, requests without a hit that fill the pool exactly.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.simulation.plan import BLOCK, Outage, Plan, RequestPlan, draw

FATES = ("unwritten", "late", "killed")
"""Of a pushed load: nobody writes it; it is written beyond the reader's deadline, or only after it; its writer is killed."""
LEASE = "lease"
"""Of a read: the blocks at the other side become another's when half of it was read."""
ALWAYS = 1000
"""Failing loads of a request whose loads never succeed."""
MOST_RUNNING = 8


def lose(seed: int, tame: bool = False) -> Plan:
    """The plan of a seed, with losses. In a tame world nothing is lost: long pushes, and leases that hold."""
    rng = random.Random(f"losses {seed}")
    plan = replace(draw(seed, tame), losses=True)
    return (_tame if tame else rng.choice(KINDS))(rng, plan)


def _each(plan: Plan, change: Callable[[RequestPlan], dict[str, Any]], **values: Any) -> Plan:
    return replace(plan, requests=tuple(replace(each, **change(each)) for each in plan.requests), **values)


def _failing(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {}
    return {"failing_loads": rng.choice((1, 2, ALWAYS)), "fails_whole": rng.random() < 0.3}


def _reported_by(rng: random.Random) -> str:
    return rng.choice(("blocks", "id", "both"))


def in_the_step(rng: random.Random, plan: Plan) -> Plan:
    """Loads of the step that computes fail, with steps scheduled ahead and several KV groups too."""

    def change(request: RequestPlan) -> dict[str, Any]:
        changes = _failing(rng)
        if rng.random() < 0.7:  # others find what it leaves in the prefix cache, beyond what was to be loaded too
            changes |= {"family": 0, "shared": request.prompt, "hit": min(request.prompt, rng.randint(1, 3) * BLOCK)}
        if rng.random() < 0.2:  # before the failure is known
            changes |= {"aborted_after": rng.randint(0, 1), "aborted_in_step": True}
        return changes

    groups = "hybrid" if rng.random() < 0.35 else "full"
    return _each(plan, change, connector="moriio-read", groups=groups, reported_by="blocks")


def several_groups(rng: random.Random, plan: Plan) -> Plan:
    """Loads beside the steps fail, with several KV groups."""
    return _each(plan, lambda _: _failing(rng), groups="hybrid", reported_by=_reported_by(rng))


def pushes(rng: random.Random, plan: Plan) -> Plan:
    """What another engine was to write here is not written, or late, or half."""

    def change(request: RequestPlan) -> dict[str, Any]:
        fate = rng.choice(("", *FATES))
        hit = request.prompt if rng.random() < 0.7 else 0
        late = {"load_delay": rng.choice((0, 8, 14)), "load_steps": rng.choice((12, 20))} if fate == "late" else {}
        return {"hit": hit, "fate": fate, **late}

    return _each(plan, change, connector="push", reported_by=_reported_by(rng))


def leases(rng: random.Random, plan: Plan) -> Plan:
    """Leases end, of what is read here and of what is read there."""

    def change(request: RequestPlan) -> dict[str, Any]:
        loads = {"hit": request.prompt, "fate": LEASE} if rng.random() < 0.3 else {}
        return {"sends": True, "lease": rng.choice((0, 1, 3, 6)), "send_delay": rng.choice((0, 2, 5)), **loads}

    return _each(plan, change, connector="nixl", reported_by=_reported_by(rng))


def servers(rng: random.Random, plan: Plan) -> Plan:
    """LMCache's server is gone in the midst of stores and loads, and comes back; requests are stored in two parts."""
    outages, now = [], 0
    for _ in range(rng.randint(1, 2)):
        begins = now + rng.randint(2, 14)
        now = begins + rng.choice((2, 6, 12))
        outages.append(Outage(begins, now, rng.random() < 0.5))

    def change(request: RequestPlan) -> dict[str, Any]:
        hit = request.prompt // BLOCK * BLOCK if rng.random() < 0.5 else request.hit
        return {"hit": hit, "stores": rng.choice((1, 2)), "empty_send_silent": False}

    return _each(plan, change, connector="lmcache", outages=tuple(outages), reported_by=_reported_by(rng))


def crowds(rng: random.Random, plan: Plan) -> Plan:
    """Requests without a hit that fill the pool exactly, and then grow."""
    sizes = [rng.randint(1, 6) for _ in range(rng.randint(2, MOST_RUNNING))]
    requests = []
    for number, size in enumerate(sizes):
        prompt = size * BLOCK - rng.choice((0, 0, rng.randint(1, BLOCK - 1)))
        outputs = min(rng.choice((4, 10, 20, 40)), sum(sizes) * BLOCK - prompt)  # alone, each has room
        requests.append(RequestPlan(f"r{number}", arrives=1, prompt=prompt, outputs=outputs))
    crowded = replace(plan, requests=tuple(requests), blocks=sum(sizes) + 1, groups="full", budget=256)
    return replace(crowded, resets=(), lies=())


KINDS = (in_the_step, in_the_step, several_groups, pushes, pushes, leases, servers, servers, crowds)


def _tame(rng: random.Random, plan: Plan) -> Plan:
    whole = rng.random() < 0.5
    steps = rng.choice((4, 20))
    change = {"load_steps": steps, "lease": 200}
    connector = rng.choice(("push", "nixl"))
    return _each(plan, lambda one: {**change, "hit": one.prompt if whole else one.hit}, connector=connector)

"""What happens in one world, as data: drawn from a seed, written as JSON, cut down by deletion."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

CONNECTORS = ("lmcache", "nixl", "moriio-write", "moriio-read", "multi", "store")
"""Behaviours that `draw` gives; connectors.py says what each stands for, and has one more, for losses.py."""


@dataclass(frozen=True)
class RequestPlan:
    """One client's request, and what its transfers do. Sizes in tokens, times in steps."""

    name: str
    arrives: int
    prompt: int
    family: int = 0  # requests of one family begin with the same tokens
    shared: int = 0  # how many of them
    outputs: int = 3
    stops: bool = False  # ended by the model's end token, not by its length
    hit: int = 0  # what the connector holds of the prompt
    looked_up_after: int = 0  # steps in which the connector cannot tell yet
    load_delay: int = 0
    load_steps: int = 2
    failing_loads: int = 0  # how many of its loads fail
    load_lost: bool = False  # the word that a load ended never comes
    sends: bool = False
    send_delay: int = 0
    send_steps: int = 2
    send_unread: bool = False  # nobody reads: the lease ends it
    send_lost: bool = False
    empty_send_silent: bool = False  # LMCache announces a send of an aborted load, and never reports it
    aborted_after: int | None = None
    aborted_in_step: bool = False  # the abort comes while the model runs, not between steps
    # Of losses.py, which says what they mean.
    fails_whole: bool = False  # of a load that fails nothing was loaded, not half of it
    fate: str = ""  # of its loads
    lease: int = 0  # steps for which an announced read's blocks are held, 0 for as long as it takes
    stores: int = 1  # in how many parts LMCache stores it


@dataclass(frozen=True)
class Reset:
    """A client empties the prefix cache, running requests' blocks included or not."""

    step: int
    running: bool


@dataclass(frozen=True)
class Lie:
    """A completion that no transfer stands behind: `about` is a request's name, or one that nobody has."""

    step: int
    kind: str  # "recving" or "sending"
    about: str


@dataclass(frozen=True)
class Outage:
    """The LMCache server answers nobody in [begins, ends): it was stopped, or killed and started again."""

    begins: int
    ends: int
    killed: bool


@dataclass(frozen=True)
class Plan:
    """All of a world that is decided beforehand."""

    seed: int
    connector: str
    blocks: int  # of the pool, the null block included
    groups: str  # "full", or "hybrid": one group of full attention, two of a sliding window
    budget: int  # tokens that a step computes at most
    policy: str  # kv_load_failure_policy, where the release has it
    late: bool  # the device is a step behind, where the release fences blocks for that
    requests: tuple[RequestPlan, ...]
    resets: tuple[Reset, ...] = ()
    lies: tuple[Lie, ...] = ()
    losses: bool = False  # of losses.py: loads fail also where the release has no way to go on
    reported_by: str = ""  # how it is told of that, with losses: see World.tell_failures
    outages: tuple[Outage, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Plan:
        """The plan that `to_json` wrote; fields that a shrunk or older plan lacks have their defaults."""
        known = {field.name for field in fields(cls)}
        given = {name: value for name, value in values.items() if name in known}
        given["requests"] = tuple(RequestPlan(**each) for each in values["requests"])
        given["resets"] = tuple(Reset(**each) for each in values.get("resets", ()))
        given["lies"] = tuple(Lie(**each) for each in values.get("lies", ()))
        given["outages"] = tuple(Outage(**each) for each in values.get("outages", ()))
        return cls(**given)


BLOCK = 8
"""Tokens in a block."""
LONGEST_PROMPT = 6 * BLOCK


def draw(seed: int, tame: bool = False) -> Plan:
    """The plan of a seed. In a tame world nobody aborts, lies or resets, and nothing is lost, fails or comes again."""
    rng = random.Random(seed)
    connector = rng.choice(CONNECTORS)
    lies = not tame and rng.random() < 0.35
    loses = not tame and rng.random() < 0.15
    requests: list[RequestPlan] = []
    for number in range(rng.randint(3, 9)):
        requests.append(_request(rng, f"r{number}", connector, tame, loses, requests))
    steps = max(each.arrives for each in requests) + 14
    resets = tuple(
        Reset(rng.randint(1, steps), rng.random() < 0.5)
        for _ in range(0 if tame or rng.random() < 0.75 else rng.randint(1, 2))
    )
    names = [*(each.name for each in requests), "nobody"]
    reported = tuple(
        Lie(rng.randint(2, steps + 10), rng.choice(("recving", "recving", "sending")), rng.choice(names))
        for _ in range(rng.randint(4, 16) if lies else 0)
    )
    return Plan(
        seed=seed,
        connector=connector,
        blocks=rng.choice((14, 18, 22, 30, 48)),
        groups="hybrid" if rng.random() < 0.2 else "full",
        budget=rng.choice((24, 64, 256)),
        policy=rng.choice(("recompute", "fail")),
        late=rng.random() < 0.4,
        requests=tuple(requests),
        resets=resets,
        lies=reported,
    )


def _request(
    rng: random.Random, name: str, connector: str, tame: bool, loses: bool, earlier: list[RequestPlan]
) -> RequestPlan:
    prompt = rng.randint(3, LONGEST_PROMPT)
    hit = 0
    if rng.random() < 0.6:
        whole = rng.random() < 0.3 or connector == "nixl"
        hit = prompt if whole else rng.randint(0, prompt // BLOCK) * BLOCK
    lost = loses and rng.random() < 0.3
    aborted = rng.randint(0, 12) if not tame and rng.random() < 0.4 else None
    if not tame and earlier and rng.random() < 0.12:
        name = rng.choice(earlier).name
    return RequestPlan(
        name=name,
        arrives=rng.randint(0, 24),
        prompt=prompt,
        family=rng.randint(0, 1),
        shared=rng.randint(0, prompt) if rng.random() < 0.5 else 0,
        outputs=rng.choice((1, 1, 2, 4, 10, 20)),
        stops=rng.random() < 0.2,
        hit=hit,
        looked_up_after=rng.choice((0, 0, 0, 2)),
        load_delay=rng.choice((0, 0, 1, 3)),
        load_steps=rng.choice((1, 2, 4, 9)),
        failing_loads=0 if tame or rng.random() < 0.85 else rng.randint(1, 2),
        load_lost=lost and rng.random() < 0.5,
        sends=rng.random() < 0.6,
        send_delay=rng.choice((0, 0, 1, 4)),
        send_steps=rng.choice((1, 2, 5, 12)),
        send_unread=rng.random() < 0.15,
        send_lost=lost,
        empty_send_silent=rng.random() < 0.2,
        aborted_after=aborted,
        aborted_in_step=rng.random() < 0.4,
    )


def smaller(plan: Plan) -> list[Plan]:
    """Plans with a little less in them, those with the least first."""
    found: list[Plan] = []
    count = len(plan.requests)
    size = count
    while size > 1:
        size = (size + 1) // 2
        if size < count:
            for first in range(0, count, size):
                found.append(replace(plan, requests=plan.requests[:first] + plan.requests[first + size :]))
        if size == 1:
            break
    for field in ("resets", "lies", "outages"):
        events = getattr(plan, field)
        if events:
            nothing: dict[str, Any] = {field: ()}
            found.append(replace(plan, **nothing))
        if len(events) > 1:
            for index in range(len(events)):
                fewer: dict[str, Any] = {field: events[:index] + events[index + 1 :]}
                found.append(replace(plan, **fewer))
    plain: dict[str, Any] = {"groups": "full", "late": False, "budget": 256, "reported_by": "", "losses": False}
    for name, simple in plain.items():
        if getattr(plan, name) != simple:
            simpler_world: dict[str, Any] = {name: simple}
            found.append(replace(plan, **simpler_world))
    blank = RequestPlan("", 0, 0)
    simpler = ("shared", "family", "stops", "hit", "looked_up_after", "failing_loads", "load_lost", "send_lost", "sends",
               "send_unread", "empty_send_silent", "aborted_after", "aborted_in_step", "load_delay", "send_delay",
               "fails_whole", "fate", "lease", "stores")  # fmt: skip
    for index, request in enumerate(plan.requests):
        changes: list[dict[str, Any]] = [
            {name: getattr(blank, name)} for name in simpler if getattr(request, name) != getattr(blank, name)
        ]
        if request.outputs > 1:
            changes.append({"outputs": 1})
        if request.arrives:
            changes.append({"arrives": request.arrives // 2})
        for change in changes:
            requests = (*plan.requests[:index], replace(request, **change), *plan.requests[index + 1 :])
            found.append(replace(plan, requests=requests))
    return [each for each in found if each.requests]

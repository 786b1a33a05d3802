# mypy: disable-error-code="import-not-found"
"""A long life of one engine: many short requests of every kind, and nothing at fault."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.scale import hardship
from tests.scale.engine import Client, Engine
from tests.scale.lmcache_double import Server
from tests.scale.loads import LOOKS, QUIET_STEPS, left_in, make, prompt, settle
from tests.scale.ours import kept, slow_fronts, threads_and_files

REUSED = 200
"""By so many requests later an id may be used again."""
AT_ONCE = 40
"""So many clients are there at once."""
ROOMY = 1024
"""Blocks of a pool beside sessions, which hold theirs while they wait: of 96 they hold all, and stock stands still."""
WARM = 50
"""By this step LMCache has started its threads, and the bundle those that begin with the first LoRA adapter."""
NIGHTS = 30
"""In a month there are so many nights, in which nobody comes."""
DAY = 24 * 3600.0
"""Seconds."""


def life(
    model_config: Any,
    *,
    requests: int,
    lmcache: bool,
    seed: int = 0,
    hang_ups: bool = True,
    sessions: bool = False,
    adapters: int = 0,
    month: bool = False,
    nothing_left: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Many short requests: hang-ups, some with another try by the same id at once; ids that have ended used again;
    prompts that begin alike; a pool too small for all, so that some are preempted; and resets of the prefix cache.

    Without `hang_ups` nobody leaves: beside LMCache a stale completion ends stock in a life that is long enough.
    `sessions`: some clients send several prompts, one after another or all at once. `adapters`: most have one of twice as
    many LoRA adapters. `month`: the clocks of this process run through a month. `nothing_left`: once LMCache has
    started its threads, no thread can be started and no file opened. What a client does is its number's, not the moment's: stock and patched may take a different number
    of steps.
    """
    engine, server = make(
        model_config, lmcache, blocks=ROOMY if sessions else 96, running=32, adapters=adapters, **options
    )
    clients = Clients(engine, requests, seed, hang_ups, sessions, adapters)
    looks: list[dict[str, int]] = []
    slow: set[str] = set()
    clock = hardship.Clock() if month else None
    nights = 0
    before = threads_and_files()
    with contextlib.ExitStack() as stack:
        while clients.go_on() and clients.quiet <= QUIET_STEPS:
            if engine.now == WARM:
                before = threads_and_files()
            if nothing_left and engine.now == WARM:
                stack.enter_context(hardship.nothing_left())
            night = clock is not None and len(clients.all) * NIGHTS // requests > nights
            if not night:
                clients.come()
            elif not clients.living:
                nights += 1
                sleep(engine, server, clock)
            clients.hang_up()
            if engine.now % 100 == 99:
                engine.reset()
            engine.step()
            server.step()
            clients.look()
            if len(clients.all) * LOOKS // requests > len(looks):
                looks.append(kept(engine.roots()))
                slow.update(slow_fronts(engine.roots()))
        settle(engine, server)
    after = threads_and_files()
    return {
        "ends": {**Counter(client.outcome() for client in clients.all), **left_in(engine)},
        "kept": looks,
        "slow": sorted(slow),
        "grown": {name: after[name] - before[name] for name in after},
        "preempted": engine.preempted,
    }


def sleep(engine: Engine, server: Server, clock: hardship.Clock | None) -> None:
    """A night: all has ended, and a day has passed when the next client comes."""
    settle(engine, server)
    assert clock is not None
    clock.ahead += DAY
    settle(engine, server)


@dataclass
class Clients:
    """Those of one life, who are drawn by their number."""

    engine: Engine
    number: int
    seed: int
    hang_ups: bool
    sessions: bool
    adapters: int
    all: list[Client] = field(default_factory=list)
    living: list[Client] = field(default_factory=list)
    quiet: int = 0
    """Steps in which nobody has gone."""

    def go_on(self) -> bool:
        """Whether there are clients, or more to come."""
        return len(self.all) < self.number or bool(self.living)

    def come(self) -> None:
        """As many come as there is room for."""
        while len(self.all) < self.number and len(self.living) < AT_ONCE:
            self.one()

    def one(self, name: str = "") -> None:
        """The next client comes, by a name of its own, one that was used before, or the one given."""
        number = len(self.all)
        dice = random.Random(f"{self.seed} {number}")
        length = dice.choice([7, 20, 70, 140, 250])
        family = prompt(f"family {dice.randrange(40)}", 256)
        whole = family[:length] if dice.random() < 0.5 else prompt(f"own {number}", length)
        patience = dice.randint(1, 8) if dice.random() < 0.2 else 0
        patience *= self.hang_ups
        again = dice.random() < 0.5
        before = self.all[number - REUSED] if number >= REUSED and dice.random() < 0.2 else None
        if not name and before is not None and before.end:
            name = before.name
        client = Client(number, name or f"request {number}", whole, dice.choice([1, 2, 5, 40]), patience, again)
        if self.sessions and dice.random() < 0.3:
            client.turns = [
                prompt(f"turn {turn} of {number}", dice.choice([3, 30])) for turn in range(dice.randint(1, 3))
            ]
            client.eager = dice.random() < 0.5
        if self.adapters:
            client.adapter = dice.randrange(2 * self.adapters + 1)
        self.all.append(client)
        self.living.append(client)
        self.engine.come(client)

    def hang_up(self) -> None:
        """Those whose patience ends leave; some of them try again by the same name."""
        for client in [client for client in self.living if client.patience]:
            client.patience -= 1
            if not client.patience:
                self.living.remove(client)
                self.engine.leave(client)
                if client.again and len(self.all) < self.number:
                    self.one(client.name)

    def look(self) -> None:
        """See who has ended."""
        stay = [client for client in self.living if not client.end or client.patience]
        self.quiet = 0 if len(stay) < len(self.living) else self.quiet + 1
        for client in self.living:
            if client.end:
                client.prompt = []  # a million of them would fill the memory
        self.living = stay

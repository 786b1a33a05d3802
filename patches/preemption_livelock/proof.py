"""Real schedulers of both kinds, whose requests together need every block of the pool: each must be answered."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import preemption_livelock as driver

MIXES = 3
STEPS = 600
"""More than twice what the longest of these worlds takes where it ends."""
SENTENCES = {
    "as reported": "four requests that grow fill the pool",
    "loads": "four requests that grow fill the pool, and each loads its first blocks",
    "shared prefix": "requests with the same first blocks fill the pool, and more of them come later",
    "clients leave": "clients hang up while a step of theirs is under way",
    "priorities": "four requests that grow fill the pool, and the last has the least priority",
    "the first has the least priority": "four requests that grow fill the pool, and the first has the least priority",
    **{f"mix {seed}": f"requests of many sizes fill the pool, draw {seed}" for seed in range(MIXES)},
}


def cases() -> dict[str, str | None]:
    """Each set of requests on each scheduler: whether all are answered, each on KV of its own."""
    return {
        f"{scheduler}: {SENTENCES[name]}": None if world["outcome"] == "finishes" else world["outcome"]
        for scheduler, worlds in driver.played(MIXES, STEPS).items()
        for name, world in worlds.items()
    }

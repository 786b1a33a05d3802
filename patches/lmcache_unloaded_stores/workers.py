"""What an engine's workers tell each other of a step's loads, through the store that torch.distributed began with.

Each worker loads its own part of the KV. What one of them did not load, all of its stage compute on, since each layer
adds up what the workers have; and so do later stages of a pipeline, but not earlier ones.

A word is a key in that store (a TCPStore in worker 0's process). No worker has to come to a call together with others:
who dies, raises or lacks the patch lets them wait for a second, and disturbs no group of theirs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

WAIT_SECONDS = 1.0
"""A word is given before the step computes and read when it has computed: who is later than that loads slowly."""

KEPT = 256
"""Words of so many steps are kept: more than a pipeline has under way."""

Step = tuple[str, int]
"""A step that loads: a name of the engine's scheduler, and a number."""


class Workers:
    """One worker's view. `rank` and `world`, the number of workers, are the engine's; `stages` are the pipeline's."""

    __slots__ = ("alone", "others", "rank", "waited")

    def __init__(self, rank: int, world: int, stages: int) -> None:
        stage = world // stages  # workers of a stage have ranks next to each other, the first stage's are the lowest
        self.alone = world == 1
        self.rank = rank
        self.others = [other for other in range((rank // stage + 1) * stage) if other != rank]
        self.waited = False

    def tell(self, step: Step, failed: set[int]) -> None:
        """Say which blocks this worker did not load in a step: none, as a rule."""
        if self.alone:
            return
        scheduler, number = step
        with lost_store():
            store = opened()
            store.set(word(step, self.rank), json.dumps(sorted(failed)))
            store.set(presence(scheduler, self.rank), "")
            store.delete_key(word((scheduler, number - KEPT), self.rank))

    def hear(self, step: Step) -> set[int] | None:
        """The blocks that the others did not load in it; None where one of them has not reported within the time.

        One that has never reported, as where it lacks the patch, is waited for once.
        """
        if not self.others:
            return set()
        with lost_store():
            store = opened()
            if self.waited and not store.check([presence(step[0], other) for other in self.others]):
                return None
            self.waited = True
            words = [word(step, other) for other in self.others]
            store.wait(words, timedelta(seconds=WAIT_SECONDS))
            return {block for one in words for block in json.loads(store.get(one))}
        return None


def opened() -> Any:
    """The store of the process group that spans all workers."""
    import torch

    return torch.distributed.distributed_c10d._get_default_store()


@contextlib.contextmanager
def lost_store() -> Iterator[None]:
    """No process group is a ValueError, a wait that ended or a store that went a RuntimeError (DistStoreError)."""
    with contextlib.suppress(RuntimeError, ValueError):
        yield


def word(step: Step, rank: int) -> str:
    scheduler, number = step
    return f"vllm-livepatch/{scheduler}/{number}/{rank}"


def presence(scheduler: str, rank: int) -> str:
    return f"vllm-livepatch/{scheduler}/{rank}"

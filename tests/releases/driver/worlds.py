# mypy: disable-error-code="import-not-found"
"""What the worlds of several drivers have in common: how steps and requests go, and what is wrong with them in the end."""

from __future__ import annotations

from collections import deque
from typing import Any

import real_scheduler as real
from result import Expecting

RIGHT, WRONG = 7, 99
"""The token that a model samples of right KV, and of any other."""

Work = tuple[str, tuple[list[int], ...], int, int, bool]
"""Of a request in a step: its blocks by group, its first token and the one behind its last, whether one is sampled."""


class Stepping(Expecting):
    """A scheduler, and its steps that are not answered.

    As the engine core does: with asynchronous scheduling, one more step is scheduled than was answered.
    """

    def __init__(self, scheduler: Any) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.all_blocks = real.free_blocks(scheduler)
        self.ahead = int(isinstance(scheduler, real.SCHEDULERS["AsyncScheduler"]))
        self.unanswered: deque[Any] = deque()

    def step(self) -> Any:
        """Schedule a step, and answer the oldest one that is due."""
        raise NotImplementedError

    def steps(self, count: int) -> None:
        """Run steps that nothing else is told of."""
        for _ in range(count):
            self.step()

    def expect_ends(self, steps: int, more: int) -> None:
        """Expect all requests to end in so many steps, and to be freed in `more`.

        Blocks freed while a step was in flight come back when it, and the one behind it, were answered.
        """
        for _ in range(steps):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        self.expect(not self.scheduler.has_unfinished_requests(), "requests never end")
        self.steps(more)
        self.expect(not self.scheduler.requests, "requests never freed")

    def expect_full_pool(self) -> None:
        """Expect all blocks in the pool."""
        full = real.free_blocks(self.scheduler) == self.all_blocks and not real.held_blocks(self.scheduler)
        self.expect(full, "pool not full")


class Serving(Stepping):
    """One with clients, whose tokens say whether each was sampled on the request's own KV."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self.clients: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.prompts: dict[str, list[int]] = {}

    def come(self, name: str, request: Any) -> None:
        """A client comes, with a request that may have the prompt of another."""
        request.request_id = name
        self.clients[name] = []
        self.prompts[name] = list(request.prompt_token_ids)
        self.scheduler.add_request(request)

    def content(self, name: str, place: int) -> tuple[int, ...]:
        """What the slot of a token holds: the KV of a token is told by all tokens up to it."""
        prompt = self.prompts[name]
        return tuple((prompt + [RIGHT] * place)[: place + 1])

    def work_of(self, scheduled: Any) -> list[Work]:
        """What is to be computed in a step."""
        starts = real.computed_before(scheduled)
        work = []
        for name, number in scheduled.num_scheduled_tokens.items():
            tables = tuple(list(table) for table in self.scheduler.kv_cache_manager.get_block_ids(name))
            end = starts[name] + number
            work.append((name, tables, starts[name], end, end >= self.scheduler.requests[name].num_tokens))
        return work

    def deliver(self, scheduled: Any, output: Any) -> None:
        """Answer a step, and give the clients what comes of it."""
        for answered in self.scheduler.update_from_output(scheduled, output).values():
            for one in answered.outputs:
                self.clients[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.ends[one.request_id] = str(one.finish_reason).rpartition(".")[2].lower()

    def forget(self) -> None:
        """Let the prefix cache lose all, as when others needed the blocks."""
        self.scheduler.kv_cache_manager.evict_blocks(set(range(1, real.NUM_BLOCKS)))

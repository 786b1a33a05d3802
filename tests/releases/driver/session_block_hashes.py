# mypy: disable-error-code="import-not-found"
"""Give a release's schedulers streaming sessions, and then a request with a session's tokens; print what it finds cached.

The schedulers and the prefix cache are the release's own. The model is stood in for: it writes each token's KV, which all
tokens up to it tell, into the block that the scheduler has given for it.
"""

from __future__ import annotations

from result import begin_driver, leave, print_result

begin_driver()

from typing import Any

import real_scheduler as real
import vllm
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

BLOCK = real.BLOCK_SIZE
SAMPLED = 7
"""The token that the model answers with, always."""
PROMPT = [11 + number for number in range(BLOCK + 4)]
INPUT = [100 + number for number in range(3 * BLOCK)]
CASES = {"a round ends with a block": 2 * BLOCK - len(PROMPT), "a round ends amid a block": BLOCK // 2}
"""How many tokens a session's first round answers with."""
RESUMED, SAME = BLOCK, 4 * BLOCK
"""Tokens that come from the prefix cache where a request has the first input and all of its answer, of which the session
dropped the last token; and where it has the session's own."""


def request(name: str, tokens: list[int], answer: int, **more: Any) -> Any:
    return Request(
        request_id=name,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=answer, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        **real.end_token_named_per_request(),
        **more,
    )


class World:
    """A scheduler, and a memory whose blocks have contents."""

    def __init__(self, mode: str, model_config: Any) -> None:
        self.scheduler = real.make_scheduler(mode, model_config, None)
        self.ahead = int(mode == "AsyncScheduler")
        self.device: dict[tuple[int, int], tuple[int, ...]] = {}
        self.found: dict[str, tuple[int, int]] = {}
        self.waiting: list[Any] = []

    def add(self, *requests: Any) -> None:
        for one in requests:
            self.scheduler.add_request(one)

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        starts = real.computed_before(scheduled)
        for name, number in scheduled.num_scheduled_tokens.items():
            one = self.scheduler.requests[name]
            (table,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            ids = [*one.all_token_ids, *[SAMPLED] * number]  # of a step that is not answered yet, too
            start = starts[name]
            if name not in self.found:  # its first step: what it has, it has from the prefix cache
                wrong = sum(
                    self.device[table[place // BLOCK], place % BLOCK] != tuple(ids[: place + 1])
                    for place in range(start)
                )
                self.found[name] = start, wrong
            for place in range(start, start + number):
                self.device[table[place // BLOCK], place % BLOCK] = tuple(ids[: place + 1])
        self.waiting.append(scheduled)
        if len(self.waiting) > self.ahead:
            self.answer()

    def answer(self) -> None:
        scheduled = self.waiting.pop(0)
        output = real.run_model(scheduled)
        for index, name in enumerate(output.req_ids):
            one = self.scheduler.requests.get(name)
            unfinished = one is not None and one.num_computed_tokens < one.num_prompt_tokens
            output.sampled_token_ids[index] = [] if unfinished else [SAMPLED]
        self.scheduler.update_from_output(scheduled, output)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


def case(mode: str, model_config: Any, answer: int) -> dict[str, tuple[int, int]]:
    """What two requests find: one that has the session's first input and all of its answer, one that has its tokens."""
    world = World(mode, model_config)
    first = request("session", PROMPT, answer, resumable=True)
    world.add(first)
    world.steps(answer + 4)
    world.add(request("session", INPUT, 2, resumable=True))
    world.steps(8)
    told = [*PROMPT, *[SAMPLED] * (answer - 1), *INPUT]
    assert list(first.prompt_token_ids) == told, "the session has other tokens"
    world.add(request("resumed", [*PROMPT, *[SAMPLED] * answer, 1, 2, 3], 1))
    world.steps(4)
    world.add(request("same", [*told, 1, 2, 3], 1))
    world.steps(4)
    return {"resumed": world.found["resumed"], "same": world.found["same"]}


def played() -> dict[str, dict[str, dict[str, tuple[int, int]]]]:
    """By scheduler and case: how many tokens came from the prefix cache, and how many of them are others' KV."""

    def each(mode: str, model_config: Any) -> dict[str, Any]:
        return {name: case(mode, model_config, answer) for name, answer in CASES.items()}

    return dict(real.with_each_scheduler(each))


def main() -> None:
    print_result({"found": played()}, vllm)
    leave()


if __name__ == "__main__":
    main()

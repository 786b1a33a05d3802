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
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
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
IMAGE = 5
"""Each token of each image."""
FIRST, SECOND = {"a": (BLOCK + 1, 3)}, {"b": (2, 8), "c": (12, 6)}
"""The images of two inputs: where each begins, and its tokens."""


class Imaged(Request):  # type: ignore[misc]
    """Its images need no encoder: none is here."""

    has_encoder_inputs = property(lambda self: False, lambda self, value: None)


def with_images(tokens: list[int], images: dict[str, tuple[int, int]]) -> list[int]:
    found = list(tokens)
    for place, length in images.values():
        found[place : place + length] = [IMAGE] * length
    return found


def request(
    name: str, tokens: list[int], answer: int, images: dict[str, tuple[int, int]] | None = None, **more: Any
) -> Any:
    features = [
        MultiModalFeatureSpec(
            data=None, modality="image", identifier=image, mm_position=PlaceholderRange(offset=place, length=length)
        )
        for image, (place, length) in (images or {}).items()
    ]
    return Imaged(
        mm_features=features,
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
            ids: list[Any] = [*one.all_token_ids, *[SAMPLED] * number]  # of a step that is not answered yet, too
            for image in one.mm_features:
                place = image.mm_position
                ids[place.offset : place.offset + place.length] = [image.identifier] * place.length
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


def imaged(mode: str, model_config: Any, answer: int) -> dict[str, tuple[int, int]]:
    """What is found by requests with the tokens of a session: with its images, and with another in the place of one."""
    world = World(mode, model_config)
    prompt, more = with_images(PROMPT, FIRST), with_images(INPUT, SECOND)
    world.add(request("session", prompt, answer, FIRST, resumable=True))
    world.steps(answer + 4)
    world.add(request("session", more, 2, SECOND, resumable=True))
    world.steps(8)
    told = [*prompt, *[SAMPLED] * (answer - 1)]
    images = {**FIRST, **{image: (place + len(told), length) for image, (place, length) in SECOND.items()}}
    for name, other in (("same", ""), ("not a", "a"), ("not b", "b")):
        changed = {f"not {image}" if image == other else image: where for image, where in images.items()}
        world.add(request(name, [*told, *more, 1, 2, 3], 1, changed))
        world.steps(4)
    return {name: world.found[name] for name in ("same", "not a", "not b")}


def before(answer: int) -> dict[str, int]:
    """What each finds of `imaged` where all is right: the blocks before the first image that it has not."""
    place = len(PROMPT) + answer - 1 + SECOND["b"][0]
    return {"same": SAME, "not a": FIRST["a"][0] // BLOCK * BLOCK, "not b": place // BLOCK * BLOCK}


def played() -> dict[str, dict[str, dict[str, tuple[int, int]]]]:
    """By scheduler and case: how many tokens came from the prefix cache, and how many of them are others' KV."""

    def each(mode: str, model_config: Any) -> dict[str, Any]:
        with_text = {name: case(mode, model_config, answer) for name, answer in CASES.items()}
        return {
            **with_text,
            **{f"{name}, with images": imaged(mode, model_config, answer) for name, answer in CASES.items()},
        }

    return dict(real.with_each_scheduler(each))


def main() -> None:
    print_result({"found": played()}, vllm)
    leave()


if __name__ == "__main__":
    main()

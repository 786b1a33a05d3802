"""Drive one release's OffloadingConnector where blocks are given anew, and requests end early; print what it came to as JSON.

What is the release's own and what is stood in for: see `offloading_failures`. In the cases of BESIDE a MultiConnector of
the release's has the OffloadingConnector and `pulling_double` as children.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import time

from result import begin_driver, print_result, raised

STARTED = time.perf_counter()
begin_driver()

import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import offloading_backend as backend
import offloading_failures as failures
import real_scheduler as real
import vllm

ANSWER = failures.ANSWER
BLOCK = failures.BLOCK
PROMPT = failures.PROMPT
LONG = real.MAX_MODEL_LEN - ANSWER
MULTI = ("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector", "MultiConnector")
PULLING = {"kv_connector": "PullingDouble", "kv_connector_module_path": "pulling_double", "kv_role": "kv_both"}
backend.BLOCKS = 400  # nothing is evicted
WINDOW = 4 * BLOCK
"""A sliding window, in tokens."""


class World(failures.World):
    """A World with a scheduler's options, sliding windows, and perhaps a connector that pulls beside."""

    def __init__(
        self,
        mode: str,
        model_config: Any,
        *,
        beside: bool = False,
        windows: tuple[int, ...] = (),
        budget: int = real.MAX_MODEL_LEN,
        workers: int = 1,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.beside = beside
        self.extra = extra or {}
        self.windows = (None, *windows)
        self.budget = budget
        super().__init__(mode, model_config, "recompute", workers)
        for worker, mover in zip(self.workers, self.movers, strict=True):
            for other in self.parts(worker)[1:]:
                other.device = mover.device

    def make_scheduler(self, mode: str, model_config: Any, extra: dict[str, Any]) -> Any:
        connector, extra = failures.CONNECTOR, extra | self.extra
        if self.beside:
            offloading = {"kv_connector": connector[1], "kv_role": "kv_both", "kv_connector_extra_config": extra}
            connector, extra = MULTI, {"connectors": [offloading, PULLING]}
        options = {"max_num_batched_tokens": self.budget}
        return real.make_scheduler(
            mode, model_config, connector, windows=self.windows[1:], options=options, extra=extra
        )

    def parts(self, whole: Any) -> list[Any]:
        if not self.beside:
            return [whole]
        return list(whole.metadata if hasattr(whole, "metadata") else whole._connectors)

    def compute(self, mover: backend.Mover, name: str, table: list[int], start: int, end: int) -> bool:
        """Of a group with a sliding window, older blocks are gone from the table."""
        gone = next((number for number, block in enumerate(table) if block), 0) * BLOCK
        kept = range(gone, start)
        blocks = table[gone // BLOCK : (start + BLOCK - 1) // BLOCK]
        held = [slot for block in blocks for slot in mover.device.get(block, ())[:BLOCK]]
        right = held[: len(kept)] == [self.content(name, place) for place in kept]
        for place in range(start, end):
            block = table[place // BLOCK]
            if block:
                slots = mover.device.get(block, ())[: place % BLOCK]
                mover.device[block] = (*slots, self.content(name, place) if right else backend.LOST)
        return right

    def pull(self, name: str, prompt: int, tokens: int) -> None:
        """A client comes whose prompt prefill holds."""
        request = real.make_request(name, tokens=ANSWER, prompt=prompt)
        request.kv_transfer_params = {"pulled": tokens}
        self.answers[name] = ANSWER
        self.come(name, request)

    def resumed(self, name: str, like: str, prompt: int, more: int) -> None:
        """A client comes again: its prompt is another's, with that one's answer, and more."""
        told = like.encode().ljust(prompt, b".") + bytes([failures.RIGHT - 1]) * ANSWER
        self.add(name, like=told.decode(), prompt=len(told) + more)


def slow_store(world: World) -> None:
    """A request is computed, its stores begin and do not end, and it ends: its blocks are in the pool again."""
    world.steps(6)  # the witness' own stores are over
    for mover in world.movers:
        mover.patience = 500
    world.add("first", answer=1)
    world.steps(4)
    world.expect(world.ends.get("first") == "length", "first never ends")
    world.expect(any(mover.under_way for mover in world.movers), "no store is under way")


def hit(world: World, name: str = "second", **how: Any) -> None:
    """The stores end, the prefix cache loses all, and whoever has the same prompt loads it."""
    for mover in world.movers:
        mover.patience = 1
    world.steps(16)
    world.forget()
    world.add(name, **({"like": "first"} | how))
    world.steps(16)
    world.expect(name in world.loads, f"{name} loads nothing")


def pulled(world: World) -> None:
    """Others load into the blocks whose store is under way."""
    slow_store(world)
    for number in range(4):
        world.pull(f"puller{number}", LONG, LONG - 5)
        world.steps(4)
    hit(world)
    world.finish()


def computed(world: World) -> None:
    """Others compute into the blocks whose store is under way."""
    slow_store(world)
    for number in range(4):
        world.add(f"filler{number}", prompt=LONG)
        world.steps(4)
    hit(world)
    world.finish()


def queued(world: World) -> None:
    """The client of a request that waits for blocks hangs up."""
    for number in range(4):
        world.add(f"filler{number}", prompt=LONG)
    world.steps(2)
    world.add("gone", prompt=LONG)
    world.step()
    real.abort(world.scheduler, "gone")
    world.steps(40)
    world.finish()


def hung_up(world: World, prompt: int) -> None:
    """The client hangs up amid its prompt, whose last block that was begun is not full. Another has the same prompt."""
    world.steps(2)
    world.add("gone", prompt=prompt)
    world.step()
    real.abort(world.scheduler, "gone")
    hit(world, "third", like="gone", prompt=prompt + 2 * BLOCK)
    world.finish()


def hung_up_while_pulled(world: World) -> None:
    """The client hangs up while another connector loads its prompt."""
    world.steps(2)
    world.pull("gone", PROMPT, PROMPT - 5)
    world.step()
    real.abort(world.scheduler, "gone")
    world.steps(8)
    world.add("third", like="gone")
    world.steps(16)
    world.finish()


def last_token(world: World) -> None:
    """A request's last token, which nobody computes, is the last of a block. The client goes on from there."""
    prompt = 5 * BLOCK - ANSWER
    world.steps(6)
    world.add("first", prompt=prompt)
    world.steps(14)
    world.forget()
    world.resumed("second", "first", prompt, 9)
    world.steps(16)
    world.expect("second" in world.loads, "second loads nothing")
    world.finish()


def reset(world: World) -> None:
    """The prefix cache is reset while requests run whose prompts are stored: they begin anew, and load them."""
    world.steps(6)
    world.add("first", answer=30)
    world.steps(8)
    while world.unanswered:  # the engine is paused first
        world.answer(*world.unanswered.popleft())
    world.scheduler.reset_prefix_cache(reset_running_requests=True)
    world.steps(20)
    world.expect("first" in world.loads, "first loads nothing")
    world.finish()


def reset_while_stored(world: World) -> None:
    """The prefix cache is reset while a request runs whose store is under way. Others get its blocks."""
    world.steps(6)
    for mover in world.movers:
        mover.patience = 500
    world.add("first", answer=30)
    world.steps(4)
    while world.unanswered:
        world.answer(*world.unanswered.popleft())
    world.expect(any(mover.under_way for mover in world.movers), "no store is under way")
    world.scheduler.reset_prefix_cache(reset_running_requests=True)
    for number in range(4):
        world.add(f"filler{number}", prompt=LONG)
        world.steps(4)
    for mover in world.movers:
        mover.patience = 1
    world.steps(30)
    world.forget()
    world.add("second", like="first")
    world.steps(16)
    world.expect("second" in world.loads, "second loads nothing")
    world.finish()


ANSWERS = {"extra": {"offload_prompt_only": False}}
"""What requests answer is stored too."""
HYBRID = {"windows": (WINDOW,)}
CASES: dict[str, tuple[dict[str, Any], Callable[[World], None]]] = {
    "computed": ({}, computed),
    "pulled": ({"beside": True}, pulled),
    "pulled_workers": ({"beside": True, "workers": 2}, pulled),
    "pulled_hybrid": ({"beside": True, **HYBRID}, pulled),
    "queued": ({}, queued),
    "queued_hybrid": (HYBRID, queued),
    "hung_up": ({"budget": 40}, lambda world: hung_up(world, 50)),
    "hung_up_longer": ({"budget": 40}, lambda world: hung_up(world, 90)),
    "hung_up_hybrid": ({"budget": 40, **HYBRID}, lambda world: hung_up(world, 50)),
    "hung_up_while_pulled": ({"beside": True}, hung_up_while_pulled),
    "last_token": (ANSWERS, last_token),
    "reset": ({}, reset),
    "reset_while_stored": ({}, reset_while_stored),
    "reset_while_stored_beside": ({"beside": True}, reset_while_stored),
}


def outcome(mode: str, model_config: Any, case: str) -> str:
    """Run one case; what it came to."""
    how, play = CASES[case]
    try:
        world = World(mode, model_config, **how)
        play(world)
    except Exception as error:
        traceback.print_exc()
        return raised(error)
    return ", ".join(world.wrong) or "right"


def found(wanted: Iterable[str]) -> dict[str, Any]:
    """What these cases came to with both schedulers."""
    return real.with_each_scheduler(lambda mode, config: {case: outcome(mode, config, case) for case in wanted})


def main() -> None:
    """Run the cases that are asked for, or all, and print what they came to."""
    played = found(sys.argv[1:] or list(CASES))
    print_result({"seconds": time.perf_counter() - STARTED, **played}, vllm)


if __name__ == "__main__":
    main()

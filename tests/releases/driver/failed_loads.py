"""Drive one release's schedulers through loads that fail; print what each client got as one JSON object.

Run by a fresh interpreter with the release's sources, and the bundle or not, on PYTHONPATH. Every slot has contents: the
model reads what a request attends to, and samples WRONG where that is not the request's own KV, fully computed on its
own. What to expect of which release is none of this script's business.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import time

from result import begin_driver, print_result, raised

STARTED = time.perf_counter()
begin_driver()

import gc
import json
from collections.abc import Callable
from typing import Any

import command_line
import real_scheduler as real
import vllm
from worlds import RIGHT, WRONG, Serving, Work

gc.enable()

COMMAND_LINES = {"asked to fail": "fail", "asked for nothing": ""}
"""What an operator's command line has of a policy."""
ANSWER = 6
LONGER = real.PROMPT_TOKENS + real.BLOCK_SIZE
"""Tokens of a prompt that takes from the prefix cache also what others computed behind a load."""
LARGE = 12 * real.BLOCK_SIZE
"""Tokens of a prompt that fits once into a small pool."""
WINDOW = 2 * real.BLOCK_SIZE
LOST = object()
"""What is in a slot that was not loaded, or that was computed on such a one."""


def by_command_line(policy: str) -> Any:
    """The configuration that `vllm serve --kv-transfer-config` comes to, with a policy, or without one ("")."""
    given = {"kv_connector": "ConnectorLosses", "kv_role": "kv_both"}
    return command_line.transfer_config(json.dumps({**given, **({"kv_load_failure_policy": policy} if policy else {})}))


class World(Serving):
    """A scheduler, its clients, the slots, and what was loaded, read and delivered."""

    def __init__(self, mode: str, model_config: Any, policy: str, hybrid: bool = False, idle: bool = False) -> None:
        self.windows = [0, WINDOW] if hybrid else [0]  # tokens that a group attends to, 0 for all
        connector = ("connector_losses", "ConnectorLosses")
        super().__init__(real.make_scheduler(mode, model_config, connector, windows=[w for w in self.windows if w]))
        if policy in COMMAND_LINES:
            config = self.scheduler.vllm_config.kv_transfer_config = by_command_line(COMMAND_LINES[policy])
            policy = config.kv_load_failure_policy
        # As `__init__` does it, of kv_load_failure_policy.
        self.scheduler.recompute_kv_load_failures = policy == "recompute"
        self.slots: dict[tuple[int, int], Any] = {}
        self.fails: dict[str, list[tuple[int, int]]] = {}  # of a request: (group, block of the table) not loaded
        self.arriving: list[tuple[str, set[int]]] = []
        self.reports = 0  # how many reports of failed blocks there were
        self.idle = idle
        if not idle:
            self.add("witness", answer=20)
            self.steps(2)

    def add(
        self, name: str, load: str = "", fails: tuple[tuple[int, int], ...] = (), like: str = "", **more: Any
    ) -> None:
        """A client comes; its prompt is its own, or begins with that of the request `like`."""
        prompt = more.get("prompt", real.PROMPT_TOKENS)
        request = real.make_request(like or name, load=load, tokens=more.get("answer", ANSWER), prompt=prompt)
        self.fails[name] = list(fails)
        self.come(name, request)

    def step(self, between: Callable[[], None] = lambda: None) -> None:
        """Schedule a step, run the oldest that is not answered, and answer it."""
        scheduled = self.scheduler.schedule()
        work = self.work_of(scheduled)
        for name, _, _, end, _ in work:
            longest = len(self.prompts[name]) + self.scheduler.requests[name].max_tokens
            self.expect(end < longest, f"{name} runs past its end")
        self.unanswered.append((scheduled, work, real.run_model(scheduled)))
        between()
        if len(self.unanswered) > self.ahead:
            scheduled, work, output = self.unanswered.popleft()
            output.kv_connector_output = self.run(scheduled, work, output)
            self.deliver(scheduled, output)

    def run(self, scheduled: Any, work: list[Work], output: Any) -> Any:
        """The worker: loads, the model, and the report of what has ended or failed."""
        transfers = real.transfers([name for name, _ in self.arriving], ())
        failed = set().union(*(blocks for _, blocks in self.arriving))
        self.arriving = []
        for name, tables, first, number, later in scheduled.kv_connector_metadata.loads:
            missed = self.load(name, tables, first, number)
            if later:
                self.arriving.append((name, missed))  # and reported with the next step
            else:
                failed |= missed
        for index, (name, tables, start, end, samples) in enumerate(work):
            right = all(self.holds(name, tables[group], group, start) for group in range(len(tables)))
            for table in tables:
                for place in range(start, end):
                    block = table[place // real.BLOCK_SIZE]
                    self.slots[block, place % real.BLOCK_SIZE] = self.content(name, place) if right else LOST
            output.sampled_token_ids[index] = [RIGHT if right else WRONG] if samples else []
        if failed:
            transfers.invalid_block_ids = failed
            self.reports += 1
        return transfers

    def load(self, name: str, tables: tuple[list[int], ...], first: int, number: int) -> set[int]:
        """Fill the slots of a load, but for those that fail; the blocks of these."""
        missed = set()
        for group, table in enumerate(tables):
            for place in range(first, first + number):
                index = place // real.BLOCK_SIZE
                block = table[index]
                if not block:
                    continue  # before a sliding window
                lost = (group, index) in self.fails[name]
                self.slots[block, place % real.BLOCK_SIZE] = LOST if lost else self.content(name, place)
                missed |= {block} if lost else set()
        return missed

    def holds(self, name: str, table: list[int], group: int, start: int) -> bool:
        """Whether all that a token at `start` attends to in a group is the request's own."""
        window = self.windows[group]
        first = max(0, start - window + 1) if window else 0
        for place in range(first, start):
            block = table[place // real.BLOCK_SIZE]
            if self.slots.get((block, place % real.BLOCK_SIZE)) != self.content(name, place):
                return False
        return True

    def finish(self) -> None:
        """Let all requests end, then look at what clients got, and for whatever is left behind."""
        self.expect_ends(80, 3)
        self.expect_full_pool()
        self.expect(self.reports > 0, "no load failed")
        self.expect(self.idle or self.clients["witness"] == [RIGHT] * 20, "others disturbed")
        for name, tokens in self.clients.items():
            self.expect(WRONG not in tokens, f"{name} got a token sampled on lost KV")
            if self.ends.get(name) == "error":
                self.expect(not tokens, f"{name} got tokens and an error")
            elif name != "gone":
                self.expect(len(tokens) == (20 if name == "witness" else ANSWER), f"{name} got another answer")


def sharing(world: World, load: str, fails: tuple[tuple[int, int], ...]) -> None:
    """Others come with the prompt of the one whose load fails: a step later; and with a longer one, when all is over."""
    world.add("lost", load=load, fails=fails)
    world.step()
    world.add("next", like="lost")
    world.steps(12)
    world.add("after", like="lost", prompt=LONGER)
    world.finish()


def aborted(world: World) -> None:
    """The client hangs up before the failure is known; somebody else has the same prompt."""
    world.add("gone", load="now", fails=((0, 1),))
    world.step(between=lambda: real.abort(world.scheduler, "gone"))
    world.steps(2)
    for name in ("after", "again"):  # the second finds what the first has computed, or what was left behind
        world.add(name, like="gone", prompt=LONGER)
        world.steps(12)
    world.finish()


def preempt_all(world: World) -> None:
    """As `reset_prefix_cache` does for new weights."""
    try:
        world.scheduler.reset_prefix_cache(reset_running_requests=True)
    except RuntimeError as error:  # with steps under way, some releases refuse when all are preempted already
        world.expect("Failed to reset" in str(error), "another error than the release's own")


def reset(world: World) -> None:
    """All requests are preempted before the failure is known."""
    world.add("lost", load="now", fails=((0, 1),))
    world.step()
    world.step(between=lambda: preempt_all(world))
    world.add("after", like="lost")
    world.finish()


def resumed(world: World) -> None:
    """A request whose first load went well is preempted; what it loads when it is let in again fails, unknown to it yet
    when it is preempted once more. Somebody else has the same prompt."""
    world.add("lost", load="now")
    world.steps(2)
    world.fails["lost"] = [(0, 1)]
    world.step(between=lambda: preempt_all(world))
    again: list[int] = []

    def preempt_who_loads() -> None:
        scheduled = world.unanswered[-1][0]
        if not again and any(load[0] == "lost" for load in scheduled.kv_connector_metadata.loads):
            again.append(scheduled.num_scheduled_tokens["lost"])
            preempt_all(world)

    for _ in range(8):
        world.step(between=preempt_who_loads)
    world.expect(bool(again), "it did not load again")
    for name in ("after", "later"):
        world.add(name, like="lost", prompt=LONGER)
        world.steps(12)
    world.finish()


def alone(world: World, load: str, fails: tuple[tuple[int, int], ...]) -> None:
    """Nobody else has that prompt."""
    world.add("lost", load=load, fails=fails)
    world.finish()


def small_pool(world: World) -> None:
    """The pool has room for one prompt. The load fails while another request runs, which leaves no room for the one that
    lost it; before that one runs, an older request's lookup is answered, which is to load as much."""
    pool = world.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - LARGE // real.BLOCK_SIZE - 1)
    world.add("oldest", load="asked", prompt=LARGE)
    world.step()
    world.add("lost", load="later", fails=((0, 0), (0, 1)), prompt=LARGE)
    world.step()
    world.add("other")
    world.steps(3)
    world.fails["lost"] = []  # where it is loaded again, all of it arrives
    world.expect_ends(80, 3)
    pool.free_blocks(taken)
    world.finish()


CASES: dict[str, tuple[str, bool, Callable[[World], None]]] = {
    # policy, several KV cache groups, what happens
    "now": ("recompute", False, lambda world: alone(world, "now", ((0, 1),))),
    "now_first": ("recompute", False, lambda world: alone(world, "now", ((0, 0), (0, 1)))),
    "now_shared": ("recompute", False, lambda world: sharing(world, "now", ((0, 1),))),
    "now_aborted": ("recompute", False, aborted),
    "now_reset": ("recompute", False, reset),
    "now_resumed": ("recompute", False, resumed),
    "now_fail": ("fail", False, lambda world: sharing(world, "now", ((0, 1),))),
    "asked_fail": ("asked to fail", False, lambda world: alone(world, "now", ((0, 1),))),
    "asked_nothing": ("asked for nothing", False, lambda world: alone(world, "now", ((0, 1),))),
    "later": ("recompute", False, lambda world: sharing(world, "later", ((0, 1),))),
    "later_first": ("recompute", False, lambda world: alone(world, "later", ((0, 0),))),
    "later_fail": ("fail", False, lambda world: alone(world, "later", ((0, 1),))),
    "later_small_pool_idle": ("recompute", False, small_pool),
    "later_idle": ("fail", False, lambda world: alone(world, "later", ((0, 1),))),
    "groups_now": ("recompute", True, lambda world: sharing(world, "now", ((0, 1),))),
    "groups_now_window": ("recompute", True, lambda world: sharing(world, "now", ((1, 1),))),
    "groups_now_passed": ("recompute", True, lambda world: sharing(world, "now", ((1, 0),))),
    "groups_now_fail": ("fail", True, lambda world: alone(world, "now", ((1, 1),))),
    "groups_later": ("recompute", True, lambda world: sharing(world, "later", ((0, 1),))),
    "groups_later_window": ("recompute", True, lambda world: sharing(world, "later", ((1, 1),))),
    "groups_later_fail": ("fail", True, lambda world: alone(world, "later", ((0, 1),))),
}


def outcome(mode: str, model_config: Any, case: str) -> dict[str, Any]:
    """Run one case; what it came to, and how its requests ended."""
    policy, hybrid, play = CASES[case]
    try:
        world = World(mode, model_config, policy, hybrid, idle=case.endswith("idle"))
        play(world)
    except Exception as error:
        return {"outcome": raised(error), "ends": {}}
    ends = {name: end for name, end in sorted(world.ends.items()) if end == "error"}
    return {"outcome": ", ".join(world.wrong) or "right", "ends": ends}


def found() -> dict[str, Any]:
    """What every case came to with both schedulers."""
    return real.with_each_scheduler(lambda mode, config: {case: outcome(mode, config, case) for case in CASES})


def main() -> None:
    """Run every case, and print what they came to."""
    played = found()
    seconds = time.perf_counter() - STARTED
    print_result({"seconds": seconds, **played}, vllm)


if __name__ == "__main__":
    main()

"""Who is left alone, and what wakes a wait. What needs an engine's own loop is in tests/releases.

The classes here stand in for the release's: an engine core that holds a finished request's blocks, and a worker's queue.
"""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_livepatch.patches.idle_stepping import wrappers as patch
from vllm_livepatch.sitecustomize import guard, settings
from vllm_livepatch.sitecustomize.context import PatchContext
from vllm_livepatch.tools.bundles import catalogue

NAME = "idle-stepping"
HOUR = 3600.0


class Queue(queue.Queue):  # type: ignore[type-arg]
    """Notes for how long was waited for a message; no time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []
        self.not_empty.wait_for = self.wait_for  # type: ignore[assignment, method-assign]

    def wait_for(self, arrived: Any, timeout: float) -> None:
        self.waits.append(timeout)


class EngineCoreProc:
    """It holds one request's blocks, and has nothing else to do."""

    def __init__(self, under_way: int = 0) -> None:
        self.scheduler = SimpleNamespace(
            has_unfinished_requests=lambda: False,
            has_finished_requests=lambda: True,
            finished_req_ids=set(),
            connector=SimpleNamespace(has_pending_push_work=lambda: False),
            ec_connector=None,
        )
        self.input_queue: Any = Queue()
        self.batch_queue: Any = [step() for _ in range(under_way)] or None
        self.process_input_queue_block = True
        self._idle_state_callbacks: list[Any] = []
        self.taken: list[Any] = []

    def run_busy_loop(self) -> None: ...

    def is_running(self) -> bool:
        return True

    def _process_input_queue(self) -> None:
        while self.input_queue.queue:
            self.taken.append(self.input_queue.get())


class WithItsOwnLoop(EngineCoreProc):
    def run_busy_loop(self) -> None: ...


def step(tokens: int = 0) -> tuple[Any, Any]:
    return object(), SimpleNamespace(total_num_scheduled_tokens=tokens)


def say(value: bool) -> Any:
    return lambda: value


@pytest.fixture
def context() -> PatchContext:
    return PatchContext(NAME, {"WAIT_SECONDS": 0.05}, {}, lambda: None)


@pytest.fixture(autouse=True)
def patched(context: PatchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for the engine core is wrapped as in a process, and passes for the release's."""
    target = f"{patch.CORE}:EngineCoreProc._process_input_queue"
    original = vars(EngineCoreProc)["_process_input_queue"]
    wrapped = guard.in_place_of(original, patch.wrappers(context)[target], context, target)
    monkeypatch.setattr(EngineCoreProc, "_process_input_queue", wrapped)
    monkeypatch.setattr(EngineCoreProc, "__module__", patch.CORE)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(patch, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def test_waits_grow_with_the_time_of_holding(clock: SimpleNamespace, context: PatchContext) -> None:
    engine = EngineCoreProc()
    for seconds in (0.0, 0.008, 0.16, 0.4, HOUR):
        clock.seconds = 1000 + seconds
        engine._process_input_queue()
    assert engine.input_queue.waits == pytest.approx([0.001, 0.02, 0.05, 0.05])
    assert context.counters == {"slowed": 1}


def test_results_to_come_share_a_wait(clock: SimpleNamespace) -> None:
    engine = EngineCoreProc(under_way=1)
    engine._process_input_queue()
    clock.seconds += HOUR
    engine._process_input_queue()
    assert engine.input_queue.waits == [0.025]


LEFT_ALONE = {
    "a request runs or waits": lambda engine: setattr(engine.scheduler, "has_unfinished_requests", say(True)),
    "workers are to be told of an end": lambda engine: engine.scheduler.finished_req_ids.add("r"),
    "nothing is held": lambda engine: setattr(engine.scheduler, "has_finished_requests", say(False)),
    "KV is pushed": lambda engine: setattr(engine.scheduler.connector, "has_pending_push_work", say(True)),
    "an encoder's cache is pushed": lambda engine: setattr(
        engine.scheduler, "ec_connector", SimpleNamespace(has_pending_push_work=say(True))
    ),
    "it is to end": lambda engine: setattr(engine, "is_running", say(False)),
    "somebody waits for it to be idle": lambda engine: engine._idle_state_callbacks.append(print),
    "it is scaled": lambda engine: setattr(engine, "process_input_queue_block", False),
    "a step with tokens is under way": lambda engine: setattr(engine, "batch_queue", [step(), step(3)]),
}


@pytest.mark.parametrize("happens", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_more_than_holds(happens: Any, clock: SimpleNamespace, context: PatchContext) -> None:
    """No wait; and when nothing but holds remain again, waits begin short again."""
    usual = EngineCoreProc()
    engine = EngineCoreProc()
    engine._process_input_queue()
    clock.seconds += HOUR
    happens(engine)
    engine._process_input_queue()
    assert engine.input_queue.waits == []
    since = vars(engine)[patch.SINCE]
    vars(engine).clear()
    vars(engine).update(vars(usual) | {patch.SINCE: since})
    engine._process_input_queue()
    clock.seconds += 0.008
    engine._process_input_queue()
    assert engine.input_queue.waits == pytest.approx([0.001])
    assert context.counters == {"slowed": 2}


def test_a_loop_of_its_own(clock: SimpleNamespace, context: PatchContext) -> None:
    engine = WithItsOwnLoop()
    engine._process_input_queue()
    clock.seconds += HOUR
    engine._process_input_queue()
    assert (engine.input_queue.waits, context.counters) == ([], {})


def test_connectors_that_cannot_push(clock: SimpleNamespace) -> None:
    """To 0.23.0 connectors have no such method, and to 0.26.0 schedulers no connector of an encoder."""
    engine = EngineCoreProc()
    engine.scheduler.connector = object()
    del engine.scheduler.ec_connector
    engine._process_input_queue()
    clock.seconds += HOUR
    engine._process_input_queue()
    assert engine.input_queue.waits == [0.05]


def test_a_message_ends_the_wait(context: PatchContext) -> None:
    """A real queue, a wait of an hour: it ends with a message, which the release's own code takes."""
    context.options = {"WAIT_SECONDS": HOUR}
    look = patch.wrappers(context)[f"{patch.CORE}:EngineCoreProc._process_input_queue"].look
    engine = EngineCoreProc()
    engine.input_queue = queue.Queue()
    vars(engine)[patch.SINCE] = time.monotonic() - 100 * HOUR
    waiting = threading.Thread(target=look, args=(engine, (), {}), daemon=True)
    waiting.start()
    while not engine.input_queue.not_empty._waiters:
        assert waiting.is_alive()
    engine.input_queue.put_nowait("add")
    waiting.join(60)
    assert not waiting.is_alive()
    assert list(engine.input_queue.queue) == ["add"]
    look(engine)  # and a message that is there already is not waited for


class SpinCondition:
    """A worker's, 0.29.0's in shape: it spins for a second after it has read, then polls."""

    busy_loop_s = 1.0

    def __init__(self, clock: SimpleNamespace) -> None:
        self.clock, self.last_read = clock, clock.seconds
        self.waited: list[float | None] = []

    def wait(self, timeout_ms: int | None = None) -> None:
        self.waited.append(0 if self.clock.seconds <= self.last_read + self.busy_loop_s else timeout_ms)


class Reader:
    """A worker's end of a queue."""

    def __init__(self, context: PatchContext, clock: SimpleNamespace) -> None:
        made = patch.wrappers(context)
        own = {name: vars(SpinCondition)[name] for name in ("wait",)}
        target = f"{patch.QUEUE}:SpinCondition.wait"
        own["wait"] = guard.in_place_of(own["wait"], made[target], context, target)
        self.condition: Any = type("SpinCondition", (SpinCondition,), own)(clock)
        self.queue = SimpleNamespace(_spin_condition=self.condition)
        self.clock = clock
        self.look = made[f"{patch.QUEUE}:MessageQueue.dequeue"].look

    def hear(self, after: float, message: Any) -> None:
        self.clock.seconds += after
        self.condition.last_read = self.clock.seconds
        self.look(message, self.queue)

    def waits(self, timeout_ms: int | None, by_name: bool = False) -> Any:
        self.condition.wait(timeout_ms=timeout_ms) if by_name else self.condition.wait(timeout_ms)
        return self.condition.waited[-1]


def execute(tokens: int) -> tuple[Any, ...]:
    return "execute_model", (SimpleNamespace(total_num_scheduled_tokens=tokens),), {}, 0


def test_a_worker_rests_between_steps_far_apart(context: PatchContext, clock: SimpleNamespace) -> None:
    reader = Reader(context, clock)
    reader.hear(0.05, execute(0))
    assert reader.waits(5000) == 0  # nothing is known yet of how far apart they come
    reader.hear(0.05, execute(0))
    assert [reader.waits(5000), reader.waits(7), reader.waits(None), reader.waits(5000, by_name=True)] == [
        20,
        7,
        20,
        20,
    ]
    reader.hear(0.05, execute(5))
    assert reader.waits(5000) == 0
    reader.hear(0.004, execute(0))
    assert reader.waits(5000) == 0


def test_a_worker_of_an_idle_engine_waits_as_upstreams(context: PatchContext, clock: SimpleNamespace) -> None:
    reader = Reader(context, clock)
    reader.hear(0.05, execute(0))
    reader.hear(0.05, execute(0))
    clock.seconds += 1.01
    assert [reader.waits(5000), reader.waits(None)] == [5000, None]
    assert reader.condition.last_read == pytest.approx(1000.1)


OTHERS: list[Any] = [
    ("profile", (), {}, None),
    {"execute_model": 1},
    ("SUCCESS", None),
    ("execute_model", None),
    (),
    None,
]


@pytest.mark.parametrize("message", OTHERS)
def test_other_messages(message: Any, context: PatchContext, clock: SimpleNamespace) -> None:
    reader = Reader(context, clock)
    reader.hear(0.05, execute(0))
    reader.hear(0.05, message)
    assert reader.waits(5000) == 0
    assert not context.aside


def test_a_reader_that_hears_of_no_step(context: PatchContext, clock: SimpleNamespace) -> None:
    """The core's, for the workers' answers."""
    reader = Reader(context, clock)
    reader.hear(0.05, ("SUCCESS", None))
    assert reader.waits(5000) == 0
    clock.seconds += 1.01
    assert (reader.waits(5000), context.aside) == (5000, False)


def test_a_reader_on_another_machine(context: PatchContext, clock: SimpleNamespace) -> None:
    reader = Reader(context, clock)
    reader.look(execute(0), SimpleNamespace(_spin_condition=None))
    assert not context.aside


@pytest.mark.parametrize(("text", "seconds", "errors"), [("1", 1.0, 0), ("1.5", 0.05, 1), ("3600", 0.05, 1)])
def test_a_wait_has_a_longest(text: str, seconds: float, errors: int) -> None:
    """A worker waits as long for the next step, and from 0.33.0 on vLLM watches how long that takes."""
    declared = catalogue.load()[NAME].patch
    environment = settings.read([declared], {"LIVEPATCH_IDLE_STEPPING_WAIT_SECONDS": text})
    assert (environment.options[NAME]["WAIT_SECONDS"], len(environment.errors)) == (seconds, errors)

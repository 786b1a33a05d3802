# mypy: disable-error-code="import-not-found"
"""Drive one release's engine core while a finished request's blocks are held; print its steps as one JSON object.

    idle_stepping.py [CASE...]

The loop, the step, the scheduler and the queues are the release's; executor, worker and connector are stood in for. Time
is the driver's: it passes where the loop sleeps or waits, and STEP seconds in each step, so that no figure is of the
machine. See idle_queue.py for the worker's part.
"""

from __future__ import annotations

from result import begin_driver, print_result

begin_driver()

import collections
import gc
import inspect
import json
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import idle_queue
import real_scheduler as real
import vllm
from connector_double import ConnectorDouble
from vllm.distributed.device_communicators import shm_broadcast
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine import core as engine_core

gc.enable()

BUNDLE = "_vllm_livepatch" in sys.modules
STEP = 0.002
"""Seconds that a step takes."""
HELD = 2.0
"""When the send ends for which blocks are held, in seconds."""
END = 2.5
"""When each world ends."""
POOL = real.NUM_BLOCKS - 1
QUEUED = {"Scheduler": 1, "AsyncScheduler": 2}
"""How many steps each scheduler has under way at a time."""


class Connector(ConnectorDouble):
    """One that may also say that it pushes."""

    pushes = False

    def has_pending_push_work(self) -> bool:
        return self.pushes


class Over(BaseException):
    """The world has ended."""


class World:
    """An engine core, what happens to it and when, and what it did."""

    def __init__(self, mode: str, model_config: Any, kind: Any = engine_core.EngineCoreProc) -> None:
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.steps: list[float] = []
        """When each began."""
        self.announced: set[str] = set()
        self.ends: dict[str, float] = {}
        """When the send (of a finished request) or the load (of one that waits) of a request has ended."""
        self.back: dict[str, float] = {}
        """When each finished request's blocks were back."""
        self.first: dict[str, float] = {}
        """When something was first computed for a request."""
        self.scheduler = real.make_scheduler(
            mode, model_config, (__name__, "Connector"), options={"max_num_batched_tokens": 2048}
        )
        self.engine = make_engine(kind, self, mode)

    def at(self, moment: float, happens: Callable[[], None]) -> None:
        self.events.append((moment, len(self.events), happens))
        self.events.sort()

    def ask(self, moment: float, name: str, ends: float, **wants: Any) -> None:
        """A client's request, whose transfer ends at `ends`."""
        self.ends[name] = ends
        message = (EngineCoreRequestType.ADD, (real.make_request(name, **wants), 0))
        self.at(moment, lambda: self.engine.input_queue.put_nowait(message))

    def advance(self, seconds: float, waiting: bool = False) -> None:
        """Let time pass; who waits for a message goes on when there is one."""
        until = self.now + seconds
        while self.events and self.events[0][0] <= until and not (waiting and self.engine.input_queue.queue):
            moment, _, happens = self.events.pop(0)
            self.now = max(self.now, moment)
            happens()
        if not (waiting and self.engine.input_queue.queue):
            self.now = until

    def executed(self, scheduled: Any) -> Any:
        """What the worker answers to a step."""
        self.steps.append(self.now)
        for name in scheduled.num_scheduled_tokens:
            self.first.setdefault(name, self.now)
        self.announced |= scheduled.finished_req_ids
        self.advance(STEP)
        output = real.run_model(scheduled)
        ended = [name for name, moment in self.ends.items() if moment <= self.now]
        loads = [name for name in ended if self.waits(name)]
        sends = [name for name in ended if name in self.announced and name not in self.back]
        for name in (*loads, *sends):
            del self.ends[name]
        output.kv_connector_output = real.transfers(loads, sends)
        return output

    def waits(self, name: str) -> bool:
        request = self.scheduler.requests.get(name)
        return request is not None and real.status_name(request) == "WAITING_FOR_REMOTE_KVS"

    def play(self) -> World:
        """Run the engine's own loop to the end of the world."""
        self.at(END, over)
        known = self.scheduler._free_blocks

        def freed(request: Any, *args: Any, **kwargs: Any) -> Any:
            self.back[request.request_id] = self.now
            return known(request, *args, **kwargs)

        self.scheduler._free_blocks = freed
        kept = time.monotonic, time.sleep
        time.monotonic, time.sleep = (lambda: 1e6 + self.now), self.advance
        try:
            self.engine.run_busy_loop()
        except Over:
            pass
        finally:
            time.monotonic, time.sleep = kept
        return self

    def between(self, since: float, until: float) -> int:
        """How many steps began then."""
        return sum(since <= moment < until for moment in self.steps)


def late(moments: Mapping[str, float], name: str, due: float) -> float | None:
    """How much later than `due` something was so, in seconds; None: never."""
    return round(moments[name] - due, 4) if name in moments else None


def over() -> None:
    raise Over


class Inbox(queue.Queue):  # type: ignore[type-arg]
    """The engine's queue of messages, at which the driver's time passes."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.not_empty = Arrival(world)  # type: ignore[assignment]

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        while not self.queue and block:
            self.world.advance(END, waiting=True)
        if not self.queue:
            raise queue.Empty
        return self.queue.popleft()


class Arrival:
    """In place of the queue's condition."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def notify(self) -> None: ...

    def wait_for(self, arrived: Callable[[], Any], timeout: float) -> None:
        if not arrived():
            self.world.advance(timeout, waiting=True)


class Executor:
    """Answers a step at once, in the form in which the release asks."""

    is_sleeping = False
    max_concurrent_batches = 1

    def __init__(self, world: World) -> None:
        self.world = world
        self.sampled: Any = None

    def execute_model(self, scheduled: Any, non_block: bool = False) -> Any:
        output = self.world.executed(scheduled)
        if scheduled.total_num_scheduled_tokens:
            self.sampled, output = output, None
        return done(output) if non_block else output

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        return done(self.sampled) if non_block else self.sampled

    def execute_dummy_batch(self) -> None:
        self.world.advance(STEP)


def done(output: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(output)
    return future


def make_engine(kind: Any, world: World, mode: str) -> Any:
    """An engine core as its `__init__` leaves it, but for sockets, workers and model."""
    engine = kind.__new__(kind)
    size = QUEUED[mode]
    vars(engine).update(
        vllm_config=world.scheduler.vllm_config,
        scheduler=world.scheduler,
        model_executor=Executor(world),
        batch_queue=collections.deque(maxlen=size) if size > 1 else None,
        batch_queue_size=size,
        input_queue=Inbox(world),
        output_queue=queue.Queue(),
        aborts_queue=queue.Queue(),
        _idle_state_callbacks=[],
        engines_running=False,
        process_input_queue_block=True,
        publish_dp_lb_stats=False,
        is_ec_consumer=True,
        is_ec_producer=False,
        is_mm_encoder_only=False,
        is_pooling_model=False,
        use_spec_decode=False,
        check_for_draft_tokens=False,
        async_scheduling=size > 1,
        log_stats=False,
        enable_fault_tolerance=False,
        reject_new_requests=False,
        _scheduler_paused=False,
        has_coordinator=False,
        current_wave=0,
        step_counter=0,
        prefill_schedule_interval=1,
        eep_scaling_state=None,
        dp_rank=0,
        _weight_version="default",
    )
    if hasattr(engine_core, "EngineShutdownState"):
        engine.shutdown_state = engine_core.EngineShutdownState.RUNNING
    engine.step_fn = engine.step if size == 1 else engine.step_with_batch_queue
    return engine


def holding(mode: str, model_config: Any, ends: float = HELD, kind: Any = engine_core.EngineCoreProc) -> World:
    """One request, answered by a few steps, whose send ends at `ends`."""
    world = World(mode, model_config, kind)
    world.ask(0.0, "held", ends, delay_free=True)
    return world


def held(mode: str, model_config: Any) -> dict[str, Any]:
    world = holding(mode, model_config).play()
    return {"steps": world.between(1, HELD), "late": late(world.back, "held", HELD)}


def held_shortly(mode: str, model_config: Any) -> dict[str, Any]:
    world = holding(mode, model_config, ends=0.1).play()
    return {"late": late(world.back, "held", 0.1)}


def newcomer(mode: str, model_config: Any) -> dict[str, Any]:
    """A request comes while another's blocks are held, and after it they still are."""
    world = holding(mode, model_config)
    world.ask(1.0, "new", 0.0)
    world.play()
    return {"late": late(world.first, "new", 1.0), "steps": world.between(1.5, HELD)}


def loading(mode: str, model_config: Any) -> dict[str, Any]:
    """A request waits for its KV beside the hold."""
    world = holding(mode, model_config)
    world.ask(0.5, "loads", 1.5, load=True)
    world.play()
    return {"steps": world.between(0.6, 1.5), "late": late(world.first, "loads", 1.5)}


def full(mode: str, model_config: Any, comes: float) -> World:
    """Nearly all blocks are held, and a request comes that needs some of them."""
    world = World(mode, model_config)
    for number in range(POOL // 15):
        world.ask(0.0, f"held{number}", HELD, delay_free=True, prompt=15 * real.BLOCK_SIZE - 3)
    world.ask(comes, "new", 0.0, prompt=15 * real.BLOCK_SIZE - 3)
    return world.play()


def no_room(mode: str, model_config: Any) -> dict[str, Any]:
    """It comes while they are held, and waits."""
    world = full(mode, model_config, 0.5)
    return {"steps": world.between(0.6, HELD), "late": late(world.first, "new", HELD)}


def room_unseen(mode: str, model_config: Any) -> dict[str, Any]:
    """It comes when the holds have ended, and before a step has told so."""
    world = full(mode, model_config, HELD + 0.0001)
    return {
        "steps before it": world.between(HELD + 0.0001, world.first["new"]),
        "waits": late(world.first, "new", HELD),
    }


def pushing(mode: str, model_config: Any) -> dict[str, Any]:
    """The connector says that it pushes, to the first second."""
    world = holding(mode, model_config)
    world.scheduler.connector.pushes = True
    world.at(1.0, lambda: setattr(world.scheduler.connector, "pushes", False))
    world.play()
    return {"steps": world.between(0.5, 1), "steps then": world.between(1.5, HELD)}


def pausing(mode: str, model_config: Any) -> dict[str, Any]:
    """Somebody waits for the engine to be idle."""
    world = holding(mode, model_config)
    world.at(0.9, lambda: world.engine._idle_state_callbacks.append(lambda engine: None))
    world.play()
    return {"steps": world.between(1, HELD)}


def scaling(mode: str, model_config: Any) -> dict[str, Any]:
    """An elastic engine looks at its queue between two parts of its work."""
    world = holding(mode, model_config)
    world.at(0.9, lambda: setattr(world.engine, "process_input_queue_block", False))
    world.at(HELD, lambda: setattr(world.engine, "process_input_queue_block", True))
    world.play()
    return {"steps": world.between(1, HELD)}


def ending(mode: str, model_config: Any) -> dict[str, Any]:
    """The engine is asked to end, and lets what it holds be."""
    world = holding(mode, model_config)
    world.engine._handle_shutdown = lambda: True

    def ask() -> None:
        world.engine.shutdown_state = engine_core.EngineShutdownState.REQUESTED
        world.engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    world.at(1.0, ask)
    world.at(HELD, over)
    world.play()
    after = min(moment for moment in world.steps if moment >= 1.0)
    return {"late": round(after - 1.0, 4), "steps": world.between(1.1, HELD)}


def data_parallel(mode: str, model_config: Any) -> dict[str, Any]:
    """One of several engines that step together; the others have nothing to do."""
    world = holding(mode, model_config, kind=engine_core.DPEngineCoreProc)
    world.engine._has_global_unfinished_reqs = lambda unfinished: unfinished
    world.play()
    return {"steps": world.between(1, HELD), "late": late(world.back, "held", HELD)}


CASES = (held, held_shortly, newcomer, loading, no_room, room_unseen, pushing, pausing, scaling, ending, data_parallel)


def played(model_config: Any) -> dict[str, Any]:
    """Each case with both schedulers, and the worker's queue."""
    found: dict[str, Any] = {mode: {} for mode in real.SCHEDULERS}
    for mode, cases in found.items():
        for case in CASES:
            if case.__name__ in (sys.argv[1:] or [case.__name__]):
                cases[case.__name__] = case(mode, model_config)
    return {**found, "queue": idle_queue.play()}


TARGETS = (
    (engine_core.EngineCoreProc, "_process_input_queue"),
    (shm_broadcast.MessageQueue, "dequeue"),
    (getattr(shm_broadcast, "SpinCondition", None), "wait"),
)


def as_released(play: Callable[[], Any]) -> Any:
    """What `play` finds in a child, where what patches have wrapped is the release's own again."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for owner, name in TARGETS:
                if owner is not None:
                    setattr(owner, name, inspect.unwrap(vars(owner)[name]))
            with os.fdopen(writer, "w", encoding="utf-8") as pipe:
                json.dump(play(), pipe)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    # If it lived for long, it reported that its patches were replaced, which is so.
    for report in Path(os.environ.get("LIVEPATCH_STATE_DIR") or os.devnull).glob(f"*-{child}-*.json"):
        report.unlink()
    return json.loads(found)


def found() -> dict[str, Any]:
    """What all is as the release does it, and then as it is with the bundle, if there is one."""
    real.quiet()
    real.MAX_MODEL_LEN = 512
    with tempfile.TemporaryDirectory() as directory:
        model_config = real.make_model_config(Path(directory))
        ways = {"stock": as_released(lambda: played(model_config))}
        if BUNDLE:
            ways["patched"] = played(model_config)
    return ways


def main() -> None:
    """Play all, and print what it came to."""
    print_result({"pid": os.getpid(), **found()}, vllm)


if __name__ == "__main__":
    main()

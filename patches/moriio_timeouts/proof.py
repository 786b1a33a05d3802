"""A real MoRI-IO worker, and real engines that read: no wait for what never ends, or fails, is without a limit.

`mori` is the device's library: a stand-in has its place, which moves the bytes and ends each
transfer as the case orders. Where the connector bounds its waits itself, these bounds alone are looked at.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

OPTIONS = {"HANDSHAKE": "1.0", "TRANSFER": "0.8", "DEFER": "0.8"}
for name, given in OPTIONS.items():  # they are read when the connector is imported
    os.environ[f"LIVEPATCH_MORIIO_TIMEOUTS_{name}_SECONDS"] = given

import result  # noqa: E402

result.stand_in()

import moriio_reads as reads  # noqa: E402
import moriio_timeouts as worker  # noqa: E402
import real_scheduler as real  # noqa: E402

SECONDS = 4.0
"""How long a wait may take that is bounded by OPTIONS."""
BOUNDED = {
    "healthy",
    "late_peer",
    "nothing_to_save",
    "transfer_never_ends",
    "transfer_fails",
    "transfer_of_another_fails",
    "write_raises",
    "never_allocated",
    "same_id_later",
}
BOUNDED_OF_ENGINES = ("healthy", "nothing_to_save", "refused_handshake", "transfer_fails", "never_allocated")
"""Cases that a connector has which bounds its waits itself; what else it leaves open is not what the patch is for."""

FAILED_OR_COMPUTED = ("error, next right", "right, next right")
RIGHT = {
    **dict.fromkeys(("fails", "fails_while_pending", "refused", "garbage", "silent"), FAILED_OR_COMPUTED),
    "shares_a_block": ("right, next right", "right, next error"),
}
"""What comes of reads that fail, by the policy; all others are right."""
WAITS = "waits, next right; "
"""How the outcome begins of a read that never ends: its blocks are kept."""

Case = Callable[[], "str | None"]


def cases() -> dict[str, Case]:
    """Each case on a worker; and where waits have no limit, on engines that read, too."""
    config, made = worker.connector.MoRIIOConfig, worker.connector.MoRIIOConnectorWorker
    bounds_its_waits = "transfer_timeout" in {field.name for field in dataclasses.fields(config)}
    if bounds_its_waits and "kv_cache_config" in inspect.signature(made).parameters:
        return of_engines()
    played = {name: case for name, case in worker.played(SECONDS).items() if name in BOUNDED or not bounds_its_waits}
    doc = {**{name: case for name, (case, _) in worker.CASES.items()}, "port_is_taken": worker.port_is_taken}
    found = {f"worker: {sentence(doc[name])}": survives(case) for name, case in played.items()}
    return found if bounds_its_waits else found | of_reads()


def sentence(case: Callable[..., Any]) -> str:
    return (case.__doc__ or "").strip().splitlines()[0].rstrip(".")


def survives(case: Callable[[], str]) -> Case:
    def wrong() -> str | None:
        outcome = case()
        if case is worker.port_is_taken:
            return None if outcome.startswith("raises ") else outcome
        return None if outcome == "survives" else outcome

    return wrong


def of_engines() -> dict[str, Case]:
    """The cases of two engines that talk to each other, each with a connector of a later protocol."""
    import moriio_later as engines

    played = engines.played(SECONDS, BOUNDED_OF_ENGINES)
    return {f"engines: {sentence(engines.CASES[name][0])}": survives(case) for name, case in played.items()}


def of_reads() -> dict[str, Case]:
    """The cases of an engine that reads: what its clients got."""
    reads.begin()
    model = real.make_model_config(Path(tempfile.mkdtemp()))
    ways = list(zip(real.SCHEDULERS, ("fail", "recompute"), strict=True))
    found = {
        f"{scheduler} that reads, {policy}: {sentence(addressed_by_id)}": right(
            "", functools.partial(play, scheduler, policy, model)
        )
        for scheduler, policy in ways
    }
    return found | {
        f"{scheduler} that reads, {policy}: {sentence(reads.CASES[name][0])}": right(name, case)
        for scheduler, policy in ways
        for name, case in reads.played(model, scheduler, policy, SECONDS).items()
    }


def play(scheduler: str, policy: str, model: Any) -> str:
    return str(reads.drive(addressed_by_id, reads.World(scheduler, policy, model)))


def addressed_by_id(world: Any) -> str:
    """A peer whose address is in the request's id alone is read from, where the connector takes it from there."""
    tokens = reads.prompt(11)
    name = world.add(world.peer(), tokens, [1, 2, 3])
    for field in ("host", "port", "handshake_port", "notify_port"):
        del world.scheduler.requests[name].kv_transfer_params[f"remote_{field}"]
    numbers: list[int] = []
    compute = world.compute

    def noted(request: str, blocks: list[int], start: int, number: int) -> Any:
        numbers.append(number)
        return compute(request, blocks, start, number)

    world.compute = noted
    world.run([name])
    if hasattr(worker.connector, "get_peer_zmq_from_request_id") and numbers[:1] == [len(tokens)]:
        return "the prompt was computed here"
    return str(reads.ended(world, [world.outcome(name)]))


def right(name: str, case: Callable[[], str]) -> Case:
    def wrong() -> str | None:
        outcome = case()
        if name == "never_ends":
            return None if outcome.startswith(WAITS) and outcome.endswith("kept") else outcome
        return None if outcome in of_name.get(name, ("right",)) else outcome

    of_name: Mapping[str, tuple[str, ...]] = RIGHT
    return wrong

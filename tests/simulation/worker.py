# mypy: disable-error-code="import-not-found"
"""The worker's side of a world: steps are computed, transfers move, and what has ended is reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import real_scheduler as real

from tests.simulation import build, invariants
from tests.simulation.plan import Lie
from tests.simulation.transfers import Client, Transfer

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass(eq=False)
class Step:
    """What was scheduled, with the block tables as they were then, and what the worker made of it."""

    scheduled: Any
    work: list[tuple[Client, tuple[list[int], ...], int, int, bool]]
    output: Any
    in_step: list[Transfer]
    executed: bool = False
    reported: list[Transfer] = field(default_factory=list)


def execute(world: World, step: Step) -> None:
    """The worker does a step: loads of this step, the model, and a look at which transfers have ended."""
    step.executed = True
    failed: set[int] = set()
    for load in step.in_step:
        failed |= load_now(world, load)
    for client, tables, start, end, _ in step.work:
        compute(world, client, tables, start, end, failed)
    for transfer in world.transfers:
        if transfer.unheard and transfer.owner.plan.name in step.scheduled.finished_req_ids:
            transfer.unheard = False
            if not transfer.touches:
                transfer.ended = True  # a request that ended as it loaded: there is nothing to store
    names: dict[str, set[str]] = {"load": set(), "send": set()}
    failed_names: set[str] = set()
    for transfer in [each for each in world.transfers if each.ended and not each.reported]:
        client = transfer.owner
        siblings = [each for each in client.transfers if each.kind == transfer.kind]
        if transfer.kind == "send" and not all(each.ended for each in siblings):
            continue  # MultiConnector waits for the last
        if transfer in step.reported or any(transfer in other.reported for other in world.steps):
            continue
        if any(each.lost for each in siblings):
            continue
        step.reported.append(transfer)
        names[transfer.kind].add(client.plan.name)
        if transfer.fails:
            failed_names.add(client.plan.name)
            failed |= {block for block, _, _ in transfer.touches[len(transfer.touches) // 2 :]}
    step.output.kv_connector_output = real.transfers(names["load"], names["send"])
    if failed and world.groups == 1:
        step.output.kv_connector_output.invalid_block_ids = failed
    if failed_names and world.groups > 1:
        step.output.kv_connector_output.failed_recving = failed_names


def load_now(world: World, load: Transfer) -> set[int]:
    """A load of the step that computes: all at once, or half of it and an error. Returns the blocks that failed."""
    reach = len(load.touches) // 2 if load.fails else len(load.touches)
    for block, place, content in load.touches[:reach]:
        world.memory.slots[block][place] = content
    load.done, load.ended, load.reported = len(load.touches), True, True
    return {block for block, _, _ in load.touches[reach:]} if load.fails else set()


def compute(
    world: World, client: Client, tables: tuple[list[int], ...], start: int, end: int, failed: set[int]
) -> None:
    """Every slot that is attended to must hold the request's own KV; then the new ones are written."""
    for group, table in enumerate(tables):
        first = max(0, start - build.WINDOW + 1) if group else 0
        if not failed.intersection(table):  # told of in this step: the scheduler drops what comes of it
            place = world.memory.holds(client, group, table, first, start)
            if place is not None:
                world.wrong("computed on wrong KV", f"{client} at token {place} of {start}, KV group {group}")
        world.memory.write(client, group, table, start, end)
    client.ran = True


def move(world: World) -> None:
    """Every transfer does a step's share of its touches."""
    for transfer in world.transfers:
        if transfer.ended or world.now < transfer.begins or transfer.unheard:
            continue
        if transfer.kind == "load" and world.behaviour.loads_in_step:
            continue
        last = len(transfer.touches) // 2 if transfer.fails else len(transfer.touches)
        share = transfer.touches[transfer.done : min(transfer.done + transfer.a_step, last)]
        for block, place, content in share:
            if transfer.kind == "load":
                invariants.check_write(world, transfer, block)
                world.memory.slots[block][place] = content
            elif world.memory.slots[block][place] != content:
                world.wrong("sent another's contents", f"{transfer.owner}'s send reads block {block}")
        transfer.done += len(share)
        if transfer.done >= last and world.now >= transfer.until:
            transfer.done = len(transfer.touches)
            transfer.ended = True
            world.say(f"{transfer.owner}'s {transfer.kind} ended" + " (its word is lost)" * transfer.lost)


def survivable(world: World, lie: Lie, step: Step) -> bool:
    """Whether a protocol of ids alone can tell the lie from the truth.

    It cannot where a transfer of the same kind and id is under way: then the word might be its own. So a second
    word of a receive comes only when no load of that id is, and of a send only when none is announced, not even in
    the step that hears of it.
    """
    if any(
        client.plan.name == lie.about and sampled and client.delivered + 1 >= client.plan.outputs
        for client, _, _, _, sampled in step.work
    ) or any(each.fails and each.owner.plan.name == lie.about for each in step.reported):
        return False
    kind = "load" if lie.kind == "recving" else "send"
    return not any(
        each.kind == kind and each.owner.plan.name == lie.about and (each.outstanding or each.lost)
        for each in world.transfers
    )

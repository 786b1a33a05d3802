# mypy: disable-error-code="import-not-found"
"""The worker's side of a world: steps are computed, transfers move, and what has ended is reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import real_scheduler as real

from tests.simulation import build, invariants
from tests.simulation.losses import LEASE
from tests.simulation.plan import Lie
from tests.simulation.transfers import WRONG_OUTPUT, Client, Loss, Transfer

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass(eq=False)
class Step:
    """What was scheduled, with the block tables as they were then, and what the worker made of it."""

    scheduled: Any
    work: list[tuple[Client, tuple[list[int], ...], int, int, bool]]
    output: Any
    in_step: list[Transfer]
    number: int
    losses: list[Loss] = field(default_factory=list)
    executed: bool = False
    reported: list[Transfer] = field(default_factory=list)


def execute(world: World, step: Step) -> None:
    """The worker does a step: loads of this step, the model, and a look at which transfers have ended."""
    step.executed = True
    failed: set[int] = set()
    for load in step.in_step:
        failed |= load_now(world, load)
        if load.fails:
            step.losses.append(load.loss)
    for index, (client, tables, start, end, sampled) in enumerate(step.work):
        lost = compute(world, step, client, tables, start, end)
        if lost and sampled:
            step.output.sampled_token_ids[index] = [WRONG_OUTPUT]
    for transfer in world.transfers:
        if transfer.unheard and transfer.owner.plan.name in step.scheduled.finished_req_ids:
            transfer.unheard = False
            if not transfer.touches:
                transfer.ended = True  # a request that ended as it loaded: there is nothing to store
    names: dict[str, set[str]] = {"load": set(), "send": set()}
    failed_names: set[str] = set()
    later: set[int] = set()
    for transfer in [each for each in world.transfers if each.has_word and not each.reported]:
        client = transfer.owner
        siblings = [each for each in client.transfers if each.kind == transfer.kind]
        if transfer.kind == "send" and not all(each.has_word for each in siblings):
            if not (transfer.store and world.answers.says_first_store):
                continue  # MultiConnector waits for the last
            for each in siblings:
                each.early = True
            step.reported += [each for each in siblings if each is not transfer]
        if transfer in step.reported or any(transfer in other.reported for other in world.steps):
            continue
        if any(each.lost for each in siblings):
            continue
        step.reported.append(transfer)
        names[transfer.kind].add(client.plan.name)
        if transfer.fails:
            failed_names.add(client.plan.name)
            later |= {block for block, _, _ in transfer.touches[transfer.lost_from :]}
    step.output.kv_connector_output = real.transfers(names["load"], names["send"])
    tell_failures(world, step.output.kv_connector_output, failed, later, failed_names)


def tell_failures(world: World, output: Any, now: set[int], later: set[int], names: set[str]) -> None:
    """Report loads that failed: by their blocks, those `now` in this step and `later` beside the steps, or by request.

    With several groups a plan of `draw` reports by request alone; one of losses.py says how in `told_by`.
    """
    by_block, by_request = world.groups == 1, world.groups > 1
    if world.plan.losses:
        can = build.failures_by_request()
        by_block, by_request = world.plan.reported_by != "id" or not can, world.plan.reported_by != "blocks" and can
    blocks = now | later if by_block else now
    if blocks:
        output.invalid_block_ids = blocks
    if names and by_request:
        output.failed_recving = names


def load_now(world: World, load: Transfer) -> set[int]:
    """A load of the step that computes: all at once, or half of it and an error. Returns the blocks that failed."""
    for block, place, content in load.touches[: load.reach]:
        world.memory.slots[block][place] = content
    for block, place, _ in load.touches[load.reach :]:
        world.memory.slots[block][place] = load.loss
    load.done, load.ended, load.reported = len(load.touches), True, True
    return {block for block, _, _ in load.touches[load.reach :]}


def compute(
    world: World, step: Step, client: Client, tables: tuple[list[int], ...], start: int, end: int
) -> Loss | None:
    """Every slot that is attended to must hold the request's own KV; then the new ones are written.

    What was lost in a load of this step, or of one that was not yet answered when this was scheduled, may be there: then
    the loss is returned, and what comes of it must not be used.
    """
    lost: Loss | None = None
    for group, table in enumerate(tables):
        first = max(0, start - build.WINDOW + 1) if group else 0
        place = world.memory.holds(client, group, table, first, start)
        if place is None:
            continue
        losses = world.memory.losses(client, group, table, place, start)
        if all(loss is not None and (loss.reported is None or step.number <= loss.reported) for loss in losses):
            lost = losses[0]
        else:
            world.wrong("computed on wrong KV", f"{client} at token {place} of {start}, KV group {group}")
    for group, table in enumerate(tables):
        world.memory.write(client, group, table, start, end, lost)
    client.ran = True
    return lost


def move(world: World) -> None:
    """Every transfer does a step's share of its touches."""
    for transfer in world.transfers:
        if transfer.ended or transfer.unheard:
            continue
        if transfer.kind == "load" and world.behaviour.loads_in_step:
            continue
        if not world.answers.touches(transfer):
            continue
        last = transfer.reach
        foreign_from = last // 2 if transfer.fate == LEASE else last
        share = transfer.touches[transfer.done : min(transfer.done + transfer.a_step, last)]
        if transfer.done + len(share) > foreign_from and transfer.lease_ends is None:
            transfer.lease_ends = world.now  # at the other side
        for index, (block, place, content) in enumerate(share, transfer.done):
            if transfer.kind == "load":
                invariants.check_write(world, transfer, block)
                world.memory.slots[block][place] = content if index < foreign_from else ~content
            elif world.memory.slots[block][place] != content:
                transfer.foreign = f"{transfer.owner}'s send reads block {block}"
                if transfer.lease_ends is None:
                    world.wrong("sent another's contents", transfer.foreign)
        transfer.done += len(share)
        if transfer.done >= last and world.now >= transfer.until:
            transfer.done = len(transfer.touches)
            transfer.ended = True
            if transfer.lease_ends is not None and not world.answers.believes(transfer):
                transfer.fails, transfer.lost_from = transfer.kind == "load", 0
            elif transfer.lease_ends is not None and transfer.foreign:
                world.wrong("sent another's contents", f"{transfer.foreign}, and its reader believes it")
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

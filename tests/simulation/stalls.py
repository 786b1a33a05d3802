# mypy: disable-error-code="import-not-found"
"""What is made of a world in which nothing moves any more, though clients wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import real_scheduler as real

if TYPE_CHECKING:
    from tests.simulation.world import World


NO_REASON = "somebody waits, and nobody holds blocks"


def give_up(world: World) -> bool:
    """Nothing moves and no transfer is under way: a client hangs up; False where the stall is a fault."""
    stuck = [client for client in world.clients if not client.ended]
    excused = world.lost_names()
    lost = [client for client in stuck if any(each.lost for each in client.transfers)]
    lost += [client for client in stuck if client.plan.name in excused]  # their names are held
    if lost:
        world.abort(lost[0])
        return True
    for client in stuck:
        known = world.scheduler.requests.get(client.plan.name)
        if known is not client.request and client.plan.name not in excused:
            world.wrong("never ends", f"{client} is not in the scheduler")
        elif known is client.request and real.status_name(client.request) == "WAITING_FOR_REMOTE_KVS":
            # It may have heard, and stand behind one that finds no blocks: the loads' own deadlock, to 0.30.
            if client.plan.name not in world.scheduler.finished_recving_kv_req_ids:
                world.wrong("never ends", f"{client} waits for a load that has ended")
    for name, request in world.scheduler.requests.items():
        if request.is_finished() and name not in excused:
            world.wrong("never ends", f"{name} has ended and all its transfers, and its blocks are held")
    if world.faults and world.faults[-1].kind == "never ends":
        return False
    if excused.intersection(world.scheduler.requests):
        world.notes.add("blocks held by a lost word")
    else:
        shape = load_deadlock(world)
        if shape == NO_REASON or ends_load_deadlocks():
            world.wrong("never ends", shape)
            return False
        world.notes.add(shape)
    if not stuck:
        world.coming.clear()  # all have their answers: what is still to come has a name that a lost word holds
        return True
    world.abort(stuck[-1])
    return True


def ends_load_deadlocks() -> bool:
    """Whether requests with loaded KV wait in a queue of their own, where none stops them: from 0.31.0 on."""
    return "kv_holding_waiting" in real.Scheduler.__init__.__code__.co_names


def load_deadlock(world: World) -> str:
    """The shape of a stall in which loads hold what others need (docs/loads.md), by who stands first."""
    scheduler = world.scheduler
    held = {name: any(map(any, world.tables(name))) for name in scheduler.requests}
    queues = (getattr(scheduler, name, ()) for name in ("kv_holding_waiting", "skipped_waiting", "waiting"))
    waiting = [request.request_id for queue in queues for request in queue]
    if not waiting or not any(held.values()):
        return NO_REASON
    if not held.get(waiting[0]):
        return "load deadlock: the first holds no blocks"
    return "load deadlock: the first holds blocks, and lacks some"

# mypy: disable-error-code="import-not-found"
"""One world: the release's scheduler, a model that reads and writes slots, and transfers that run beside it."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import real_scheduler as real

from tests.simulation import build, invariants, scheduler_side, stalls, worker
from tests.simulation.answers import ANSWERS
from tests.simulation.connectors import BEHAVIOURS
from tests.simulation.losses import ALWAYS
from tests.simulation.plan import Plan
from tests.simulation.transfers import OUTPUT, WRONG_OUTPUT, Client, Memory, Transfer, places, prompt
from tests.simulation.worker import Step

QUIET = 8
"""Steps in which nothing can happen any more before a world counts as stalled."""
LONGEST = 1500
"""Steps after which the clients of a world give up."""
MOST_FAULTS = 20


@dataclass
class Fault:
    """One broken invariant."""

    step: int
    kind: str
    text: str


class World:
    """Runs a plan to its end. `policy` may stand between the scheduler and its completions (reference.py).

    `answers` names how its workers answer for what is lost (answers.py).
    """

    def __init__(
        self,
        plan: Plan,
        mode: str,
        directory: str,
        policy: Callable[[World], object] | None = None,
        tell: bool = False,
        answers: str = "patched",
    ) -> None:
        if plan.groups != "full" and not build.serves_several_groups():
            plan = replace(plan, groups="full")
        self.plan = plan
        self.mode = mode
        self.tell = tell
        self.now = 0
        self.story: list[str] = []
        self.faults: list[Fault] = []
        self.seen: set[tuple[str, str]] = set()
        self.notes: set[str] = set()
        self.behaviour = BEHAVIOURS[plan.connector]()
        self.answers = ANSWERS[answers](self)
        self.foresees = False  # whether no load is asked for that fails where the release has no way to go on
        self.clients: list[Client] = []
        self.by_request: dict[int, Client] = {}
        self.asked: list[Transfer] = []
        self.transfers: list[Transfer] = []
        scheduler_side.CURRENT.append(self)
        self.scheduler = build.make_scheduler(mode, plan, directory)
        scheduler_side.CURRENT.clear()
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.all_free = real.free_blocks(self.scheduler)
        self.groups = 3 if plan.groups == "hybrid" else 1
        self.memory = Memory(len(self.pool.blocks))
        self.ahead = 1 if mode == "AsyncScheduler" else 0
        self.late = plan.late and self.ahead > 0 and getattr(self.scheduler, "defer_block_free", False)
        self.steps: deque[Step] = deque()
        self.scheduled = 0  # how many steps have been
        self.coming = deque(sorted(plan.requests, key=lambda each: each.arrives))
        if policy is not None:
            policy(self)

    # What is seen.

    def say(self, text: str) -> None:
        """Tell the story, where somebody listens."""
        if self.tell:
            self.story.append(f"{self.now:4} {text}")

    def wrong(self, kind: str, text: str) -> None:
        """Note a broken invariant, once for each text."""
        if (kind, text) not in self.seen and len(self.faults) < MOST_FAULTS:
            self.seen.add((kind, text))
            self.faults.append(Fault(self.now, kind, text))
            self.say(f"WRONG: {kind}: {text}")

    def tables(self, name: str) -> tuple[list[int], ...]:
        """The block table of a request, one for each KV group."""
        return tuple(self.scheduler.kv_cache_manager.get_block_ids(name))

    def lost_names(self) -> set[str]:
        """Names of requests of which a completion was lost: what they hold cannot come back by itself."""
        return {each.owner.plan.name for each in self.transfers if each.lost and each.ended}

    # The run.

    def run(self) -> World:
        """Run to the end, or to the first exception."""
        try:
            self._run()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.wrong("engine died", f"{type(error).__name__} in {place.name}: {error}"[:200])
            self.say("".join(traceback.format_exception(error)[-6:]))
        return self

    def _run(self) -> None:
        quiet = 0
        while self.coming or any(not client.ended for client in self.clients) or self.under_way() or self.steps:
            something = self.step()
            # One whose time has come, and whose id is still served, comes when that request ends: nothing by itself.
            awaited = any(each.arrives >= self.now for each in self.coming)
            quiet = 0 if something or awaited or self.under_way() else quiet + 1
            if quiet > QUIET:
                if not stalls.give_up(self):
                    return
                quiet = 0
            if self.now > LONGEST:
                self.wrong("never ends", f"after {self.now} steps")
                self.coming.clear()
                for client in self.clients:
                    if not client.ended:
                        self.abort(client)
                break
        for _ in range(5):
            self.step()
        invariants.check_end(self)

    def under_way(self) -> bool:
        """Whether a transfer has yet to end or to be reported."""
        return any(each.outstanding for each in self.transfers)

    def step(self) -> bool:
        """One step of the engine; whether anything ran."""
        self.now += 1
        self.arrive()
        self.aborts(in_step=False)
        for reset in self.plan.resets:
            if reset.step == self.now:
                self.reset(reset.running)
        step = self.schedule()
        self.steps.append(step)
        if not self.late:
            worker.execute(self, step)
        if len(self.steps) > self.ahead or not step.scheduled.total_num_scheduled_tokens:
            while self.steps:
                self.answer(self.steps.popleft())
                if len(self.steps) <= self.ahead and step.scheduled.total_num_scheduled_tokens:
                    break
        worker.move(self)
        invariants.check_counts(self)
        for transfer in self.transfers:
            if not transfer.ended:
                invariants.check_transfer(self, transfer)
        return bool(step.scheduled.total_num_scheduled_tokens)

    # Clients.

    def arrive(self) -> None:
        """Hand over the requests whose time has come; one of a name that is still served waits for its end."""
        for plan in list(self.coming):
            before = [client for client in self.clients if client.plan.name == plan.name]
            if plan.arrives > self.now or any(not client.ended for client in before):
                continue
            if before and any(each[0] is before[-1] for step in self.steps for each in step.work):
                continue  # releases give the token of a step in flight to whoever has the id by then
            self.coming.remove(plan)
            client = Client(plan, len(before), prompt(plan, len(before)), arrived_at=self.now)
            client.request = build.make_request(plan.name, client.tokens, plan.outputs, plan.stops)
            self.clients.append(client)
            self.by_request[id(client.request)] = client
            self.say(f"{client} arrives: {plan.prompt} tokens, {plan.outputs} to answer, {plan.hit} elsewhere")
            self.scheduler.add_request(client.request)

    def aborts(self, in_step: bool) -> None:
        """Clients whose time has come hang up."""
        for client in self.clients:
            after = client.plan.aborted_after
            if after is None or client.ended or client.plan.aborted_in_step != in_step:
                continue
            if self.now >= client.arrived_at + after:
                self.abort(client)

    def abort(self, client: Client) -> None:
        """A client hangs up."""
        client.ended = "aborted"
        self.say(f"{client} is aborted ({real.status_name(client.request)})")
        real.abort(self.scheduler, client.plan.name)

    def reset(self, running: bool) -> None:
        """The prefix cache is emptied; the release refuses by an error of its own where loads hold blocks."""
        self.say(f"the prefix cache is reset{', running requests too' * running}")
        try:
            self.scheduler.reset_prefix_cache(reset_running_requests=running)
        except RuntimeError as error:
            if "Failed to reset KV cache" not in str(error):
                raise
            self.say("  refused: loads hold blocks")

    # The scheduler's connector.

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond those computed the connector has, None where it cannot tell yet."""
        client = self.by_request[id(request)]
        client.asked += 1
        if client.asked <= client.plan.looked_up_after:
            return None, False
        client.local = computed
        most = request.num_tokens
        if self.groups > 1:
            # Of a prompt that was loaded whole, the last token is computed again; its window may begin in a block that
            # the load was not given. That is the releases' own fault (all that have sliding windows), and not ours.
            most -= 1
            if computed and not build.keeps_all_hits():
                return 0, False
        hit = self.behaviour.hit(client, most)
        if self._foreseen(client) or (self.behaviour.served and self.answers.knows_server_gone()):
            hit = 0
        if not build.serves_several_groups() and hit < request.num_tokens:
            hit -= hit % build.BLOCK  # to 0.17 every token of a loaded block counts as computed
        more = max(0, hit - computed)
        return more, bool(more) and not self.behaviour.loads_in_step

    def ask_for_load(self, request: Any, tables: tuple[list[int], ...], tokens: int) -> None:
        """The scheduler has blocks for what was matched."""
        client = self.by_request[id(request)]
        plan = client.plan
        touches = places(client, tuple(list(table) for table in tables), client.local, client.local + tokens)
        fails = (self.plan.losses or self._goes_on_by_itself()) and client.failures < plan.failing_loads
        client.failures += fails
        client.loaded_before = True
        lost = plan.load_lost and not self.behaviour.loads_in_step
        transfer = self.begin("load", client, touches, plan.load_delay, plan.load_steps, lost)
        transfer.fails, transfer.lost_from = fails, 0 if plan.fails_whole else len(touches) // 2
        if not fails:
            transfer.fate = plan.fate
        self.asked.append(transfer)
        self.say(f"{client} loads [{client.local}, {client.local + tokens}) into {sorted(transfer.blocks)}")

    def _goes_on_by_itself(self) -> bool:
        """Whether a release has a way to go on where a load fails; without `losses`, none fails where it has not."""
        if self.behaviour.loads_in_step:  # what was scheduled ahead runs on it, and several groups have no word for it
            return self.groups == 1 and not self.ahead
        return self.groups == 1 or (build.failures_by_request() and self.plan.reported_by in ("", "id"))

    def _foreseen(self, client: Client) -> bool:
        """Whether no load is to be asked for, since it fails, and the release does not go on, or does so for ever."""
        plan = client.plan
        fails = client.failures < plan.failing_loads or plan.fate or self.plan.outages
        return self.foresees and bool(fails) and (plan.failing_loads == ALWAYS or not self._goes_on_by_itself())

    def take_asked(self) -> list[Transfer]:
        """The loads that the worker is told of with the next step."""
        asked, self.asked = self.asked, []
        return asked

    def begin_sends(self, request: Any, tables: tuple[list[int], ...]) -> bool:
        """A request has ended; whether its connector announces a send of it.

        `store`: ends when all was read, of an aborted load at once. `read`: somebody reads it all, or the lease ends.
        """
        client = self.by_request[id(request)]
        announced = self.behaviour.announces(client.plan, real.status_name(request))
        loading = client.outstanding("load")
        # Of one that ran before it was preempted nobody knows whether it has stored something: that word is lost, not empty.
        if loading and client.plan.empty_send_silent and not request.num_preemptions:
            announced_and_reported = [kind for kind in announced if kind != "store"]
        else:
            announced_and_reported = announced
        for kind in announced_and_reported:
            kept = tuple(list(table) for table in tables)
            empty = loading and not self.behaviour.stores_aborted_loads
            there = 0 if empty else self._computed(client, request, kept)
            unread = kind == "read" and client.plan.send_unread
            unread = unread or (kind == "store" and not client.ran)  # stored is what the model computed
            touches = [] if unread or empty else places(client, kept, 0, there)
            # A store is under way already, a read comes when the other side is ready.
            delay, steps = client.plan.send_delay, client.plan.send_steps
            if kind == "store":
                delay, steps = (0, 1) if loading else (0, client.plan.load_steps)
            parts = client.plan.stores if kind == "store" else 1
            for part in range(parts):
                share = touches[len(touches) * part // parts : len(touches) * (part + 1) // parts]
                transfer = self.begin("send", client, share, delay, steps * (part + 1), client.plan.send_lost)
                transfer.unheard = kind == "store"
                if kind == "read" and client.plan.lease:
                    transfer.lease_ends = self.now + client.plan.lease
                transfer.silent = self.plan.losses and kind == "store" and self.answers.silent(client)
        state = f"announces {len(announced)} send(s)" if announced else "announces nothing"
        self.say(f"{client} has ended in the scheduler ({real.status_name(request)}): the connector {state}")
        return bool(announced)

    def _computed(self, client: Client, request: Any, tables: tuple[list[int], ...]) -> int:
        """How many leading tokens have their KV in the request's blocks, in all groups."""
        loading = client.outstanding("load")  # what is counted then differs between releases
        end: int = len(client.tokens) if loading else min(request.num_computed_tokens, len(client.tokens))
        for group, table in enumerate(tables):
            start = next((index for index, block in enumerate(table) if block), len(table)) * build.BLOCK
            place = self.memory.holds(client, group, table, min(start, end), end)
            end = end if place is None else place
        return end

    def begin(self, kind: str, client: Client, touches: list[Any], delay: int, steps: int, lost: bool) -> Transfer:
        """A transfer is under way from here on, whenever it touches its first slot."""
        begins = self.now + delay
        transfer = Transfer(kind, client, touches, begins, -(-len(touches) // steps) or 1, begins + steps, lost=lost)
        transfer.asked_at = self.now
        transfer.store = self.behaviour.served and bool(self.plan.outages)
        client.transfers.append(transfer)
        self.transfers.append(transfer)
        return transfer

    # The worker.

    def schedule(self) -> Step:
        """Schedule a step, and note the block tables that the worker would be given."""
        scheduled = self.scheduler.schedule()
        self.scheduled += 1
        starts = real.computed_before(scheduled)
        work = []
        output = real.run_model(scheduled)
        for index, name in enumerate(output.req_ids):
            request = self.scheduler.requests[name]
            client = self.by_request[id(request)]
            end = starts[name] + scheduled.num_scheduled_tokens[name]
            if end >= len(client.tokens) + request.max_tokens:
                self.wrong("computed past its end", f"{client} is to compute token {end - 1}")
            tables = tuple(list(table) for table in self.tables(name))
            work.append((client, tables, starts[name], end, end >= request.num_tokens))
            output.sampled_token_ids[index] = self._sampled(client, request, end)
        if work:
            self.say("runs " + ", ".join(f"{each[0]} [{each[2]}, {each[3]})" for each in work))
        in_step = []
        for load in scheduled.kv_connector_metadata.loads if scheduled.kv_connector_metadata else ():
            if self.behaviour.loads_in_step:
                in_step.append(load)
        return Step(scheduled, work, output, in_step, self.scheduled)

    def _sampled(self, client: Client, request: Any, end: int) -> list[int]:
        if end < request.num_tokens:
            return []
        last = client.plan.stops and end - len(client.tokens) + 1 >= client.plan.outputs
        return [build.END_TOKEN if last else OUTPUT]

    def answer(self, step: Step) -> None:
        """The scheduler hears what the worker made of a step."""
        if not step.executed:
            worker.execute(self, step)
        self.aborts(in_step=True)
        output = step.output.kv_connector_output
        lies = [lie for lie in self.plan.lies if lie.step == self.now and worker.survivable(self, lie, step)]
        for lie in lies:
            ids = set(getattr(output, f"finished_{lie.kind}") or ()) | {lie.about}
            setattr(output, f"finished_{lie.kind}", ids)
        if output.finished_recving or output.finished_sending or output.invalid_block_ids:
            reported = [
                f"{kind} {sorted(ids)}" for kind, ids in vars(output).items() if ids and kind != "kv_connector_stats"
            ]
            self.say("told: " + ", ".join(reported) + f"  (lies: {[lie.about for lie in lies]})" * bool(lies))
        for transfer in step.reported:
            transfer.reported = True
        answered = self.scheduler.update_from_output(step.scheduled, step.output)
        for loss in step.losses:
            loss.reported = self.scheduled
        self.hear(answered)

    def hear(self, answered: dict[int, Any]) -> None:
        """Clients get tokens, and learn that their requests have ended."""
        for outputs in answered.values():
            for each in outputs.outputs:
                client = next(c for c in reversed(self.clients) if c.plan.name == each.request_id)
                client.delivered += len(each.new_token_ids)
                if WRONG_OUTPUT in each.new_token_ids:
                    self.wrong("wrong answer", f"{client} got a token that was sampled on lost KV")
                if each.finish_reason is None or client.ended:
                    continue
                client.ended = str(each.finish_reason).rpartition(".")[2].lower()
                self.say(f"{client} has its answer ({client.ended})")
                if client.ended != "error" and client.delivered != client.plan.outputs:
                    self.wrong("wrong answer", f"{client} has {client.delivered} of {client.plan.outputs} tokens")

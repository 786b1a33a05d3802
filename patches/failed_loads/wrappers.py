"""A failed load ends neither the engine nor the request, and no token that was sampled on lost KV is delivered.

Source: vllm#45138, vllm#49250, vllm#45474, vllm#50687, vllm PR#48216, vllm PR#54733, vllm PR#56135.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from . import lmcache, policy
from .losses import Table, block_sizes, spread, tables_given

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
CONFIGURATION = "vllm.config.kv_transfer:KVTransferConfig.__post_init__"
LMCACHE = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector:LMCacheMPConnector"

STATE = "_livepatch_lost_loads"
"""Attribute of a scheduler: its `_Loads`."""

LOST = "_livepatch_load_lost"
"""Attribute of a request whose load was lost, and which is computed here from then on: how many tokens of it the prefix
cache had when the scheduler asked last."""

NOW = -1
"""The table that a request has now, beside those that it was given, by the number of the step."""

DEEPEST = 256
"""More steps than any engine has under way: what is never answered is not kept for ever."""


class _Loads:
    """What is known of one scheduler's steps under way."""

    __slots__ = ("answering", "asks", "steps", "withheld")

    def __init__(self) -> None:
        self.steps: deque[Any] = deque(maxlen=DEEPEST)  # the scheduler outputs of steps that are not answered yet
        self.withheld: dict[int, set[str]] = {}  # whose tokens of a step are not to be delivered, by `id` of its output
        self.answering: Any = None  # the scheduler output whose answer the scheduler acts on, or acted on last
        self.asks = False  # whether two of the connector's methods are wrapped

    def answered(self, output: Any) -> Iterable[str]:
        """Take a step, and whatever was scheduled before it, from those under way; whose tokens of it are withheld."""
        steps = self.steps
        if not (steps and steps[0] is output):  # as in every step but for a few
            if all(step is not output for step in steps):
                return ()
            while steps[0] is not output:
                self.withheld.pop(id(steps.popleft()), None)
        steps.popleft()
        return self.withheld.pop(id(output), ()) if self.withheld else ()

    def withhold(self, name: str, steps: Iterable[Any]) -> None:
        """Deliver no token of these steps to a request."""
        for step in steps:
            if name in step.num_scheduled_tokens:
                self.withheld.setdefault(id(step), set()).add(name)


class _Losses:
    """What a report of failed blocks comes to. Nothing is changed while it is found out."""

    def __init__(self, scheduler: Any, loads: _Loads, reported: set[int]) -> None:
        self.sizes = block_sizes(scheduler)
        requests, manager = scheduler.requests, scheduler.kv_cache_manager
        known = len(manager.block_pool.blocks)
        running = {request.request_id: request for request in scheduler.running}
        tables: dict[tuple[int, str], Table] = {(NOW, name): manager.get_block_ids(name) for name in running}
        # Who loaded in this step, or began on its blocks in one under way, may have lost them since: a window has
        # passed them, it was preempted, or aborted. What it computed on them is in the prefix cache.
        self.under_way = [loads.answering, *loads.steps]
        latest: dict[str, int] = {}
        for number, step in enumerate(self.under_way):
            for name, table in tables_given(step).items() if step is not None else ():
                tables[number, name] = table
                latest[name] = number
        self.blocks, hit = spread({block for block in reported if block < known}, tables, self.sizes)
        self.hit = hit
        names = {name for _, name in hit}
        again = {name for name in names & running.keys() if (NOW, name) not in hit and (latest[name], name) not in hit}
        self.running = [request for name, request in running.items() if name in names - again]
        self.gone = [requests[name] for name in names & requests.keys() if name not in running or name in again]
        self.loading = [
            request
            for request in requests.values()
            if request.status == type(request.status).WAITING_FOR_REMOTE_KVS
            and any(not self.blocks.isdisjoint(blocks) for blocks in manager.get_block_ids(request.request_id))
        ]

    def steps_on_lost_blocks(self, name: str) -> Iterable[Any]:
        """The steps under way in which a request that has gone, or began anew, ran on lost blocks."""
        ran_on_lost = False
        for number, step in enumerate(self.under_way):
            if step is not None and name in tables_given(step):
                ran_on_lost = (number, name) in self.hit
            if number and ran_on_lost:
                yield step


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    """At each target: a wrapper, or a look at its calls."""
    # To 0.16 the policy is `recompute` by default, so that `fail` is an operator's choice.
    recompute = livepatch.options["ON_LOSS"] == "recompute" and livepatch.facts.get("fails_by_default", True)

    def loads_of(scheduler: Any) -> _Loads:
        """The scheduler's record, made when it is first asked for; whoever lost a load is then computed here."""
        loads: _Loads | None = getattr(scheduler, STATE, None)
        if loads is None:
            loads = _Loads()
            setattr(scheduler, STATE, loads)
            if recompute and not livepatch.aside and not policy.is_set(scheduler):
                scheduler.recompute_kv_load_failures = True
        return loads

    def scheduled(scheduler: Any, scheduler_output: Any, *rest: Any, **named: Any) -> None:
        if scheduler.connector is not None and scheduler_output.num_scheduled_tokens:
            loads = loads_of(scheduler)
            if len(loads.steps) == DEEPEST:
                loads.withheld.pop(id(loads.steps[0]), None)
            loads.steps.append(scheduler_output)

    def in_each_step(release: Call, guarded: Call) -> Call:
        def _update_after_schedule(scheduler: Any, scheduler_output: Any) -> Any:
            if scheduler.connector is None:
                return release(scheduler, scheduler_output)
            loads: _Loads | None = scheduler.__dict__.get(STATE)
            if loads is None or len(loads.steps) == DEEPEST or livepatch.aside:
                return guarded(scheduler, scheduler_output)
            if scheduler_output.num_scheduled_tokens:
                loads.steps.append(scheduler_output)
            return release(scheduler, scheduler_output)

        return _update_after_schedule

    def in_each_answer(release: Call, guarded: Call) -> Call:
        def update_from_output(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
            if scheduler.connector is None:
                return release(scheduler, scheduler_output, model_runner_output)
            loads: _Loads | None = scheduler.__dict__.get(STATE)
            transfers = model_runner_output.kv_connector_output
            if (
                loads is None
                or loads.withheld
                or not (loads.steps and loads.steps[0] is scheduler_output)
                or (transfers is not None and getattr(transfers, "failed_recving", None))
            ):
                return guarded(scheduler, scheduler_output, model_runner_output)
            loads.steps.popleft()
            loads.answering = scheduler_output
            return release(scheduler, scheduler_output, model_runner_output)

        return update_from_output

    def asked(original: Call, connector: Any, request: Any, num_computed_tokens: int, *rest: Any, **named: Any) -> Any:
        """Of a request whose load was lost, the connector is asked as if all of it were computed here."""
        if not hasattr(request, LOST):
            return original(request, num_computed_tokens, *rest, **named)
        lmcache.begin_anew(connector, request)
        # A prompt that the prefix cache has whole is something that each connector knows: it lets go of what it holds.
        answer, _ = original(request, request.num_tokens)
        lmcache.begins_at(connector, request.request_id, num_computed_tokens)
        setattr(request, LOST, num_computed_tokens)
        return (None if answer is None else 0), False

    def allocated(original: Call, connector: Any, request: Any, *rest: Any, **named: Any) -> Any:
        """A request whose load was lost is about to run: LMCache counts what is computed of it, whatever it held."""
        result = original(request, *rest, **named)
        if hasattr(request, LOST):
            lmcache.counts(connector, request.request_id, request.num_computed_tokens or getattr(request, LOST))
        return result

    def mark(scheduler: Any, loads: _Loads, requests: list[Any]) -> None:
        if not loads.asks:
            connector = scheduler.connector
            for name, wrapper in (("get_num_new_matched_tokens", asked), ("update_state_after_alloc", allocated)):
                method = getattr(connector, name)
                setattr(connector, name, livepatch.over(method, livepatch.around(method, wrapper, connector)))
            loads.asks = True
        for request in requests:
            setattr(request, LOST, 0)

    def preempt(scheduler: Any, request: Any) -> None:
        """Let a request begin anew, by the means of the release: both model runners know of it by that alone.

        Its steps under way are dropped here; so nothing of them is to be waited for, or to be counted with.
        """
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())
        request.num_output_placeholders = 0
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    def handle(original: Call, scheduler: Any, invalid_block_ids: set[int], *rest: Any, **named: Any) -> Any:
        """Let those begin anew that run on lost blocks. The release sees those that still load."""
        loads = loads_of(scheduler)
        lost = _Losses(scheduler, loads, invalid_block_ids)
        names = {request.request_id for request in (*lost.running, *lost.gone)}
        blocks = scheduler.kv_cache_manager.block_pool.blocks
        found = {block for block in lost.blocks if blocks[block].block_hash is not None}
        if found:
            # From here on nobody finds them; who has them already is among those found.
            scheduler.kv_cache_manager.evict_blocks(found)
        for request in lost.running:
            loads.withhold(request.request_id, loads.steps)
        for request in lost.gone:
            loads.withhold(request.request_id, lost.steps_on_lost_blocks(request.request_id))
        for request in (*lost.running, *lost.gone):
            # To 0.26: the tokens that a reset of the prefix cache has doomed. They are all withheld here.
            if getattr(request, "discard_latest_async_tokens", False):
                request.discard_latest_async_tokens = False
            if getattr(request, "async_tokens_to_discard", 0):
                request.async_tokens_to_discard = 0
        if scheduler.recompute_kv_load_failures:
            mark(scheduler, loads, [*lost.running, *lost.loading, *lost.gone])
            for request in reversed(lost.running):  # each is put before the others that wait
                preempt(scheduler, request)
        several = len(lost.sizes) > 1
        if not several:
            names |= original(invalid_block_ids, *rest, **named)
        elif not scheduler.recompute_kv_load_failures:
            names.update(request.request_id for request in lost.loading)
        else:
            for request in lost.loading:  # in a sliding window's group, less than all may be of no use: see docs
                request.num_computed_tokens = 0
                scheduler.failed_recving_kv_req_ids.add(request.request_id)
        report(scheduler, lost)
        return {name for name in names if not scheduler.requests[name].is_finished()}

    def report(scheduler: Any, lost: _Losses) -> None:
        number = len(lost.running) + len(lost.loading) + len(lost.gone)
        if not number:
            return
        kind = "recomputed" if scheduler.recompute_kv_load_failures else "failed"
        livepatch.tell(kind, f"KV of {number} requests could not be loaded: {kind}", number)

    def answered(scheduler: Any, scheduler_output: Any, model_runner_output: Any, *rest: Any, **named: Any) -> None:
        """Deliver no token that was sampled in a step on lost KV."""
        if scheduler.connector is None:
            return
        loads = loads_of(scheduler)
        for name in loads.answered(scheduler_output):
            withhold(model_runner_output, name)
        transfers = model_runner_output.kv_connector_output
        if transfers is not None and not livepatch.aside:
            failed = getattr(transfers, "failed_recving", None) or ()
            if failed and scheduler.recompute_kv_load_failures:
                known = [scheduler.requests[name] for name in failed if name in scheduler.requests]
                mark(scheduler, loads, known)
        loads.answering = scheduler_output

    def withhold(answer: Any, name: str) -> None:
        """The model runner has sampled nothing for this request: as for a part of a prompt."""
        index = answer.req_id_to_index.get(name)
        if index is None:
            return
        if answer.sampled_token_ids and answer.sampled_token_ids[index]:
            answer.sampled_token_ids[index] = []
            livepatch.count("withheld")
        if answer.pooler_output:
            answer.pooler_output[index] = None
        answer.prompt_logprobs_dict.pop(name, None)

    def load_ended(answer: Any, scheduler: Any, request: Any, *rest: Any, **named: Any) -> None:
        """Keep no blocks free for a request that has given all of its own back, as the scheduler does from 0.23.0 on.

        Else a request before it may not load, however empty the pool is, and the scheduler looks at nobody behind it.
        """
        if not request.num_computed_tokens:
            getattr(scheduler, "_inflight_prefills", set()).discard(request)

    def load_errors(original: Call, connector: Any, *rest: Any, **named: Any) -> Any:
        """To 0.17.1 LMCache's connector says that no load has failed, whatever its worker's adapter knows."""
        reported = original(*rest, **named)
        unreported: set[int] | None = getattr(connector.worker_adapter, "error_block_ids", None)
        if not unreported:  # or the release's own answer has them, from 0.18.1 on
            return reported
        failed = set(unreported)
        unreported.clear()
        return failed

    def made(config: Any, *rest: Any, **named: Any) -> None:
        policy.note(config)

    return {
        CONFIGURATION: livepatch.before(made),
        f"{SCHEDULER}._update_after_schedule": livepatch.shortcut(in_each_step, livepatch.before(scheduled)),
        f"{SCHEDULER}._handle_invalid_blocks": handle,
        # What was sampled on lost KV stays undelivered when the patch stands aside.
        f"{SCHEDULER}.update_from_output": livepatch.shortcut(
            in_each_answer, livepatch.lasting(livepatch.before(answered))
        ),
        f"{SCHEDULER}._update_waiting_for_remote_kv": livepatch.after(load_ended),
        f"{LMCACHE}.get_block_ids_with_load_errors": load_errors,
    }

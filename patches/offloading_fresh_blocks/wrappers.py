"""The offloading scheduler knows of every block that is given anew, and stores only KV that was computed.

Four faults of its bookkeeping. A block whose store is pending may be given to a request for which another child of a
MultiConnector loads: nobody tells the offloading scheduler, so the worker does not wait for the store, which keeps the
newcomer's KV under the old prompt. A request that ended early is stored beyond its KV, or ends the engine. A request
that is preempted and loaded again in one step, by a reset of the prefix cache, ends the engine. To 0.24.0 nobody tells
the offloading scheduler whom such a reset preempts, so their stores may keep the KV of whoever gets their blocks.

Source: vllm#46951, vllm#49118, vllm#54193.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...sitecustomize.kit import attached, leaves

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
MULTI = f"{CONNECTORS}.multi_connector:MultiConnector"
CORE = "vllm.v1.core.sched.scheduler:Scheduler"
SCHEDULER = f"{CONNECTORS}.offloading.scheduler:OffloadingConnectorScheduler"

UNFENCED = "_livepatch_unfenced_stores"
"""Attribute of an offloading scheduler: stores of requests that a reset preempted, until a step waits for them."""


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    def update_state_after_alloc(
        multi: Any, request: Any, blocks: Any, num_external_tokens: int, *rest: Any, **named: Any
    ) -> None:
        """Note a request's blocks with every offloading child, where some child loads into them.

        A request without a load runs in the same step, and the release notes its blocks then.
        """
        if not num_external_tokens:
            return
        fresh = {block.block_id for group in blocks.blocks for block in group if not block.is_null}
        for scheduler in offloading_schedulers(multi):
            note(scheduler, fresh)

    def note(scheduler: Any, blocks: set[int]) -> None:
        """Have the worker wait for the stores that read these blocks, before anybody writes them."""
        stores = {job for block in blocks for job in scheduler._block_id_to_pending_jobs.get(block, ())}
        if stores:
            scheduler._current_batch_jobs_to_flush |= stores
            livepatch.count("awaited_stores", len(stores))
        allocated = getattr(scheduler, "_current_batch_allocated_block_ids", None)
        if allocated is not None:  # from 0.23.0; from 0.26.0 the stores that this step begins are compared with it
            allocated |= blocks

    def counting(release: Call, guarded: Call) -> Call:
        def calc_num_offloadable_tokens(scheduler: Any, req_status: Any, num_computed_tokens: int) -> Any:
            ended = req_status.req.is_finished()
            return (guarded if ended else release)(scheduler, req_status, num_computed_tokens)

        return calc_num_offloadable_tokens if livepatch.facts.get("beyond_computed") else release

    def calc_num_offloadable_tokens(original: Call, scheduler: Any, req_status: Any, *rest: Any, **named: Any) -> int:
        """Of a request that has ended, count the tokens whose KV is in its blocks.

        Its last token was sampled, and never computed. A request that waits for blocks, or for a load, has none that
        the offloading scheduler knows. A preempted one has none at all: what it had may be another's.
        """
        wanted: int = original(req_status, *rest, **named)
        req = req_status.req
        computed: int = min(req.num_computed_tokens, max(req.num_prompt_tokens, req.num_tokens - 1))
        if not all(group.block_ids for group in req_status.group_states):
            computed = 0
        if computed < wanted:
            livepatch.count("not_computed")
        return min(wanted, computed)

    def beginning(release: Call, guarded: Call) -> Call:
        def build_connector_meta(scheduler: Any, scheduler_output: Any) -> Any:
            preempted = scheduler_output.preempted_req_ids
            loads = scheduler._current_batch_load_jobs
            look = (preempted and loads) or UNFENCED in vars(scheduler)
            return (guarded if look else release)(scheduler, scheduler_output)

        return build_connector_meta

    def build_connector_meta(original: Call, scheduler: Any, scheduler_output: Any, *rest: Any, **named: Any) -> Any:
        """Hide the loads that this step begins from the release's flush of what preempted requests have under way.

        It takes each of these for a store. Nothing else asks for a preempted request's jobs in this call. And have the
        worker wait for what a reset left.
        """
        stores = vars(scheduler).pop(UNFENCED, set()) & scheduler._jobs.keys()
        if stores:
            scheduler._current_batch_jobs_to_flush |= stores
            livepatch.count("awaited_stores", len(stores))
        begun = scheduler._current_batch_load_jobs.keys()
        states = [scheduler._req_status.get(name) for name in scheduler_output.preempted_req_ids or ()]
        loading = [(state, state.transfer_jobs & begun) for state in states if state is not None]
        for state, loads in loading:
            state.transfer_jobs -= loads
        try:
            return original(scheduler_output, *rest, **named)
        finally:
            for state, loads in loading:
                state.transfer_jobs |= loads
                if loads:
                    livepatch.count("reloaded", len(loads))

    def reset_prefix_cache(original: Call, core: Any, *rest: Any, **named: Any) -> Any:
        """Note the stores of requests that were preempted. The release's own set of stores to wait for must be empty
        where the connector's cache is reset, so they are kept apart until the next step.
        """
        running = list(core.running) if livepatch.facts.get("resets_unseen") and core.connector is not None else []
        try:
            return original(*rest, **named)
        finally:
            left = {request.request_id for request in running}.difference(one.request_id for one in core.running)
            for scheduler in offloading_schedulers(core.connector) if left else ():
                stores = unfenced(scheduler, left)
                if stores:
                    attached(scheduler, UNFENCED, set[int]).update(stores)

    def unfenced(scheduler: Any, names: set[str]) -> set[int]:
        states = (scheduler._req_status.get(name) for name in names)
        jobs = {job for state in states if state is not None for job in state.transfer_jobs}
        return {job for job in jobs if job in scheduler._jobs and scheduler._jobs[job].is_store}

    return {
        f"{CORE}.reset_prefix_cache": reset_prefix_cache,
        f"{MULTI}.update_state_after_alloc": livepatch.before(update_state_after_alloc),
        f"{SCHEDULER}._calc_num_offloadable_tokens": livepatch.shortcut(counting, calc_num_offloadable_tokens),
        f"{SCHEDULER}.build_connector_meta": livepatch.shortcut(beginning, build_connector_meta),
    }


def offloading_schedulers(connector: Any) -> Iterator[Any]:
    """Yield the scheduler's part of a connector that is an OffloadingConnector, or of a MultiConnector's children."""
    halves = (getattr(leaf, "connector_scheduler", None) for leaf in leaves(connector))
    return (half for half in halves if hasattr(half, "_block_id_to_pending_jobs"))

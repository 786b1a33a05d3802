"""What was read of prefill's blocks counts only if prefill still held them for it when the read had ended.

Source: vllm#52234, vllm PR#47021. The protocol, and why it suffices: docs/nixl.md.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .lease_table import LeaseTable, name_with
from .reads import Guard, Reading

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1."
BASES = (
    _V1 + "nixl_connector:NixlConnectorWorker",  # to 0.19.1
    _V1 + "nixl.worker:NixlConnectorWorker",  # 0.20.2 to 0.23.0
    _V1 + "nixl.base_worker:NixlBaseConnectorWorker",
)
PULLS = (*BASES[:2], _V1 + "nixl.pull_worker:NixlPullConnectorWorker")
PACKAGES = ("nixl", "rixl", "nixl_rocm")  # that a release may take its agents from

_GUARD = "_livepatch_lease_guard"
"""Attribute of a worker's agent: its Guard."""


def guard_of(worker: Any) -> Guard | None:
    return getattr(worker.nixl_wrapper, _GUARD, None)


def wrappers(livepatch: PatchContext) -> Mapping[str, Call]:
    """The wrapper of each target."""
    # How a failed load names the blocks of a model with several KV groups, which these releases leave out: a set or a
    # queue. From 0.30.0 the request itself is named.
    hybrid: str = livepatch.facts.get("hybrid", "")
    made: list[LeaseTable] = []
    making: list[list[tuple[Any, LeaseTable]]] = []  # of the worker that is being made: its agent, with its table
    taken: list[type] = []  # agents' classes with our methods

    # The agent

    def take(agent_class: Any) -> None:
        """Let a class's agents be guarded, once. Those of others, without a Guard, go their way."""
        if agent_class is None or agent_class in taken:
            return
        taken.append(agent_class)
        agent_class.__init__ = livepatch.around(agent_class.__init__, create)
        for name in ("add_remote_agent", "remove_remote_agent", "prep_xfer_dlist", "release_dlist_handle"):
            setattr(agent_class, name, livepatch.around(getattr(agent_class, name), passing_to(name)))
        for name in ("make_prepped_xfer", "check_xfer_state", "release_xfer_handle"):
            wrapper = passing_to(name)
            if name != "make_prepped_xfer":  # reads that were begun are checked to their end
                livepatch.lasting(wrapper)
            setattr(agent_class, name, livepatch.around(getattr(agent_class, name), wrapper))

    def passing_to(name: str) -> Call:
        def method(original: Call, agent: Any, *rest: Any, **named: Any) -> Any:
            guard = getattr(agent, _GUARD, None)
            if guard is None:
                return original(agent, *rest, **named)
            return getattr(guard, name)(original, agent, *rest, **named)

        return method

    def create(original: Call, agent: Any, agent_name: str, *rest: Any, **named: Any) -> Any:
        """A worker's agent has a lease table, and its name says where. It is made as (name, configuration)."""
        if not making:
            return original(agent, agent_name, *rest, **named)
        table = LeaseTable()
        original(agent, name_with(agent_name, table), *rest, **named)
        making[-1].append((agent, table))
        return None

    def guarded(agent: Any, table: LeaseTable) -> None:
        try:
            agent.register_memory([(table.address, table.size, 0, "")], "DRAM")
        except Exception as error:  # others find that out when they shake hands
            livepatch.count("unguarded")
            livepatch.say("unguarded", f"NIXL does not take the memory for leases, nothing is checked: {error}")
            return
        made.append(table)
        setattr(agent, _GUARD, Guard(livepatch, table))

    def begin(original: Call, worker: Any, *rest: Any, **named: Any) -> Any:
        """The worker makes its agent, and from 0.33.0 with sleep mode only then what the agent keeps memory with."""
        for package in PACKAGES:
            take(getattr(sys.modules.get(f"{package}._api"), "nixl_agent", None))
        agents: list[tuple[Any, LeaseTable]] = []
        making.append(agents)
        try:
            result = original(*rest, **named)
        finally:
            making.pop()
        for agent, table in agents:
            guarded(agent, table)
        return result

    # Prefill: what is in the lease table

    def load(original: Call, worker: Any, metadata: Any, *rest: Any, **named: Any) -> Any:
        """A request is kept for its reader from the step that begins to compute it, so before anybody can read it."""
        result = original(metadata, *rest, **named)
        guard = guard_of(worker)
        if guard is not None:
            for request_id in metadata.reqs_in_batch:
                if request_id in worker._reqs_to_process and not guard.table.publish(request_id):
                    livepatch.count("not_vouched")
                    livepatch.say("not_vouched", f"request {request_id}: its id's last lease ended unread")
            for request_id in metadata.reqs_not_processed:
                guard.table.withdraw(request_id)
        return result

    def delivered(original: Call, worker: Any, *rest: Any, **named: Any) -> Any:
        """All of a request's readers have reported that they have read it."""
        result = original(*rest, **named)
        guard = guard_of(worker)
        if guard is not None:
            for request_id in result:
                guard.table.withdraw(request_id)
        return result

    def finished(original: Call, worker: Any, *rest: Any, **named: Any) -> Any:
        """Of what the scheduler is about to be allowed to free, the rest are leases that have ended.

        And those whose time is over although the release does not say so yet: 0.22.1 to 0.30.0 looks at the oldest
        only, and `kv-block-reaper` may free the others' blocks meanwhile.
        """
        result = original(*rest, **named)
        guard = guard_of(worker)
        if guard is not None:
            now = time.perf_counter()
            ended = [request_id for request_id, until in worker._reqs_to_send.items() if now >= until]
            ended += result[0] if isinstance(result, tuple) else result.finished_sending
            for request_id in ended:
                if guard.table.withdraw(request_id, unread=True):
                    livepatch.count("lease_ended")
        return result

    def withdraw_all() -> None:
        for table in made:
            table.stand_aside()

    # Decode

    def read(original: Call, worker: Any, *rest: Any, request_id: str, remote_request_id: str, **named: Any) -> Any:
        """In every release the worker names its arguments, of which the first are others from release to release."""
        named.update(request_id=request_id, remote_request_id=remote_request_id)
        guard = guard_of(worker)
        if guard is None:
            return original(*rest, **named)
        guard.reading = Reading(remote_request_id, request_id, functools.partial(mark, worker, request_id))
        try:
            return original(*rest, **named)
        finally:
            guard.reading = None

    def mark(worker: Any, request_id: str) -> None:
        """Name the blocks of a failed load where the release does not, and would compute on them."""
        loading = worker._recving_metadata.get(request_id)  # None where the release has reported its end already
        if hybrid and worker._is_hma_required and loading is not None:
            blocks = {block for group in loading.local_block_ids for block in group}
            if hybrid == "queue":
                worker._invalid_block_ids.put(blocks)
            else:
                worker._invalid_block_ids.update(blocks)

    livepatch.on_stand_aside(withdraw_all)
    found: dict[str, Call] = {}
    for base in BASES:
        found |= {f"{base}.__init__": begin, f"{base}.get_finished": finished}
    found[f"{BASES[-1]}.get_transfer_results"] = finished  # from 0.30.0, which get_finished then calls
    for pull in PULLS:
        found |= {f"{pull}.start_load_kv": load, f"{pull}._get_new_notifs": delivered, f"{pull}._read_blocks": read}
    return found

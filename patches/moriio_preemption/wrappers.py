"""MoRI-IO's scheduler half answers only for KV that will be transferred, and only where the parameters can be used.

A decode engine's connector promises the KV of its prompt for every request: also for one that was preempted, whose
transfer was asked for once and is not asked for again, and for one that no router sent. Here the connector promises it
only while the transfer is still to be asked for. The rest is computed from the prompt.

Source: vllm PR#53250.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...sitecustomize.kit import leaves
from . import parameters as given

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

MORIIO = "vllm.distributed.kv_transfer.kv_connector.v1.moriio"
HALF = f"{MORIIO}.moriio_connector:MoRIIOConnectorScheduler"
CONNECTOR = "MoRIIOConnector"
UNREAD = {"remote_block_ids": None, "remote_engine_id": None, "remote_handshake_port": 1}
"""What a decode engine that is written to does not read of its request, with values that the release's reader takes."""


def halves_of(connector: Any) -> Iterator[Any]:
    """Yield the scheduler half of a MoRI-IO connector; of a MultiConnector, of those of its children that are one."""
    for leaf in leaves(connector):
        if any(kind.__name__ == CONNECTOR for kind in type(leaf).__mro__):
            yield leaf.connector_scheduler


def asks(parameters: Any, what: str) -> bool:
    return isinstance(parameters, dict) and bool(parameters.get(what))


def wrappers(livepatch: PatchContext) -> Mapping[str, Call]:
    in_groups: bool = livepatch.facts.get("in_groups", False)
    names_transfers: bool = livepatch.facts.get("names_transfers", False)
    """Whether the release makes a transfer's id where the router sent none."""
    indexes_all: bool = livepatch.facts.get("indexes_all", False)
    saves_for_reads: bool = livepatch.facts.get("saves_for_reads", False)
    """Whether a prefill engine that is read from looks for its peer's address."""

    # What comes in

    def add_request(original: Call, scheduler: Any, request: Any, *rest: Any, **named: Any) -> Any:
        found = request.kv_transfer_params
        if found is not None and scheduler.connector is not None:
            for half in halves_of(scheduler.connector):
                problem = problem_of(half, scheduler.block_size, request, found)
                if problem is not None:
                    refuse(request, problem)
                    break
        return original(request, *rest, **named)

    def refuse(request: Any, problem: str) -> None:
        found = request.kv_transfer_params
        request.kv_transfer_params = given.without_ours(found) if isinstance(found, dict) else None
        livepatch.tell(
            "refused",
            f"request {request.request_id}: its kv_transfer_params cannot be used, {problem}: "
            "the prompt is computed here",
        )

    def problem_of(half: Any, block_size: int, request: Any, found: Any) -> str | None:
        """Return why a connector cannot do what the parameters ask for, None where it can or is asked for nothing."""
        if not isinstance(found, dict):
            return f"they are {given.described(found)}"
        load, send = found.get("do_remote_prefill"), found.get("do_remote_decode")
        if not load and not send:
            return None
        if load and send:
            return "both do_remote_prefill and do_remote_decode are set"
        if load and half.is_producer:
            return "do_remote_prefill is set, and this engine only prefills"
        if send and not half.is_producer:
            return "do_remote_decode is set, and this engine only decodes"
        problem = given.odd_field(found, names_transfers) or problem_of_peer(half, request, found)
        return problem or problem_of_blocks(half, block_size, request.num_prompt_tokens, found)

    def problem_of_peer(half: Any, request: Any, found: Mapping[str, Any]) -> str | None:
        """Return why the release's own reader of parameters finds no peer in them, or a peer with an odd address."""
        reads = half.mode.name == "READ"
        whole = {"transfer_id": "", **found} if names_transfers else dict(found)
        if half.is_producer and reads and not saves_for_reads:
            return None if "transfer_id" in whole else "transfer_id is missing"
        if not half.is_producer and not reads:
            whole = {**UNREAD, **whole}
        metadata = sys.modules[f"{MORIIO}.moriio_common"].MoRIIOConnectorMetadata()
        try:
            metadata.add_new_req(request.request_id, [], whole, write_mode=half.is_producer)
        except Exception as error:
            return f"{type(error).__name__}: {given.described(str(error))}"
        (read,) = (metadata.reqs_to_save if half.is_producer else metadata.reqs_to_recv).values()
        return given.odd_peer(read, found.get("remote_dp_rank", 0) + half.tp_size, reads and not half.is_producer)

    def problem_of_blocks(half: Any, block_size: int, tokens: int, found: Mapping[str, Any]) -> str | None:
        """Return why a decode engine cannot read the blocks of so many tokens, or not from the engine that is named."""
        if half.is_producer or half.mode.name != "READ":
            return None
        if not given.text(found.get("remote_engine_id")):
            return f"remote_engine_id is {given.described(found.get('remote_engine_id'))}"
        return given.odd_blocks(found.get("remote_block_ids"), *needed_blocks(half, block_size, tokens))

    def needed_blocks(half: Any, block_size: int, tokens: int) -> tuple[list[int], bool]:
        """Return how many blocks each KV cache group takes at least, and whether the release names blocks by group."""
        if not in_groups:
            return [-(-tokens // block_size)], False
        if getattr(half, "_has_mamba", False):  # of a state there are few blocks, of another size
            return [1, *(0 for _ in half._mamba_group_ids)], True
        whole = (tokens - 1) // block_size  # the last token is computed here
        return [min(whole, window) if window else whole for window in half.blocks_per_sw], True

    # What the connector answers and plans

    def matched(original: Call, half: Any, request: Any, *rest: Any, **named: Any) -> Any:
        """Answer 0 where no transfer will be asked for. The scheduler asks only of requests with nothing computed."""
        if half.is_producer:
            # What was noted before a preemption names blocks that are others' now.
            half._reqs_need_pending_save.pop(request.request_id, None)
            return original(request, *rest, **named)
        tokens, later = original(request, *rest, **named)
        if tokens <= 0:
            return 0, False
        if asks(request.kv_transfer_params, "do_remote_prefill"):
            return tokens, later
        if request.num_preemptions:
            livepatch.count("computed_again")
        else:
            livepatch.count("computed_here")
        return 0, False

    def allocated(original: Call, half: Any, request: Any, *rest: Any, **named: Any) -> Any:
        """Leave requests alone that ask for no transfer: some releases index what only others have."""
        found = request.kv_transfer_params
        if asks(found, "do_remote_prefill") or asks(found, "do_remote_decode"):
            return original(request, *rest, **named)
        return None

    def planned(original: Call, half: Any, scheduler_output: Any, *rest: Any, **named: Any) -> Any:
        """Show the release, in write mode, only what it has noted before: it looks every scheduled request up."""
        if not indexes_all or half.mode.name != "WRITE":
            return original(scheduler_output, *rest, **named)
        return original(noted_only(half, scheduler_output), *rest, **named)

    def noted_only(half: Any, output: Any) -> Any:
        """Return a step's plan without new requests, which no worker reads in write mode, and without unknown ones."""
        cached = copy.copy(output.scheduled_cached_reqs)
        known = [at for at, name in enumerate(cached.req_ids) if name in half._reqs_need_pending_save]
        cached.new_block_ids = [cached.new_block_ids[at] for at in known]
        cached.req_ids = [cached.req_ids[at] for at in known]
        seen = copy.copy(output)
        seen.scheduled_new_reqs, seen.scheduled_cached_reqs = [], cached
        return seen

    return {
        "vllm.v1.core.sched.scheduler:Scheduler.add_request": add_request,
        f"{HALF}.get_num_new_matched_tokens": livepatch.lasting(matched),
        f"{HALF}.update_state_after_alloc": livepatch.lasting(allocated),
        f"{HALF}.build_connector_meta": livepatch.lasting(planned),
    }

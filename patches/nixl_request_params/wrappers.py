"""Takes transfer parameters that no connector can use off a request as it comes in: its prompt is computed here.

Anybody who reaches an engine's API sends `kv_transfer_params`. The connectors index them, assert on them, and wait for
what they name: one request ends the engine, others hold its blocks for ever.

Source: vllm PR#56585 (open), vllm#52234; LMCache's part is reported nowhere. Threats: docs/security.md.
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

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
NIXL_PUSH = "NixlPushConnector"
NIXL = ("NixlConnector", "NixlPullConnector", NIXL_PUSH)
MOONCAKE = "MooncakeConnector"
PARAMETERS = "kv_transfer_params"
LMCACHE = "LMCacheMPConnector"
OFFLOADING = f"{CONNECTORS}.offloading.scheduler:OffloadingConnectorScheduler"
P2P = "P2PSecondaryTierManager"
P2P_MODULE = "vllm.v1.kv_offload.tiering.p2p.manager"
HOSTS = "LIVEPATCH_NIXL_REQUEST_PARAMS_HOSTS"
UNUSABLE = (AssertionError, LookupError, TypeError, ValueError, ArithmeticError, NotImplementedError)
"""What a worker raises at numbers of blocks that do not fit: nothing is read yet."""


def kinds_of(connector: Any) -> Iterator[tuple[str, Any]]:
    """Yield each connector of prefill and decode, by its class's name in vLLM; of a MultiConnector, its children.

    A vendor's scheduler half reads fields of its own: vllm-ascend's MooncakeConnector, which has vLLM's name, knows no
    `transfer_id`.
    """
    for leaf in leaves(connector):
        if type(getattr(leaf, "connector_scheduler", None)).__module__.startswith(f"{CONNECTORS}."):
            names = {kind.__name__ for kind in type(leaf).__mro__}
            found = next((name for name in (*NIXL[1:], NIXL[0], MOONCAKE) if name in names), None)
            if found is not None:
                yield found, leaf


def has_peers(leaf: Any) -> bool:
    """Return whether a connector is an OffloadingConnector with a P2P tier."""
    manager = getattr(getattr(leaf, "connector_scheduler", None), "manager", None)
    tiers = getattr(manager, "secondary_tiers", None)
    return isinstance(tiers, list) and any(type(tier).__name__ == P2P for tier in tiers)


def is_lmcache(leaf: Any) -> bool:
    return any(kind.__name__ == LMCACHE for kind in type(leaf).__mro__)


def only(connector: Any, role: str) -> bool:
    """Return whether a Mooncake engine is a `producer`, which only prefills, or a `consumer`, which only decodes."""
    half = connector.connector_scheduler
    return bool(getattr(half, f"is_kv_{role}", getattr(half, "kv_role", None) == f"kv_{role}"))


def wrappers(livepatch: PatchContext) -> Mapping[str, Call]:
    mooncake = given.MOONCAKE_DIRECT if livepatch.facts.get("mooncake_direct") else given.MOONCAKE
    peers = given.PEERS_BEFORE if livepatch.facts.get("peers_before") else given.PEERS
    hosts = frozenset(host.strip() for host in livepatch.options["HOSTS"].split(",") if host.strip())

    def problem_of_load(found: Mapping[str, Any], kind: str, connector: Any, loads: bool = True) -> str | None:
        """Return why a connector cannot load what the parameters name, or, where another loads it, cannot read them."""
        if kind == MOONCAKE:
            if only(connector, "producer"):
                return "do_remote_prefill is set, and this engine only prefills"
            checks = mooncake
        else:
            checks = given.PUSH if kind == NIXL_PUSH else given.PULL
        if not loads:
            checks = {name: given.optional(check) for name, check in checks.items()}
        problem = given.missing(found, checks)
        if problem is None and hosts:
            url = found.get("remote_bootstrap_addr") if checks.keys() == given.MOONCAKE.keys() else None
            host = found.get("remote_host") if url is None else given.host_of(url)
            if host not in hosts and (loads or host is not None):
                return f"the host {given.described(host)} is not one of {HOSTS}"
        return problem

    def problem_of_send(found: Mapping[str, Any], kind: str, connector: Any) -> str | None:
        """Return why a connector cannot keep the KV of this request for another engine."""
        if kind != MOONCAKE:
            unread = found.get("do_remote_prefill") and getattr(connector.connector_scheduler, "use_host_buffer", False)
            return "do_remote_prefill and do_remote_decode are set, and host memory is between" if unread else None
        if only(connector, "consumer"):
            return "do_remote_decode is set, and this engine only decodes"
        transfer = found.get("transfer_id")
        return None if not transfer or given.name(transfer) else f"transfer_id is {given.described(transfer)}"

    def refuse(request: Any, problem: str, left: dict[str, Any] | None, counter: str, follows: str) -> None:
        request.kv_transfer_params = left
        livepatch.tell(
            counter, f"request {request.request_id}: its kv_transfer_params cannot be used, {problem}: {follows}"
        )

    def add_request(original: Call, scheduler: Any, request: Any, *rest: Any, **named: Any) -> Any:
        found = request.kv_transfer_params
        if found is not None and scheduler.connector is not None:
            check(request, found, scheduler.connector)
        return original(request, *rest, **named)

    def check(request: Any, found: Any, connector: Any) -> None:
        computed_here = "the prompt is computed here"
        if not isinstance(found, dict):
            refuse(request, f"they are {given.described(found)}", None, "refused", computed_here)
            arguments = getattr(request.sampling_params, "extra_args", None)
            if arguments and arguments.get(PARAMETERS) is found:  # some connectors read them there
                request.sampling_params.extra_args = {**arguments, PARAMETERS: None}
            return
        for leaf in leaves(connector):
            check_of_lmcache(request, found, leaf)
            check_of_peers(request, found, leaf)
        load, send = found.get("do_remote_prefill"), found.get("do_remote_decode")
        for number, (kind, one) in enumerate(kinds_of(connector)):
            for mark in given.MARKS:
                found.pop(mark, None)
            problem = None
            if load:  # the first one loads, and takes the mark away before the others look
                problem = problem_of_load(found, kind, one, loads=number == 0)
            if send and problem is None:
                problem = problem_of_send(found, kind, one)
            if problem is not None:
                refuse(request, problem, given.without_ours(found), "refused", computed_here)
                return
            if send and not load and kind in NIXL and kind != NIXL_PUSH and found.get("remote_block_ids"):
                unread = problem_of_return(found, one)
                if unread is not None:
                    left = given.without_ours(found, tuple(name for name in given.OURS if name.startswith("remote_")))
                    refuse(request, unread, left, "refused_return", "what another engine has of it is computed here")
                    return

    def check_of_lmcache(request: Any, found: dict[str, Any], leaf: Any) -> None:
        """Leave out a limit that is no number."""
        if is_lmcache(leaf) and not given.limit(found.get(given.LIMIT)):
            problem = f"{given.LIMIT} is {given.described(found.pop(given.LIMIT))}"
            refuse(request, problem, found, "refused", "it is left out")

    def before_the_end(scheduler: Any, request: Any, *rest: Any, **named: Any) -> None:
        """Ask LMCache's connector for no statistics of a request that it has not looked at: it asserts that it has."""
        found = request.kv_transfer_params
        if not found or scheduler.connector is None or given.STATISTICS.isdisjoint(found):
            return
        for leaf in leaves(scheduler.connector):
            if is_lmcache(leaf) and request.request_id not in getattr(leaf, "request_trackers", ()):
                request.kv_transfer_params = {name: found[name] for name in found if name not in given.STATISTICS}
                livepatch.count("no_statistics")
                return

    def check_of_peers(request: Any, found: dict[str, Any], leaf: Any) -> None:
        """Leave out another engine that the OffloadingConnector's P2P tier cannot read, or must not load from."""
        if not has_peers(leaf):
            return
        for peer in peers:
            served = peer in given.PEERS_TO_SERVE
            problem = given.odd_peer(found.get(peer), served)
            if problem is None and hosts and not served and found.get(peer):
                host = found[peer].get("remote_host")
                if host and host not in hosts:
                    problem = f"has the host {given.described(host)}, which is not one of {HOSTS}"
            if problem is not None:
                del found[peer]
                refuse(request, f"{peer} {problem}", found, "refused", "it is left out")

    def problem_of_return(found: Mapping[str, Any], connector: Any) -> str | None:
        """Return why prefill cannot read back what decode has computed of an earlier turn."""
        half = connector.connector_scheduler
        if getattr(half, "use_host_buffer", False) or not getattr(half, "is_bidirectional_kv_xfer_enabled", False):
            return "they name KV to read back, which is not enabled here"
        return problem_of_load(found, NIXL[0], connector)

    def _build_partial_tail_store_jobs(
        original: Call, scheduler: Any, scheduler_output: Any, *rest: Any, **named: Any
    ) -> Any:
        return original(within_limits(scheduler, scheduler_output), *rest, **named)

    def within_limits(scheduler: Any, output: Any) -> Any:
        """Leave out ends of prompts that are beyond what their clients let be stored: the release asserts on these."""
        state = getattr(output, "kv_connector_block_state", None)  # from 0.29.0
        ends = getattr(output, "partial_tail_offloads", None) if state is None else state.boundary_state_offloads
        if not ends:
            return output
        kept = {name: within_limit(scheduler, name, of) for name, of in ends.items()}
        left_out = sum(map(len, ends.values())) - sum(map(len, kept.values()))
        if not left_out:
            return output
        livepatch.count("beyond_limit", left_out)
        output, kept = copy.copy(output), {name: of for name, of in kept.items() if of}
        if state is None:
            output.partial_tail_offloads = kept
        else:
            output.kv_connector_block_state = copy.copy(state)
            output.kv_connector_block_state.boundary_state_offloads = kept
        return output

    def within_limit(scheduler: Any, name: str, ends: list[Any]) -> list[Any]:
        status = scheduler._req_status.get(name)
        limit = None if status is None else status.max_offload_tokens
        return [end for end in ends if end[2] <= limit] if limit else ends

    def submit_load(original: Call, tier: Any, job_metadata: Any, *rest: Any, **named: Any) -> Any:
        """Fail a load by an id that another request asks by as well: the release asserts that this one has asked."""
        if peers is given.PEERS_BEFORE:  # which do not ask
            return original(job_metadata, *rest, **named)
        module = sys.modules[type(tier).__module__]
        source = job_metadata.req_context.get_state(module.P2PSourceInfo)
        session = None if source is None else tier._sessions.get(source.peer_id)
        asked = None if session is None else session._client._requests.get(source.kv_request_id)
        if asked is None or not asked.probed or all(asked.probes.get(key) is True for key in job_metadata.keys):
            return original(job_metadata, *rest, **named)
        name = given.described(source.kv_request_id)
        livepatch.tell("shared_id", f"two requests have the kv_request_id {name}: what one would load is computed here")
        tier._failed_req_ids.add(source.kv_request_id)
        tier._finished_jobs.append(module.JobResult(job_id=job_metadata.job_id, success=False))
        return None

    def _read_blocks_for_req(original: Call, worker: Any, req_id: str, *rest: Any, **named: Any) -> Any:
        try:
            return original(req_id, *rest, **named)
        except UNUSABLE as error:
            if worker._recving_transfers.get(req_id):  # a read of another rank's part is under way
                raise
            livepatch.tell(
                "unreadable",
                f"request {req_id}: the blocks that its kv_transfer_params name do not fit its prompt "
                f"({type(error).__name__}): its load has failed",
            )
            fail(worker, req_id)
            return None

    def fail(worker: Any, request_id: str) -> None:
        """Report a load as failed, with its blocks, in the release's own way. Nothing of it was begun."""
        if hasattr(worker, "_recv_failures"):
            worker._failed_recv_reqs.put(request_id)
        elif hasattr(worker._failed_recv_reqs, "put"):
            worker._handle_failed_transfer(request_id, None)
        else:
            meta = worker._recving_metadata.get(request_id)
            local = meta.local_block_ids if meta is not None else []
            if local and type(local[0]) in (list, tuple):
                local = [] if worker._is_hma_required else local[0]
            worker._invalid_block_ids.update(local)
            worker._failed_recv_reqs.add(request_id)

    return {
        "vllm.v1.core.sched.scheduler:Scheduler.add_request": add_request,
        "vllm.v1.core.sched.scheduler:Scheduler._connector_finished": livepatch.before(before_the_end),  # type: ignore[dict-item]
        f"{OFFLOADING}._build_partial_tail_store_jobs": _build_partial_tail_store_jobs,
        f"{P2P_MODULE}:{P2P}.submit_load": submit_load,
        f"{CONNECTORS}.nixl_connector:NixlConnectorWorker._read_blocks_for_req": _read_blocks_for_req,
        f"{CONNECTORS}.nixl.worker:NixlConnectorWorker._read_blocks_for_req": _read_blocks_for_req,
        f"{CONNECTORS}.nixl.pull_worker:NixlPullConnectorWorker._read_blocks_for_req": _read_blocks_for_req,
    }

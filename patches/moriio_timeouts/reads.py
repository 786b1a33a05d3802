"""Read mode, on the decode side: a request runs once its KV is there, and what was not read is reported as failed.
And, for both sides, whose blocks are kept when their request has finished.

To 0.22.1 the connector answers that the KV is there at once, begins to read it in the step that computes on it, and
waits for nothing. Here it answers that the KV comes later. What the scheduler does for such loads is right already: the
request waits in WAITING_FOR_REMOTE_KVS, its blocks stay its own until the worker says that the read has ended, also
when its client goes meanwhile, and no token is sampled on what is reported as failed.

Scheduler and workers are other processes, so one side cannot know that the patch stood aside on the other. All that the
other side relies on goes on: what was asked for is reported, and where the patch stood aside nothing is read any more,
so that prompts are computed here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_connector"
CONNECTOR = f"{MODULE}:MoRIIOConnector"
SCHEDULER = f"{MODULE}:MoRIIOConnectorScheduler"
WORKER = f"{MODULE}:MoRIIOConnectorWorker"

Connect = Callable[[Any, Mapping[str, Any]], Mapping[str, tuple[str, str, str]]]
"""Shakes hands for a worker's requests; those whose peer did not: kind, peer, what to say."""


class Read:
    """One request's KV on its way."""

    __slots__ = ("blocks", "broken", "come", "overdue", "peer", "since")

    def __init__(self, blocks: Sequence[int], peer: str) -> None:
        self.blocks = list(blocks)
        self.peer = peer
        self.since = time.monotonic()
        self.broken = ""  # why it can come to nothing any more, while what was begun of it may still be under way
        self.come = 0  # how many of its first transfers have succeeded: no step looks at these again
        self.overdue = False  # logged

    def left(self, statuses: Sequence[Any]) -> Sequence[Any]:
        """Return its transfers from the first one on that has not succeeded. A step looks at few, of many layers."""
        while self.come < len(statuses) and statuses[self.come].Succeeded():
            self.come += 1
        return statuses[self.come :]


class Reads:
    """One decode worker's reads, from the step that begins them to the step that reports their end."""

    def __init__(self) -> None:
        self.under_way: dict[str, Read] = {}
        self.ended: set[str] = set()
        self.failed: set[int] = set()  # blocks
        self.finishing: set[str] = set()  # requests that were read for, until they have finished

    def take_ended(self) -> set[str]:
        ended, self.ended = self.ended, set()
        return ended

    def take_failed(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed


def in_progress(status: Any) -> bool:
    """Whether a transfer may still read or write."""
    return not (status.Succeeded() or status.Failed())


def wait_each(statuses: Sequence[Any]) -> None:
    """Some releases of mori complete a transfer between the GPUs of one machine only within `Wait`."""
    for status in statuses:
        status.Wait()


def wait_aside(statuses: Sequence[Any]) -> None:
    threading.Thread(target=wait_each, args=(statuses,), name="livepatch-moriio-wait", daemon=True).start()


def peer_of(meta: Any) -> str:
    """Where a request's peer shakes hands: what the release knows that peer by."""
    return f"{meta.remote_host}:{meta.remote_handshake_port}"


def reads_here(side: Any) -> bool:
    """Whether a connector's scheduler or worker side is that of a decode engine that reads."""
    return side is not None and not side.is_producer and side.mode.name == "READ"


def reads_of(worker: Any) -> Reads:
    reads: Reads = vars(worker).setdefault("_livepatch_reads", Reads())
    return reads


def wrappers(livepatch: PatchContext, connect: Connect) -> Mapping[str, Callable[..., Any]]:
    """The wrapper of each target."""
    transfer_seconds: float = livepatch.options["TRANSFER_SECONDS"]
    # The parameters without which the release's scheduler side asks for no read.
    needed: Sequence[str] = livepatch.facts.get("read_needs", ("remote_engine_id",))
    # To 0.15 a finished request's blocks are kept only where the connector asks for it, and come back by a send's end.
    kept_as_sends: bool = livepatch.facts.get("reads_kept_as_sends", False)

    # The scheduler's side

    def matched_tokens(original: Callable[..., Any], side: Any, request: Any, *rest: Any, **named: Any) -> Any:
        """The KV comes later; where nothing will be read - again, after a preemption - nothing is there."""
        tokens, later = original(request, *rest, **named)
        if side.is_producer or later:
            return tokens, later
        if livepatch.aside:
            return 0, False
        try:
            comes = tokens > 0 and will_be_read(request)
        except Exception as error:  # the release's answer would have it run on what is not there
            livepatch.stand_aside(f"{SCHEDULER}.get_num_new_matched_tokens", error)
            comes = False
        return (tokens, True) if comes else (0, False)

    def will_be_read(request: Any) -> bool:
        parameters = request.kv_transfer_params or {}
        asked = parameters.get("do_remote_prefill") and parameters.get("remote_block_ids")
        return bool(asked) and all(name in parameters for name in needed)

    def allocated(
        original: Callable[..., Any],
        side: Any,
        request: Any,
        blocks: Any,
        num_external_tokens: int,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """Read only what is not here yet, into the blocks that are meant.

        The release reads into the peer's block numbers where it has fewer blocks than the peer.
        """
        result = original(request, blocks, num_external_tokens, *rest, **named)
        if reads_here(side) and request.request_id in side._reqs_need_recv:
            try:
                meant = only_missing(side, request, blocks, num_external_tokens)
            except Exception as error:  # nothing is read: a request that waits is better than one that is wrong
                livepatch.stand_aside(f"{SCHEDULER}.update_state_after_alloc", error)
                del side._reqs_need_recv[request.request_id]
            else:
                side._reqs_need_recv[request.request_id] = (request, meant)
        return result

    def only_missing(side: Any, request: Any, blocks: Any, external: int) -> list[int]:
        """The blocks to read into; the request's parameters name the peer's blocks for them, one for one."""
        here = (len(request.prompt_token_ids) - 1 - external) // side.block_size
        meant = list(blocks.get_block_ids()[0])[here:] if external else []
        parameters = request.kv_transfer_params
        parameters["remote_block_ids"] = list(parameters["remote_block_ids"])[here : here + len(meant)]
        if meant and kept_as_sends:
            asked_for(side).add(request.request_id)
        return meant

    def asked_for(side: Any) -> set[str]:
        requests: set[str] = vars(side).setdefault("_livepatch_asked_for", set())
        return requests

    def planned(original: Callable[..., Any], side: Any, *rest: Any, **named: Any) -> Any:
        """Remember whose blocks the worker is to write to a peer."""
        metadata = original(*rest, **named)
        if side.is_producer:
            asked_for(side).update(metadata.reqs_to_save)
        return metadata

    def finished(original: Callable[..., Any], side: Any, request: Any, *rest: Any, **named: Any) -> Any:
        """Blocks that the worker reads from, or to 0.15 writes to, come back when it says so, by a send's end.

        The release frees them at once where a prefill's request did not end by its length: by a stop token, an abort.
        """
        keep, parameters = original(request, *rest, **named)
        if request.request_id in asked_for(side):
            asked_for(side).discard(request.request_id)
            return True, parameters
        return keep, parameters

    # The worker's side

    def start_load_kv(original: Callable[..., Any], worker: Any, metadata: Any, *rest: Any, **named: Any) -> Any:
        """Let the method see only requests whose peer is there, so that it has nothing to spin for."""
        if not reads_here(worker):
            return original(metadata, *rest, **named)
        reads = reads_of(worker)
        every = metadata.reqs_to_recv
        wanted = dict(every)
        for request_id, meta in wanted.items():
            if meta.local_block_ids:  # none: it was aborted before, and its peer is to hear of that
                reads.under_way[request_id] = Read(meta.local_block_ids, peer_of(meta))
                if kept_as_sends:
                    reads.finishing.add(request_id)
        for request_id, (kind, _, why) in ({} if livepatch.aside else connect(worker, wanted)).items():
            del wanted[request_id]
            livepatch.count(kind)
            fail(reads, kind, request_id, why)
        metadata.reqs_to_recv = wanted
        try:
            return original(metadata, *rest, **named)
        finally:
            metadata.reqs_to_recv = every

    def read_blocks(original: Callable[..., Any], worker: Any, req_id: str, *rest: Any, **named: Any) -> Any:
        """A read that cannot be begun is that request's failure, and no other's."""
        try:
            return original(req_id, *rest, **named)
        except Exception as error:
            read = reads_of(worker).under_way.get(req_id)
            if read is not None:
                read.broken = f"{type(error).__name__}: {error}"
            return None
        finally:
            if getattr(worker.moriio_config, "backend", "rdma") == "xgmi":
                wait_aside(worker._recving_transfers.get(req_id, ()))

    def pop_done_transfers(original: Callable[..., Any], worker: Any, *rest: Any, **named: Any) -> Any:
        """A read has ended when all its layers have: the release looks at the last one only, and at no failure."""
        reads, transfers = reads_of(worker), worker._recving_transfers
        unlike: dict[str, list[Any]] = {}  # what the release's method is not to see
        left: dict[str, Sequence[Any]] = {}
        for request_id, statuses in list(transfers.items()):
            read = reads.under_way.get(request_id)
            left[request_id] = statuses if read is None else read.left(statuses)
            if (read is not None and read.broken) or not all(status.Succeeded() for status in left[request_id]):
                unlike[request_id] = transfers.pop(request_id)
        try:
            done = original(*rest, **named)
        finally:
            transfers.update(unlike)
        for request_id in done:
            if reads.under_way.pop(request_id, None) is not None:
                reads.ended.add(request_id)
        for request_id in [*unlike, *(name for name, read in reads.under_way.items() if read.broken)]:
            statuses = transfers.get(request_id, [])
            if any(map(in_progress, left.get(request_id, ()))):
                look_at_time(reads, request_id, statuses)
            elif request_id in reads.under_way or request_id in transfers:
                give_up(worker, reads, request_id, statuses)
        return done

    def look_at_time(reads: Reads, request_id: str, statuses: Sequence[Any]) -> None:
        read = reads.under_way.get(request_id)
        if read is not None and not read.overdue and time.monotonic() - read.since > transfer_seconds:
            read.overdue = True
            pending = sum(map(in_progress, statuses))
            why = f"{pending} of {len(statuses)} transfers are pending after {time.monotonic() - read.since:.1f} s"
            livepatch.tell("read_overdue", f"request {request_id} waits on for its KV from {read.peer}: {why}")

    def give_up(worker: Any, reads: Reads, request_id: str, statuses: Sequence[Any]) -> None:
        """All that was begun has ended, and not all of it well. The peer may have its blocks back."""
        worker._recving_transfers.pop(request_id, None)
        address = worker._recving_transfers_callback_addr.pop(request_id, None)
        read = reads.under_way.get(request_id)
        failed = next((status for status in statuses if status.Failed()), None)
        why = read.broken if read is not None else ""
        if failed is not None:
            why = f"a transfer failed: {failed.Message()} (code {failed.Code()})"
        livepatch.count("read_failed")
        fail(reads, "read_failed", request_id, why)
        if address is not None:
            worker.moriio_wrapper.send_notify(request_id, *address)

    def fail(reads: Reads, kind: str, request_id: str, why: str) -> None:
        """Report a read as ended, and its blocks as not loaded: the scheduler ends the request, or computes it here."""
        read = reads.under_way.pop(request_id, None)
        if read is not None:
            reads.failed.update(read.blocks)
            reads.ended.add(request_id)
            livepatch.say(kind, f"the KV of request {request_id} is not read from {read.peer}: {why}")

    def get_finished(
        original: Callable[..., Any], connector: Any, finished_req_ids: set[str], *rest: Any, **named: Any
    ) -> Any:
        """The ends of reads; the runner asks next for the blocks of those that failed, which the class never tells."""
        sending, recving = original(finished_req_ids, *rest, **named)
        worker = connector.connector_worker
        if not reads_here(worker):
            return sending, recving
        reads = reads_of(worker)
        connector.get_block_ids_with_load_errors = reads.take_failed
        ended = reads.take_ended()
        if not kept_as_sends:
            return sending, ended
        left(worker).update(reads.finishing.intersection(finished_req_ids))
        given_back = {name for name in left(worker) if name not in reads.under_way}
        left(worker).difference_update(given_back)
        reads.finishing.difference_update(given_back)
        return {*sending, *given_back}, ended

    def left(worker: Any) -> set[str]:
        """Requests that have finished, and whose read is still under way."""
        requests: set[str] = vars(worker).setdefault("_livepatch_left", set())
        return requests

    # Each goes on after the patch has stood aside: the other side's process does not know of it.
    made: dict[str, Callable[..., Any]] = {
        f"{SCHEDULER}.get_num_new_matched_tokens": matched_tokens,
        f"{SCHEDULER}.update_state_after_alloc": allocated,
        f"{SCHEDULER}.build_connector_meta": planned,
        f"{SCHEDULER}.request_finished": finished,
        f"{WORKER}.start_load_kv": start_load_kv,
        f"{WORKER}._read_blocks_for_req": read_blocks,
        f"{WORKER}._pop_done_transfers": pop_done_transfers,
        f"{CONNECTOR}.get_finished": get_finished,
    }
    return {target: livepatch.lasting(wrapper) for target, wrapper in made.items()}

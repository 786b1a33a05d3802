"""Prefill's KV leaves while later parts of the prompt are computed; at its end only what is missing is sent.

Which blocks are whole after a step is sent with the connector's metadata (computed.py), and what of them decode
has asked for is written at once (early.py). The last answer to an ask stays the release's.
"""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import TYPE_CHECKING, Any

from . import early
from .computed import PROGRESS, Prefills
from .early import Writes, let_go, module_of, response_of
from .layers import Layers
from .parts import Ask, Group, Part

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
CONNECTOR = f"{MODULE}:MooncakeConnector"
SCHEDULER = f"{MODULE}:MooncakeConnectorScheduler"
WORKER = f"{MODULE}:MooncakeConnectorWorker"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"

PREFILLS = "_livepatch_prefills"
"""Attribute of a scheduler's side: its `Prefills`."""

BESIDE = {"SlidingWindowSpec", "MambaSpec"}
"""Kinds of groups beside which the one of full attention leaves early."""

WRITES = "_livepatch_writes"
"""Attribute of a prefill worker: its `Writes`. One that has none sends everything at the end."""


class _Answers:
    """In the place of the socket while an ask is served: no answer leaves while what it speaks of is still written."""

    def __init__(self, livepatch: PatchContext, worker: Any, ask: Ask, socket: Any) -> None:
        self._livepatch, self._worker, self._ask, self._socket = livepatch, worker, ask, socket

    async def send_multipart(self, parts: Any) -> None:
        identity, data = parts
        try:
            settled = await self._settled(data)
        except Exception as error:
            self._livepatch.stand_aside("answering an ask", error)
            for part in self._ask.parts.values():
                await part.drained()
            settled = None if any(part.failed for part in self._ask.parts.values()) else data
        if settled is not None:
            await self._socket.send_multipart((identity, settled))

    async def _settled(self, data: bytes) -> bytes | None:
        """The answer, when nothing is under way of what it speaks of, and without what may be for all time."""
        ask, worker = self._ask, self._worker
        response = worker._xfer_resp_decoder.decode(data)
        named = {*(response.ok_reqs or ()), *(response.err_reqs or ())}
        if response.status.name != "CONTINUE":
            named |= ask.unanswered
        # `mooncake-lost-asks` answers as well for what the release does not keep any more, which may be more by then.
        spoken: list[Part] = []
        while more := [
            part
            for name, part in ask.parts.items()
            if part not in spoken
            and (name in named or (name in ask.unanswered and part.transfer not in worker.reqs_need_send))
        ]:
            for part in more:
                part.closed = True
            for part in more:
                await part.drained()
            spoken += more
        ask.unanswered -= named
        ask.withheld.update(part.name for part in spoken if part.failed is not None)
        if not ask.withheld:
            return data
        # `mooncake-lost-asks`, whose socket this is, answers for what it has not answered and nobody keeps any more.
        left: dict[str, str] = getattr(self._socket, "left", {})
        for name in ask.withheld:
            left.pop(name, None)
        return self._without(response, ask.withheld)

    def _without(self, response: Any, withheld: set[str]) -> bytes | None:
        """An answer that leaves requests out, and is not the last one: that would speak of them too.

        It may speak of none, where others wait: decode's wait begins anew with each answer, as prefill's does.
        """
        response.ok_reqs = [name for name in response.ok_reqs or () if name not in withheld] or None
        response.err_reqs = [name for name in response.err_reqs or () if name not in withheld] or None
        if response.ok_reqs is None and response.err_reqs is None and not self._ask.unanswered:
            return None
        response.status = module_of(self._worker)["MooncakeXferResponseStatus"].CONTINUE
        encoded: bytes = self._worker._encoder.encode(response)
        return encoded


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    """At each target: a wrapper, or a look at its calls."""

    # The scheduler's side

    def init(
        answer: None, connector: Any, vllm_config: Any, engine_id: str, kv_cache_config: Any, *rest: Any, **named: Any
    ) -> None:
        group = group_of(kv_cache_config, connector.block_size)
        if group is not None:
            setattr(connector, PREFILLS, Prefills(connector.block_size, group.index))

    def build_connector_meta(original: Call, connector: Any, scheduler_output: Any, *rest: Any, **named: Any) -> Any:
        prefills: Prefills | None = getattr(connector, PREFILLS, None)
        if prefills is None:
            return original(scheduler_output, *rest, **named)
        try:
            progress = prefills.leave() if livepatch.aside else prefills.progress(connector, scheduler_output)
        except Exception as error:
            livepatch.stand_aside("following prefills", error)
            progress = prefills.leave()
        metadata = original(scheduler_output, *rest, **named)
        if progress is not None:
            setattr(metadata, PROGRESS, progress)
        return metadata

    def request_finished(original: Call, connector: Any, request: Any, *rest: Any, **named: Any) -> Any:
        """The blocks of a prefill that is given up come back when its workers say so, not at once."""
        held, parameters = original(request, *rest, **named)
        prefills: Prefills | None = getattr(connector, PREFILLS, None)
        transfer = None if held or prefills is None else prefills.hold(request)
        if transfer is None:
            return held, parameters
        connector._reqs_not_processed.discard(transfer)  # the worker tells itself, when nothing is under way
        return True, parameters

    # A worker's steps

    def register_kv_caches(answer: Any, connector: Any, kv_caches: Any, *rest: Any, **named: Any) -> None:
        worker = connector.connector_worker
        group = None if worker.is_kv_consumer else leaves_early(worker, kv_caches)
        if group is None:
            return
        layers = None if livepatch.options["BY"] == "chunk" else layers_of(own_caches(worker, kv_caches, group))
        setattr(worker, WRITES, Writes(livepatch, worker, layers, group))
        livepatch.around_its(connector, "bind_connector_metadata", livepatch.lasting(bind_connector_metadata))
        if hasattr(connector, "unregister_kv_caches"):  # from 0.33.0 on
            livepatch.around_its(connector, "unregister_kv_caches", livepatch.lasting(unregister_kv_caches))
        if layers is not None:
            connector.save_kv_layer = livepatch.around(connector.save_kv_layer, livepatch.after(save_kv_layer))

    def bind_connector_metadata(
        original: Call, connector: Any, connector_metadata: Any, *rest: Any, **named: Any
    ) -> Any:
        """Before a step writes into blocks that were given away, what still reads them is awaited, for some time.

        What that brings then is written where nobody else writes, and once more at the end.
        """
        progress = getattr(connector_metadata, PROGRESS, None)
        if progress is None:
            return original(connector_metadata, *rest, **named)
        worker = connector.connector_worker
        writes: Writes = getattr(worker, WRITES)
        if progress["back"] or progress["over"]:
            worker.sender_loop.call_soon_threadsafe(writes.over, progress["over"])
            if progress["back"]:
                back = asyncio.run_coroutine_threadsafe(writes.back(progress["back"]), worker.sender_loop)
                try:
                    back.result(early.BACK_SECONDS)
                except futures.TimeoutError:
                    livepatch.say("stuck", "an early write does not end: steps no longer wait for it")
        if progress["whole"] and writes.layers is not None:
            worker.sender_loop.call_soon_threadsafe(writes.beginning, progress)
        return original(connector_metadata, *rest, **named)

    def unregister_kv_caches(original: Call, connector: Any, *rest: Any, **named: Any) -> Any:
        """The engine goes to sleep: nothing reads the memory that is taken from it, and what has left is sent again."""
        worker = connector.connector_worker
        writes: Writes = getattr(worker, WRITES)
        asyncio.run_coroutine_threadsafe(writes.asleep(), worker.sender_loop).result()
        return original(*rest, **named)

    def save_kv_layer(answer: Any, connector: Any, layer_name: str, *rest: Any, **named: Any) -> None:
        """A step has computed a layer, or has it queued on the device. What replays graphs whole does not call this."""
        worker, progress = connector.connector_worker, getattr(connector._connector_metadata, PROGRESS, None)
        writes: Writes = getattr(worker, WRITES)
        if progress is not None and progress["whole"] and writes.layers is not None:
            worker.sender_loop.call_soon_threadsafe(writes.saved, layer_name, behind(worker))

    def start_load_kv(original: Call, worker: Any, metadata: Any, *rest: Any, **named: Any) -> None:
        """The release hears of prefills that were given up before those begin that come again under their transfers."""
        progress = getattr(metadata, PROGRESS, None)
        writes: Writes | None = getattr(worker, WRITES, None)
        for name, (transfer, blocks) in progress["held"].items() if progress else ():
            what = (worker, name, transfer, type(metadata)())
            report = let_go(*what) if writes is None else writes.given_up(*what, blocks)
            asyncio.run_coroutine_threadsafe(report, worker.sender_loop)
        original(metadata, *rest, **named)

    def wait_for_save(connector: Any, *rest: Any, **named: Any) -> None:
        """A step has been computed, or is queued on the device."""
        worker, progress = connector.connector_worker, getattr(connector._connector_metadata, PROGRESS, None)
        writes: Writes | None = getattr(worker, WRITES, None)
        if writes is None or progress is None or not progress["whole"]:
            return
        worker.sender_loop.call_soon_threadsafe(writes.computed, progress, behind(worker))

    def requires_piecewise_for_cudagraph(original: Call, connector: Any, *rest: Any, **named: Any) -> bool:
        """A graph of the whole step calls no connector for its layers."""
        layers = connector.__name__ == CONNECTOR.partition(":")[2] and livepatch.options["BY"] == "layer"
        return bool(original(*rest, **named)) or layers

    # An ask

    async def served(release: Call, worker: Any, identity: bytes, socket: Any, meta: Any) -> None:
        writes: Writes = getattr(worker, WRITES)
        ask = Ask(identity, meta, release)
        answers = _Answers(livepatch, worker, ask, socket)
        try:
            writes.begin(ask)
        except Exception as error:
            livepatch.stand_aside("an ask", error)
        try:
            await release(identity, answers, meta)
        except Exception:
            # The answer that this would become speaks of all, also of those that are not to be answered.
            for part in ask.parts.values():
                await part.drained()
            if not any(part.failed for part in ask.parts.values()):
                raise
            response = response_of(worker, "CONTINUE", err_reqs=sorted(ask.unanswered))
            await answers.send_multipart((identity, worker._encoder.encode(response)))
        finally:
            await writes.end(ask)

    def send_kv_to_decode(
        original: Call, worker: Any, identity: bytes, sock: Any, meta: Any, *rest: Any, **named: Any
    ) -> Any:
        if livepatch.aside or not hasattr(worker, WRITES):
            return original(identity, sock, meta, *rest, **named)
        return served(lambda *ask: original(*ask, *rest, **named), worker, identity, sock, meta)

    # The end of a prefill

    async def lacking(
        release: Call,
        layers: Layers | None,
        parts: Mapping[str, Part],
        ready: list[tuple[str, Any]],
        meta: Any,
        *regions: Any,
    ) -> tuple[Any, list[Any]]:
        """The ask, without what was sent or begun; and what is to be sent of the latter, as the release builds it."""
        blocks, found = dict(meta.req_blocks), []
        for name, entry in ready:
            part = parts.get(name)
            sent, begun = (0, None) if part is None else part.sent_of(entry)
            if part is None or begun is None or layers is None:
                after = sent
            else:
                after = sent + len(begun.local)
                own, one = copy.copy(entry), copy.copy(meta)
                own.local_block_ids = part.group.alone(begun.local)
                one.req_blocks = {name: (part.transfer, part.group.alone(part.remote[sent:after]))}
                *addresses, refused, _ = await release(
                    [(name, own)], one, *layers.only(layers.lacking(begun), *regions)
                )
                if refused:
                    raise ValueError(f"the release does not send the rest of {name}")
                found.append(addresses)
            if part is not None and after:
                transfer, groups = blocks[name]
                blocks[name] = (transfer, part.group.instead(groups, part.remote[after:]))
        rest = copy.copy(meta)
        rest.req_blocks = blocks
        return rest, found

    async def missing(
        release: Call, writes: Writes, ready: list[tuple[str, Any]], meta: Any, *regions: Any
    ) -> tuple[Any, Any, Any, list[str], str | None]:
        """What has not been sent, as the release builds it. A request of which a write failed is not sent."""
        only, layers = writes.only(meta), writes.layers
        if only is not None and layers is not None:
            built: tuple[Any, Any, Any, list[str], str | None] = await release(
                ready, meta, *layers.only(only, *regions)
            )
            return built
        # With the last of those who ask for a transfer its blocks are given away: nobody's write is under way then.
        entries = [entry for _, entry in ready]
        read = {block for entry in entries for blocks in entry.local_block_ids for block in blocks}
        await writes.drained({entry.transfer_id for entry in entries}, entries, read)
        ask = writes.of(meta)
        parts: dict[str, Part] = {} if ask is None else ask.parts
        failed = {name: part.failed for name, _ in ready if (part := parts.get(name)) and part.failed is not None}
        left = [(name, entry) for name, entry in ready if name not in failed]
        try:
            rest, found = await lacking(release, layers, parts, left, meta, *regions)
        except Exception as error:
            livepatch.stand_aside("leaving out what was sent", error)
            rest, found = meta, []
        sources, places, lengths, errors, why = await release(left, rest, *regions)
        for one, two, three in found:
            sources, places, lengths = [*one, *sources], [*two, *places], [*three, *lengths]
        if failed:
            errors = [*errors, *failed]
            why = "; ".join(filter(None, (why, *failed.values())))
        return sources, places, lengths, errors, why

    def build_transfer_params(
        original: Call,
        worker: Any,
        ready_reqs: list[tuple[str, Any]],
        agent_meta: Any,
        local_regions: Any,
        remote_regions: Any,
        *rest: Any,
        **named: Any,
    ) -> Any:
        ask = (ready_reqs, agent_meta, local_regions, remote_regions)
        writes: Writes | None = getattr(worker, WRITES, None)
        if writes is None:
            return original(*ask, *rest, **named)
        return missing(lambda *of: original(*of, *rest, **named), writes, *ask)

    return {
        f"{SCHEDULER}.__init__": livepatch.after(init),
        f"{SCHEDULER}.build_connector_meta": livepatch.lasting(build_connector_meta),
        f"{SCHEDULER}.request_finished": livepatch.lasting(request_finished),
        f"{CONNECTOR}.register_kv_caches": livepatch.after(register_kv_caches),
        f"{CONNECTOR}.wait_for_save": livepatch.before(wait_for_save),
        f"{BASE}.requires_piecewise_for_cudagraph": requires_piecewise_for_cudagraph,
        f"{WORKER}.start_load_kv": livepatch.lasting(start_load_kv),
        f"{WORKER}.send_kv_to_decode": send_kv_to_decode,
        f"{WORKER}._build_transfer_params": livepatch.lasting(build_transfer_params),
    }


def leaves_early(worker: Any, caches: Mapping[str, Any]) -> Group | None:
    """The group whose blocks stay as they are when they are whole, where nothing computes ahead."""
    config = worker.vllm_config
    group = group_of(worker.kv_cache_config, config.cache_config.block_size)
    parallel = config.parallel_config
    return (
        group
        if group is not None
        # Before 0.25.1 the release writes the blocks of all groups to all regions, one behind the other.
        and (group.number == 1 or hasattr(worker, "registered_group_indices"))
        and config.speculative_config is None
        and parallel.decode_context_parallel_size == parallel.prefill_context_parallel_size == 1
        and parallel.pipeline_parallel_size == 1
        and devices(caches) <= {"cpu", "cuda"}
        else None
    )


def group_of(kv_cache_config: Any, block_size: int) -> Group | None:
    """The only group of full attention. The scheduler's side and its workers come to the same one.

    None: there is none, or several, or others whose blocks may not be of the same pool.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    full = [index for index, spec in enumerate(specs) if full_attention(spec)]
    others = {type(spec).__name__ for index, spec in enumerate(specs) if index not in full}
    if len(full) != 1 or not others <= BESIDE or specs[full[0]].block_size != block_size:
        return None
    return Group(full[0], len(specs))


def full_attention(spec: Any) -> bool:
    """Whether a step writes what it computes of a token, MLA's too, and no other step writes there again."""
    # DeepSeek V4 keeps one state of several tokens.
    tokens = (getattr(spec, "compress_ratio", 1), getattr(spec, "tokens_per_state", 1))
    return type(spec).__name__ in ("FullAttentionSpec", "MLAAttentionSpec") and tokens == (1, 1)


def own_caches(worker: Any, caches: Mapping[str, Any], group: Group) -> dict[str, Any]:
    """Those that are of no other group."""
    groups = enumerate(worker.kv_cache_config.kv_cache_groups)
    others = {name for index, other in groups if index != group.index for name in other.layer_names}
    return {name: cache for name, cache in caches.items() if name not in others}


def devices(caches: Mapping[str, Any]) -> set[str]:
    """The kinds of devices that caches lie on. To 0.28.0 a Mamba layer's is a list of several."""
    parts = [part for cache in caches.values() for part in (cache if isinstance(cache, list | tuple) else [cache])]
    return {part.device.type for part in parts}


def layers_of(caches: Mapping[str, Any]) -> Layers | None:
    """None: what of a layer's memory is another's too cannot leave before the step has ended."""
    try:
        return Layers(caches)
    except ValueError:
        return None


def behind(worker: Any) -> Any:
    """An event on the device behind all that the step has queued there; None where a step is computed in the call."""
    if devices(worker.device_kv_caches) == {"cpu"}:
        return None
    event = sys.modules["torch"].cuda.Event()
    event.record()
    return event

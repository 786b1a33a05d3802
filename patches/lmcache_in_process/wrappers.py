"""No request ends the engine where LMCache runs in the engine's process.

The scheduler's connector asserts on parts of LMCache that its process has not: on the storage engine when a client goes
(the scheduler never has one), on everything where LMCache did not start. Its asynchronous lookup client raises where a
lookup that timed out is asked for again. What a lookup found stays pinned in the workers' memory where its request
ends before it is computed. And with `enable_async_loading` a load gives back the memory of its chunks twice, so LMCache
frees memory that its own index still names. What a client writes into `kv_transfer_params` is read unchecked, too.

Source: LMCache#3337, LMCache PR#2772, vllm#44249, vllm#3685; LMCache 0.5.1 guards the connector.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...sitecustomize.kit import attached

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

CONNECTOR = "lmcache.integration.vllm.vllm_v1_adapter:LMCacheConnectorV1Impl"
ENGINE = "lmcache.v1.cache_engine:LMCacheEngine"
LOOKUPS = "lmcache.v1.lookup_client.lmcache_async_lookup_client:LMCacheAsyncLookupClient"

UNUSED = "_livepatch_unused_lookups"
"""Attribute of a scheduler's connector: how many steps are scheduled until each worker has given back the pins of a
lookup that nobody uses, by request id; None where no worker was told yet. Of a step's metadata: these ids."""


class WithoutStatus:
    """A request as LMCache's connector may see it: all that it has but its status, by which it would be cleaned up."""

    status = None

    def __init__(self, request: Any) -> None:
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class Taken:
    """The future of a prefetch that has ended, as LMCache's clean-up asks it: by tier, a key and its memory a chunk."""

    def __init__(self, chunks: list[tuple[Any, Any]]) -> None:
        self._chunks = chunks

    def result(self) -> list[list[tuple[Any, Any]]]:
        return [self._chunks]


PARAMETERS = "kv_transfer_params"
READ = "_livepatch_readable"
"""Attribute of a request: its parameters, and those that sampling has, that were looked through."""
TAGS, SPEC_NAME = "lmcache.tag.", "disagg_spec"
SPEC = {"req_id", "receiver_host", "receiver_init_port", "receiver_alloc_port"}
"""What LMCache reads of a client's `disagg_spec`."""


def readable(parameters: Any) -> Any:
    """Return what LMCache can read of a client's parameters: themselves, or some, or None. The rest ends the engine."""
    if not isinstance(parameters, dict):
        return None
    # Of a million names most are nobody's.
    looked_at = [name for name in parameters if name.startswith(TAGS) or name == SPEC_NAME]
    left_out = {name for name in looked_at if not is_readable(name, parameters[name])}
    if not left_out:
        return parameters
    return {name: value for name, value in parameters.items() if name not in left_out} or None


def is_readable(name: str, value: Any) -> bool:
    """Tell whether LMCache can read this one of a client's parameters."""
    if name == SPEC_NAME:
        return isinstance(value, dict) and value.keys() >= SPEC and isinstance(value["receiver_host"], str)
    return not isinstance(value, list | dict)  # a tag is hashed, as part of keys


def innermost(client: Any) -> Any:
    """Return the lookup client that asks the workers, without those that LMCache may put around it."""
    while hasattr(client, "actual_lookup_client"):
        client = client.actual_lookup_client
    return client


def wrappers(livepatch: PatchContext) -> Mapping[str, Call]:
    def get_num_new_matched_tokens(
        original: Call, connector: Any, request: Any, num_computed_tokens: int, *rest: Any, **named: Any
    ) -> Any:
        """Return 0, a miss, where there is nobody to ask, or where the workers still give back pins of an earlier
        request with the same id: they could not tell these from the new one's."""
        keep_readable(request)
        if connector.lookup_client is None:
            return 0
        if request.request_id in vars(connector).get(UNUSED, ()):
            # As LMCache's own code notes a miss: a preempted request that comes back without this ends the engine.
            miss = sys.modules[type(connector).__module__].LoadSpec
            connector.load_specs[request.request_id] = miss(
                num_computed_tokens, lmcache_cached_tokens=0, can_load=False
            )
            return 0
        return original(request, num_computed_tokens, *rest, **named)

    def keep_readable(request: Any) -> None:
        """Take what LMCache cannot read out of a client's parameters: the request's, and those that sampling has."""
        given = getattr(request, PARAMETERS, None)
        arguments = getattr(request.sampling_params, "extra_args", None) or {}
        for_sampling = arguments.get(PARAMETERS)
        read, read_for_sampling = getattr(request, READ, (None, None))
        if given is read and for_sampling is read_for_sampling:
            return  # a client's may have a million entries, and a request that waits is asked for in each step
        kept = readable(given)
        kept_for_sampling = kept if for_sampling is given else readable(for_sampling)
        setattr(request, READ, (kept, kept_for_sampling))
        if kept is given and kept_for_sampling is for_sampling:
            return
        livepatch.tell("unreadable_parameters", "a client's kv_transfer_params have what LMCache cannot read: left out")
        setattr(request, PARAMETERS, kept)
        if arguments:
            request.sampling_params.extra_args = {**arguments, PARAMETERS: kept_for_sampling}

    def request_finished(original: Call, connector: Any, request: Any, *rest: Any, **named: Any) -> Any:
        """Give back the lookup of a request that ended before it used it. LMCache's own code, which would do so through
        parts that are not there, is shown the request without its status."""
        name = request.request_id
        keep_readable(request)
        parameters = getattr(request, PARAMETERS, None) or {}
        if "ret_first_tok" in parameters and not request._output_token_ids:  # there is none, and LMCache reads it
            setattr(request, PARAMETERS, {one: value for one, value in parameters.items() if one != "ret_first_tok"})
        give_back(connector, name)
        connector.load_specs.pop(name, None)
        connector._requests_priority.pop(name, None)
        engine, client = connector.lmcache_engine, connector.lookup_client
        able = engine is not None and (not connector.async_loading or hasattr(client, "cancel_lookup"))
        return original(request if able else WithoutStatus(request), *rest, **named)

    def give_back(connector: Any, name: str) -> None:
        client = innermost(connector.lookup_client)
        if name not in getattr(client, "reqs_status", ()):
            return
        livepatch.count("lookup_given_back")
        if hasattr(client, "cancel_lookup"):
            client.cancel_lookup(name)
            return
        client.clear_lookup_status(name)
        attached(connector, UNUSED, dict[str, Any])[name] = None

    def build_connector_meta(original: Call, connector: Any, *rest: Any, **named: Any) -> Any:
        """Tell the workers whose pins to give back."""
        if connector.lookup_client is None:
            return sys.modules[type(connector).__module__].LMCacheConnectorMetadata()
        metadata: Any = original(*rest, **named)
        unused = vars(connector).get(UNUSED)
        if unused:
            setattr(metadata, UNUSED, {name for name, steps in unused.items() if steps is None})
            # Of the steps that are scheduled, as many as there are pipeline stages, and one more, may be under way.
            under_way = connector._vllm_config.parallel_config.pipeline_parallel_size + 1
            left = {name: under_way if steps is None else steps - 1 for name, steps in unused.items()}
            vars(connector)[UNUSED] = {name: steps for name, steps in left.items() if steps}
        return metadata

    def get_finished(original: Call, connector: Any, *rest: Any, **named: Any) -> Any:
        """Give back, at a worker, the pins of lookups that nobody uses."""
        engine = connector.lmcache_engine
        if engine is not None:
            for name in getattr(connector._parent._connector_metadata, UNUSED, ()):
                engine.lookup_unpin(name)
        return original(*rest, **named)

    def lookup_cache(original: Call, client: Any, lookup_id: str, *rest: Any, **named: Any) -> Any:
        """Return 0, a miss, for a lookup that was given up, until the workers have answered it: then LMCache gives back
        what they found, and asks anew."""
        if lookup_id in client.aborted_lookups:
            with client.lock:
                answered = client.reqs_status.get(lookup_id) is not None
            if not answered:
                livepatch.count("lookup_not_answered")
                return 0
        return original(lookup_id, *rest, **named)

    def prefetched(original: Call, engine: Any, *rest: Any, **named: Any) -> Any:
        """Let each chunk of a prefetch be given back once.

        The original gives back the chunks that the load does not copy, and keeps their pins. From LMCache 0.5.2 on, its
        caller gives back those that it copied, unless it removes them from LMCache. At the end of the step LMCache's
        clean-up gives back every chunk that the prefetch's event names.
        """
        answer = original(*rest, **named)
        if livepatch.facts.get("ends_event"):  # LMCache 0.3.15 gives back each chunk itself, and names none later
            return answer
        events, name, module = engine.event_manager, named["req_id"], sys.modules[ENGINE.partition(":")[0]]
        loading = module.EventType.LOADING
        future = events.get_event_future(loading, name)
        if future.exception() is not None:
            return answer
        copied = [(key, memory) for key, memory, *_ in answer[0]]
        used = {id(memory) for _, memory in copied}
        left = [memory for tier in future.result() for _, memory in tier if id(memory) not in used]
        events.pop_event(loading, name)
        if engine.remove_after_retrieve or not livepatch.facts.get("gives_back_copied", False):
            events.add_event(loading, name, Taken(copied))
            events.update_event_status(loading, name, status=module.EventStatus.DONE)
        for memory in left:
            if memory.is_pinned:
                memory.unpin()
        return answer

    def update_state_after_alloc(original: Call, connector: Any, request: Any, *rest: Any, **named: Any) -> Any:
        """Leave a request alone that is computed here, since there is no LMCache."""
        if connector.lookup_client is not None:
            keep_readable(request)  # LMCache reads them here, also of whom another patch has not looked up
            return original(request, *rest, **named)
        livepatch.tell("computed_without_lmcache", "LMCache did not start: prompts are computed, and nothing is stored")
        return None

    def if_started(original: Call, connector: Any, *rest: Any, **named: Any) -> Any:
        """Neither load nor store at a worker whose LMCache did not start."""
        return None if connector.lmcache_engine is None else original(*rest, **named)

    # They go on when the patch has stood aside: nothing else gives back what was given up, or serves without LMCache.
    made: dict[str, Call] = {
        f"{CONNECTOR}.get_num_new_matched_tokens": livepatch.lasting(get_num_new_matched_tokens),
        f"{CONNECTOR}.build_connector_meta": livepatch.lasting(build_connector_meta),
        f"{CONNECTOR}.request_finished": request_finished,
        f"{CONNECTOR}.get_finished": livepatch.lasting(get_finished),
        f"{LOOKUPS}.lookup_cache": livepatch.lasting(lookup_cache),
        f"{ENGINE}._async_process_tokens_internal": livepatch.lasting(prefetched),
    }
    made[f"{CONNECTOR}.update_state_after_alloc"] = livepatch.lasting(update_state_after_alloc)
    for name in ("start_load_kv", "save_kv_layer", "wait_for_save"):
        made[f"{CONNECTOR}.{name}"] = livepatch.lasting(if_started)
    return made

"""Nobody is given KV of another adapter, image or embedding by LMCache.

LMCache's keys have token ids, the model's path and the salt, and nothing else that decides a request's KV. In the place
of a request's ids, the connectors of its server (MP) read ids whose first ones in each chunk carry the rest; in the
engine's process (in_process.py) a tag of LMCache's own does.

Source: vllm#44250, LMCache#2961, LMCache PR#4183.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ...sitecustomize.kit import leaves
from .adapters import Adapters
from .identities import Identities
from .in_process import InProcess
from .layers import Layers
from .marks import WORDS, MarkedIds, Marks

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

CREATE = "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.create_connector"
CORE = "vllm.v1.engine.core:EngineCore"

UNKNOWN: tuple[int, ...] = ()
"""In the place of the ids of a request whose identity is unknown: it never has a whole chunk."""

SETTLED = "_livepatch_settled"
"""Attribute of a tracker whose ids are what keys are to be made of: what its engine's requests had in common then."""


LOOKED_UP = "_livepatch_looked_up"
"""Attribute of a tracker: the ids that it was looked up by before it lost its identity, and that its locks are of."""

ADAPTERS = "_livepatch_adapters"
"""Attribute of a scheduler's connector: the adapters of its engine. A process may have several engines."""

IDENTITY = "_livepatch_identity"
"""Attribute of a request: the first that it had. A request that was preempted gets a new tracker."""


class Multiprocess:
    """The scheduler's part of one LMCacheMPConnector, vLLM's or LMCache's own."""

    def __init__(self, connector: Any, identities: Identities, livepatch: PatchContext) -> None:
        self.connector = connector
        self.identities = identities
        self.livepatch = livepatch
        self.trackers: Mapping[str, Any] = connector.request_trackers
        self.replaced: set[int] = set()  # ids of adapters, since the last step
        self.outdated = False  # whether trackers of before the last reset are left that know their ids
        identities.adapters.on_replaced.append(lambda number: self.replaced.add(number))
        adapter = connector.scheduler_adapter
        blocks = adapter.num_blocks_per_chunk() * getattr(connector, "vllm_block_size", 1)
        self.chunk: int = getattr(adapter, "lmcache_tokens_per_chunk", blocks)
        lazy = getattr(connector, "_lazy_offload_manager", None)
        if hasattr(lazy, "_rebind_tokens"):
            livepatch.around_its(lazy, "_rebind_tokens", livepatch.lasting(self.rebind))
        for owner, name, wrapper in (
            (connector, "_get_or_create_request_tracker", self.track),
            (connector, "get_num_new_matched_tokens", self.matched),
            (connector, "build_connector_meta", self.build),
            (adapter, "maybe_submit_lookup_request", self.submit),
            (adapter, "check_lookup_result", self.check),
            (adapter, "_create_key", self.key),
        ):
            livepatch.around_its(owner, name, livepatch.lasting(wrapper))

    def track(self, original: Call, _: Any, request: Any, *rest: Any, **named: Any) -> Any:
        """A tracker holds the request's ids, of which keys are made for as long as the request lives."""
        tracker = original(request, *rest, **named)
        if not hasattr(tracker, SETTLED):
            setattr(tracker, SETTLED, self.identities.all)
            try:
                self.settle(tracker, request)
            except Exception as error:  # keys of ids alone would be others' as well
                self.livepatch.stand_aside("a request's marks", error)
                self.forgo(tracker)
        return tracker

    def settle(self, tracker: Any, request: Any) -> None:
        if not self.identities.needed(request):
            setattr(request, IDENTITY, ())  # it has no other after a reset
            return
        identity = None if self.livepatch.aside else self.identities.of(request)
        # The server keeps the hashes of a request's chunks by its id: what it began with is what it goes on with.
        if identity is None or self.chunk < WORDS or getattr(request, IDENTITY, identity) != identity:
            self.forgo(tracker)
        else:
            setattr(request, IDENTITY, identity)
            _put(tracker, MarkedIds(Marks(request, identity, self.chunk)))
            self.livepatch.count("marked")

    def forgo(self, tracker: Any) -> None:
        """Load and store nothing."""
        if isinstance(tracker.all_token_ids, MarkedIds):
            setattr(tracker, LOOKED_UP, tracker.all_token_ids)
        _put(tracker, UNKNOWN)
        self.livepatch.count("unidentified")

    def reset(self) -> None:
        """What was looked up, or runs, since before a reset loads and stores nothing from now on."""
        self.outdated = False
        for tracker in list(self.trackers.values()):
            if tracker.all_token_ids is UNKNOWN or getattr(tracker, SETTLED, None) is self.identities.all:
                continue
            if tracker.is_ready_for_retrieving():
                self.outdated = True  # it is told of its load in the next step, by the ids that it was looked up by
            else:
                setattr(tracker, LOOKED_UP, tracker.all_token_ids)
                self.forgo(tracker)

    def matched(self, original: Call, _: Any, request: Any, num_computed_tokens: int, *rest: Any, **named: Any) -> Any:
        if self.identities.foreign(request, num_computed_tokens):
            tracker = self.connector._get_or_create_request_tracker(request)
            if tracker.all_token_ids is not UNKNOWN:
                self.forgo(tracker)  # what other weights compute, or what is computed behind their KV, is nobody's
        return original(request, num_computed_tokens, *rest, **named)

    def build(self, original: Call, _: Any, *rest: Any, **named: Any) -> Any:
        """Requests that run while other weights take their adapter's place store nothing from this step on."""
        loading: set[int] = set()  # of requests that are told of their load in this step
        for tracker in list(self.trackers.values()) if self.replaced else ():
            ids = tracker.all_token_ids
            lora = ids.marks.request.lora_request if isinstance(ids, MarkedIds) else None
            if lora is not None and lora.lora_int_id in self.replaced:
                if tracker.is_ready_for_retrieving():
                    loading.add(lora.lora_int_id)
                else:
                    self.forgo(tracker)
        self.replaced &= loading
        if self.outdated:
            self.reset()
        return original(*rest, **named)

    def unknown(self, name: str) -> bool:
        return getattr(self.trackers.get(name), "all_token_ids", None) is UNKNOWN

    def submit(self, original: Call, _: Any, request_id: str, *rest: Any, **named: Any) -> Any:
        return None if self.unknown(request_id) else original(request_id, *rest, **named)

    def check(self, original: Call, _: Any, request_id: str, *rest: Any, **named: Any) -> Any:
        return 0 if self.unknown(request_id) else original(request_id, *rest, **named)

    def key(self, original: Call, _: Any, token_ids: Any, *rest: Any, request_id: str, **named: Any) -> Any:
        """Lookups, and the locks that they take: some releases make these of the request's own ids."""
        tracker = self.trackers.get(request_id)
        ids = getattr(tracker, LOOKED_UP, getattr(tracker, "all_token_ids", ()))
        if isinstance(ids, MarkedIds) or hasattr(tracker, LOOKED_UP):
            token_ids = list(token_ids or ids)
        if isinstance(ids, MarkedIds):
            ids.marks.put(token_ids)
        return original(token_ids, *rest, request_id=request_id, **named)

    def rebind(self, original: Call, _: Any, metadata: Any, *rest: Any, **named: Any) -> Any:
        """LMCache's lazy offload appends to the ids of before. Of a chunk that had too few of them for marks, the last
        alone would be marked."""
        bound = original(metadata, *rest, **named)
        ids = getattr(self.trackers.get(metadata.request_id), "all_token_ids", None)
        if isinstance(ids, MarkedIds):
            ids.marks.put(bound.op.token_ids)
        return bound


def _put(tracker: Any, ids: Any) -> None:
    tracker.all_token_ids = ids
    if hasattr(tracker, "mm_adjusted_prompt_ids"):  # from LMCache 0.5.3: narrower marks, of images alone
        tracker.mm_adjusted_prompt_ids = []


def wrappers(livepatch: PatchContext) -> Mapping[str, Any]:
    def create(original: Call, _: Any, config: Any, role: Any, *rest: Any, **named: Any) -> Any:
        connector = original(config, role, *rest, **named)
        if role.name == "SCHEDULER":
            adapters = Adapters(lambda sentence: livepatch.say("adapter", sentence))
            fingerprint = livepatch.options["FINGERPRINT"]
            identities = Identities(adapters, config.lora_config is not None, fingerprint)
            for one in leaves(connector):
                made = None
                if hasattr(one, "request_trackers") and hasattr(one, "scheduler_adapter"):
                    made = Multiprocess(one, identities, livepatch)
                elif hasattr(one, "_lmcache_engine"):
                    InProcess(one._lmcache_engine, identities, livepatch)
                else:
                    continue
                setattr(connector, ADAPTERS, adapters)
                if livepatch.options["ON_RESET"] == "apart":
                    livepatch.around_its(one, "reset_cache", livepatch.lasting(partial(reset, identities, made)))
            return connector
        for one in (connector, *getattr(connector, "_connectors", ())):
            impl = getattr(one, "_lmcache_engine", None)
            if getattr(impl, "use_layerwise", False) and getattr(impl, "lmcache_engine", None) is not None:
                Layers(impl, livepatch)
        return connector

    def reset(
        identities: Identities, made: Multiprocess | None, original: Call, _: Any, *rest: Any, **named: Any
    ) -> Any:
        """Other weights are to come. LMCache to 0.5.5 empties nothing, and 0.5.6 what is in memory and not locked."""
        livepatch.count("resets")
        if identities.renew():
            livepatch.say(
                "reset",
                "the connector's cache was reset: nothing that LMCache has is loaded here any more, and other engines "
                "are given nothing that is stored from here from now on",
            )
        if made is not None:
            made.reset()
        return original(*rest, **named)

    def add_lora(original: Call, core: Any, lora_request: Any, *rest: Any, **named: Any) -> Any:
        """Before the workers read it. What they could not read, nobody has asked for: its id is given to no other."""
        adapters = _of(core)
        if adapters is None:
            return original(lora_request, *rest, **named)
        new = adapters.is_new(lora_request)
        adapters.met(lora_request)
        try:
            return original(lora_request, *rest, **named)
        except Exception:
            if new:
                adapters.forget(lora_request.lora_int_id)
            raise

    def remove_lora(answer: Any, core: Any, lora_id: int, *rest: Any, **named: Any) -> None:
        adapters = _of(core)
        if adapters is not None:
            adapters.removed(lora_id)

    return {
        CREATE: create,
        f"{CORE}.add_lora": livepatch.lasting(add_lora),
        f"{CORE}.remove_lora": livepatch.lasting(livepatch.after(remove_lora)),
    }


def _of(core: Any) -> Adapters | None:
    """The adapters of an engine; None where it has no LMCache."""
    found: Adapters | None = getattr(core.scheduler.connector, ADAPTERS, None)
    return found

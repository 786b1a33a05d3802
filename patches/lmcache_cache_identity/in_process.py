"""LMCache in the engine's process: a tag, which LMCache makes a part of a request's keys, carries what ids do not."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .identities import Identities
from .marks import Images, digest_of

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

TAG = "lmcache.tag.livepatch"
"""LMCache reads it from the transfer parameters in a request's sampling parameters, as it does users' own tags."""

SETTLED = "_livepatch_tagged"
"""Attribute of a request: whether it may be looked up and stored, the sampling parameters that have its tag, and what
its engine's requests had in common then."""


class InProcess:
    """The scheduler's part of one LMCacheConnectorV1Impl, vLLM's copy or LMCache's own."""

    def __init__(self, impl: Any, identities: Identities, livepatch: PatchContext) -> None:
        self.impl = impl
        self.identities = identities
        self.livepatch = livepatch
        self.requests: Mapping[str, Any] = getattr(impl, "_unfinished_requests", {})
        self.blends = bool(getattr(getattr(impl, "config", None), "enable_blending", False))
        apply = getattr(sys.modules[type(impl).__module__], "apply_mm_hashes_to_token_ids", None)
        # The last 16 bits of an image's hash are in LMCache's keys then: to LMCache 0.5.4, and in vLLM's copy.
        self.narrow = apply is None or hasattr(sys.modules[apply.__module__], "hex_hash_to_int16")
        identities.adapters.on_replaced.append(self.replaced)
        client: Any = getattr(impl, "lookup_client", None)
        while hasattr(client, "actual_lookup_client"):  # LMCache may put one around another
            client = client.actual_lookup_client
        if type(client).__name__ == "MooncakeLookupClient":
            MooncakeLookups(client, livepatch)
        livepatch.around_its(impl, "get_num_new_matched_tokens", livepatch.lasting(self.matched))
        livepatch.around_its(impl, "build_connector_meta", livepatch.lasting(self.built))

    def matched(self, original: Call, _: Any, request: Any, num_computed_tokens: int, *rest: Any, **named: Any) -> Any:
        if not self.is_of_now(request):  # LMCache may have looked it up, and goes on by the tag that it had
            setattr(request, SETTLED, (self.forgo(), None, self.identities.all))
        elif not hasattr(request, SETTLED) or (getattr(request, SETTLED)[0] and not self.may_store(request)):
            try:
                settled = self.settle(request)
            except Exception as error:  # keys of ids alone would be others' as well
                self.livepatch.stand_aside("a request's tag", error)
                settled = self.forgo()
            setattr(request, SETTLED, (settled, request.sampling_params, self.identities.all))
        if self.may_store(request) and self.identities.foreign(request, num_computed_tokens):
            setattr(request, SETTLED, (self.forgo(), None, self.identities.all))
        if self.may_store(request):
            return original(request, num_computed_tokens, *rest, **named)
        spec = getattr(sys.modules[type(self.impl).__module__], "LoadSpec", None)
        if spec is not None:  # without one, LMCache ends the engine when a request that was preempted goes on
            self.impl.load_specs[request.request_id] = spec(num_computed_tokens, 0, can_load=False)
        return 0

    def may_store(self, request: Any) -> bool:
        """Whether a request's keys are its own. A streaming session gets new sampling parameters, without its tag."""
        settled, params, _ = getattr(request, SETTLED, (True, None, None))
        its_own = params is None or params is request.sampling_params or not self.identities.needed(request)
        return settled and its_own and self.is_of_now(request)

    def is_of_now(self, request: Any) -> bool:
        """Whether a request's tag, if it has one, was made since the last reset."""
        return not hasattr(request, SETTLED) or getattr(request, SETTLED)[2] is self.identities.all

    def settle(self, request: Any) -> bool:
        """Put a request's tag in; whether it may be looked up and stored."""
        params = request.sampling_params
        if not self.identities.needed(request):
            if TAG in _given(params):  # a client's: LMCache would take it for an adapter's
                _put(request, None)
            return True
        identity = None if self.livepatch.aside else self.identities.of(request)
        if identity is None or params is None:  # LMCache reads no tag of a pooling request
            return self.forgo()
        if self.blends:
            self.livepatch.say("blending", "CacheBlend matches chunks without what is before them: it is not used here")
            return self.forgo()
        more = Images(request.mm_features or ()).within(0, float("inf")) if self.narrow else []
        embeds = getattr(request, "prompt_embeds", None)
        if embeds is not None:
            more.append(("embeds", digest_of(embeds)))
        if identity or more:
            text = repr((identity, more)).encode("utf-8", "surrogatepass")
            _put(request, hashlib.blake2b(text, digest_size=16, person=b"livepatch-kv").hexdigest())
            self.livepatch.count("marked")
        return True

    def forgo(self) -> bool:
        """Load and store nothing."""
        self.livepatch.count("unidentified")
        return False

    def replaced(self, number: int) -> None:
        """Requests that run while other weights take their adapter's place store nothing from now on."""
        for request in self.requests.values():
            if request.lora_request is not None and request.lora_request.lora_int_id == number:
                setattr(request, SETTLED, (self.forgo(), None, self.identities.all))

    def built(self, original: Call, _: Any, *rest: Any, **named: Any) -> Any:
        """What the workers are to store in a step: nothing of requests whose identity is unknown."""
        metadata = original(*rest, **named)
        for one in metadata.requests:
            request = self.requests.get(one.req_id)
            if one.save_spec is None or request is None or self.may_store(request):
                continue
            one.save_spec.can_save = False
            # What a producer goes by, which it sends to a decode engine.
            one.save_spec.skip_leading_tokens = len(one.token_ids)
            one.disagg_spec = None
        return metadata


class MooncakeLookups:
    """One of LMCache's lookup clients (`external_lookup_client`), which makes keys itself and leaves tags out."""

    def __init__(self, client: Any, livepatch: PatchContext) -> None:
        self.tags: Mapping[str, Any] | None = None  # of the lookup that is made
        for owner, name, wrapper in (
            (client, "lookup", self.lookup),
            (client.token_database, "process_tokens", self.keys),
        ):
            setattr(owner, name, livepatch.around(getattr(owner, name), livepatch.lasting(wrapper), owner))

    def lookup(
        self, original: Call, _: Any, token_ids: Any, lookup_id: Any = None, request_configs: Any = None, *rest: Any
    ) -> Any:
        self.tags = request_configs if TAG in (request_configs or {}) else None
        try:
            return original(token_ids, lookup_id, request_configs, *rest)
        finally:
            self.tags = None

    def keys(self, original: Call, _: Any, *rest: Any, **named: Any) -> Any:
        return original(*rest, **(named if self.tags is None else {**named, "request_configs": self.tags}))


def _given(params: Any) -> Mapping[str, Any]:
    """A client's transfer parameters in sampling parameters; none where they are no object."""
    given = (getattr(params, "extra_args", None) or {}).get("kv_transfer_params")
    return given if isinstance(given, Mapping) else {}


def _put(request: Any, tag: str | None) -> None:
    """Set our tag, or none, in sampling parameters that are this request's alone."""
    params = request.sampling_params = copy.copy(request.sampling_params)
    extra = dict(params.extra_args or {})
    given = {name: value for name, value in _given(params).items() if name != TAG}
    params.extra_args = {**extra, "kv_transfer_params": {**given, TAG: tag} if tag else given}

"""LMCache in the engine's process: a tag, which LMCache makes a part of a request's keys, carries what ids do not."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .identities import Identities
from .marks import digest_of, images_of

if TYPE_CHECKING:
    from vllm_livepatch.sitecustomize.context import PatchContext

Call = Callable[..., Any]

TAG = "lmcache.tag.livepatch"
"""LMCache reads it from the transfer parameters in a request's sampling parameters, as it does users' own tags."""

SETTLED = "_livepatch_tagged"
"""Attribute of a request: whether it may be looked up. Its tag was put in then."""


class InProcess:
    """The scheduler's part of one LMCacheConnectorV1Impl, vLLM's copy or LMCache's own."""

    def __init__(self, impl: Any, identities: Identities, livepatch: PatchContext) -> None:
        self.identities = identities
        self.livepatch = livepatch
        self.requests: Mapping[str, Any] = getattr(impl, "_unfinished_requests", {})
        self.blends = bool(getattr(getattr(impl, "config", None), "enable_blending", False))
        apply = getattr(sys.modules[type(impl).__module__], "apply_mm_hashes_to_token_ids", None)
        # The last 16 bits of an image's hash are in LMCache's keys then: to LMCache 0.5.4, and in vLLM's copy.
        self.narrow = apply is None or hasattr(sys.modules[apply.__module__], "hex_hash_to_int16")
        identities.adapters.on_replaced.append(self.replaced)
        matched, built = livepatch.lasting(self.matched), livepatch.lasting(self.built)
        impl.get_num_new_matched_tokens = livepatch.around(impl.get_num_new_matched_tokens, matched)
        impl.build_connector_meta = livepatch.around(impl.build_connector_meta, built)

    def matched(self, wrapped: Call, _: Any, args: Any, kwargs: Any) -> Any:
        given = {**dict(zip(("request", "num_computed_tokens"), args, strict=False)), **kwargs}
        request, computed = given["request"], given["num_computed_tokens"]
        if not hasattr(request, SETTLED):
            try:
                settled = self.settle(request)
            except Exception as error:  # keys of ids alone would be others' as well
                self.livepatch.stand_aside("a request's tag", error)
                settled = self.forgo()
            setattr(request, SETTLED, settled)
        if computed and self.identities.lora and getattr(request, SETTLED) and self.identities.mixed(request):
            setattr(request, SETTLED, self.forgo())
        return wrapped(*args, **kwargs) if getattr(request, SETTLED) else 0

    def settle(self, request: Any) -> bool:
        """Put a request's tag in; whether it may be looked up and stored."""
        params = request.sampling_params
        if not self.identities.needed(request):
            given = (getattr(params, "extra_args", None) or {}).get("kv_transfer_params") or {}
            if TAG in given:  # a client's: LMCache would take it for an adapter's
                _put(request, None)
            return True
        identity = None if self.livepatch.aside else self.identities.of(request)
        if identity is None or params is None:  # LMCache reads no tag of a pooling request
            return self.forgo()
        if self.blends:
            self.livepatch.say("blending", "CacheBlend matches chunks without what is before them: it is not used here")
            return self.forgo()
        more = images_of(request, 0, float("inf")) if self.narrow else []
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
                setattr(request, SETTLED, self.forgo())

    def built(self, wrapped: Call, _: Any, args: Any, kwargs: Any) -> Any:
        """What the workers are to store in a step: nothing of requests whose identity is unknown."""
        metadata = wrapped(*args, **kwargs)
        for one in metadata.requests:
            if getattr(self.requests.get(one.req_id), SETTLED, True) or one.save_spec is None:
                continue
            one.save_spec.can_save = False
            # What a producer goes by, which it sends to a decode engine.
            one.save_spec.skip_leading_tokens = len(one.token_ids)
            one.disagg_spec = None
        return metadata


def _put(request: Any, tag: str | None) -> None:
    """Set our tag, or none, in sampling parameters that are this request's alone."""
    params = request.sampling_params = copy.copy(request.sampling_params)
    extra = dict(params.extra_args or {})
    given = {name: value for name, value in (extra.get("kv_transfer_params") or {}).items() if name != TAG}
    params.extra_args = {**extra, "kv_transfer_params": {**given, TAG: tag} if tag else given}

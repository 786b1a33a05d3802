"""What decides the KV of one engine's requests beside their ids, images and embeddings."""

from __future__ import annotations

import secrets
from typing import Any

from .adapters import Adapters
from .marks import Identity, more_than_ids


class Identities:
    """Of one engine: `lora` is whether LoRA is enabled, `fingerprint` the option."""

    def __init__(self, adapters: Adapters, lora: bool, fingerprint: str) -> None:
        self.adapters = adapters
        self.lora = lora
        self._given: Identity = (("fingerprint", fingerprint),) if fingerprint else ()
        self.all: Identity = self._given
        """Of every request. Another object after each `renew`."""

    def renew(self) -> bool:
        """Give later requests keys that nobody has; returns whether that is the first time.

        The engine may have other weights from now on. They are named at random: other engines may have others still.
        """
        first = self.all is self._given
        self.all = (*self._given, ("reset", secrets.token_hex(16)))
        return first

    def needed(self, request: Any) -> bool:
        """Whether a request's keys are to carry more than ids."""
        return self.lora or bool(self.all) or more_than_ids(request)

    def of(self, request: Any) -> Identity | None:
        """Of a request; None where it is unknown. Empty where ids, images and embeddings are all."""
        if not self.lora:
            return self.all
        adapter = request.lora_request
        if adapter is None:
            return (*self.all, ("base",))  # an unmarked entry may be an adapter's, from before
        found = self.adapters.identity(adapter)
        return None if found is None else (*self.all, found)

    def foreign(self, request: Any, computed: int) -> bool:
        """Whether a request's adapter has lost its identity, perhaps since the request's keys were made, or vLLM's own
        prefix cache, of which `computed` tokens are, may have other weights' KV for it."""
        adapter = request.lora_request
        if not self.lora or adapter is None:
            return False
        return bool(self.adapters.met(adapter).lost) or (computed > 0 and self.adapters.shares_a_name(adapter))

"""What the scheduler's side tells prefill's workers: which blocks each step leaves whole, and which are given back.

It goes with the connector's own metadata, as plain dictionaries and lists: a worker without this patch reads it too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PROGRESS = "_livepatch_computed"
"""Attribute of the connector's metadata: what `Prefills.progress` returned."""

Progress = dict[str, Any]
"""`whole`: {transfer: (ids of its whole blocks after this step, in order; how many blocks the prompt takes)};
`back`: transfers whose blocks are given back without having been sent; `over`: those that the release sends now;
`held`: {request: (transfer, ids of its blocks)} of prefills that were given up: these come back when no worker reads
them."""


@dataclass
class _Prefill:
    """A request whose KV a decode engine fetches. `computed`: its tokens, after the step that was announced last."""

    request: Any
    transfer: str
    preemptions: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    announced: bool = False  # workers know of whole blocks, and may read them
    back: bool = False  # it was preempted, or is computed anew: the release sends it, whole, at its end
    left: bool = False  # it is followed no more

    def preempted(self) -> bool:
        return bool(self.request.num_preemptions != self.preemptions)


class Prefills:
    """The requests of one scheduler that are computed for others."""

    def __init__(self, block_size: int, group: int = 0) -> None:
        self._block_size = block_size
        self._group = group
        self._kept: dict[str, _Prefill] = {}
        self._held: dict[str, tuple[str, list[int]]] = {}  # as it is announced next

    def progress(self, connector: Any, step: Any) -> Progress | None:
        """What to tell with a step, before the release makes its metadata of it. None: nothing."""
        ended = connector._reqs_need_send
        for name, (request, blocks) in ended.items():
            if not blocks and name not in self._kept:
                transfer = request.kv_transfer_params["transfer_id"]
                self._kept[name] = _Prefill(request, transfer, request.num_preemptions)
        if not self._kept:
            return None
        progress: Progress = {"whole": {}, "back": [], "over": [], "held": {}}
        gone = []
        for name, prefill in self._kept.items():
            request = prefill.request
            if request.is_finished():
                gone.append(name)
                if name not in self._held:
                    progress["over" if ended.get(name, (None, None))[1] else "back"].append(prefill.transfer)
            elif not prefill.back and (prefill.preempted() or request.num_computed_tokens < prefill.computed):
                prefill.back = True
                progress["back"].append(prefill.transfer)
        self._allot(step)
        for name, tokens in step.num_scheduled_tokens.items():
            step_of = self._kept.get(name)
            if step_of is not None and not step_of.back:
                progress["whole"][step_of.transfer] = self._whole(step_of, tokens)
        for name in gone:  # after all that may raise: `leave` is to know of them
            del self._kept[name]
        progress["held"], self._held = self._held, {}
        return progress if any(progress.values()) else None

    def hold(self, request: Any) -> str | None:
        """A prefill is given up. Its transfer, if workers may read blocks that it has: they say when they are free."""
        prefill = self._kept.get(request.request_id)
        if prefill is None or prefill.request is not request:
            return None
        if not prefill.announced or prefill.back or prefill.preempted():
            return None
        self._held[request.request_id] = prefill.transfer, prefill.blocks
        return prefill.transfer

    def leave(self) -> Progress | None:
        """Follow none of them any more: no worker is to read what they have computed, nor to go on reading.

        What is under way may not end soon: those whose blocks workers may read are still held when they are given up.
        """
        progress: Progress = {"whole": {}, "back": [], "over": [], "held": {}}
        for name, prefill in [*self._kept.items()]:
            given_back = prefill.back or prefill.preempted()
            if name not in self._held and (given_back or not prefill.left):
                progress["back"].append(prefill.transfer)
            if given_back or not prefill.announced or prefill.request.is_finished():
                del self._kept[name]
            prefill.left = True
        progress["held"], self._held = self._held, {}
        return progress if any(progress.values()) else None

    def _allot(self, step: Any) -> None:
        """Follow which blocks requests are given, of the group that leaves early."""
        for new in step.scheduled_new_reqs:
            if new.req_id in self._kept:
                self._kept[new.req_id].blocks = list(new.block_ids[self._group])
        cached = step.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if blocks and name in self._kept:
                self._kept[name].blocks += blocks[self._group]

    def _whole(self, prefill: _Prefill, tokens: int) -> tuple[list[int], int]:
        request = prefill.request
        prefill.computed = request.num_computed_tokens + tokens
        prefill.announced = True
        prompt = request.num_prompt_tokens
        whole = min(prefill.computed, prompt) // self._block_size
        return prefill.blocks[:whole], -(-prompt // self._block_size)

"""Which of a worker's memory is whose layer's, and what of a part of a prompt has left by layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OTHERS = ""
"""In the place of a layer's name: regions that are no layer's. They, or the fact that there are none, leave when a step
has ended: nothing is sent before."""


@dataclass(eq=False)
class Begun:
    """Blocks of which some layers have left. They are sent when all have, and the step that computes them has ended."""

    local: list[int]
    step: int
    left: set[str] = field(default_factory=set)  # the layers


class Layers:
    """The layers of a worker, by the memory of their caches. Raises ValueError where that overlaps."""

    def __init__(self, caches: Mapping[str, Any]) -> None:
        self._spans = {name: _span(cache) for name, cache in caches.items()}
        ends = 0
        for begin, end in sorted(self._spans.values()):
            if begin < ends:
                raise ValueError("caches of layers share memory")
            ends = end
        self.names = [*self._spans, OTHERS]

    def lacking(self, begun: Begun, computed: Iterable[str] | None = None) -> list[str]:
        """What has not left: of these layers, or of all."""
        return [name for name in (self.names if computed is None else computed) if name not in begun.left]

    def only(self, names: Sequence[str], local: Sequence[Any], remote: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Pairs of regions, those of some layers."""
        pairs = [pair for pair in zip(local, remote) if self._of(pair[0].base_addr) in names]  # noqa: B905, as the release
        return [one for one, _ in pairs], [other for _, other in pairs]

    def _of(self, address: int) -> str:
        return next((name for name, (begin, end) in self._spans.items() if begin <= address < end), OTHERS)


def _span(cache: Any) -> tuple[int, int]:
    """From where to where the elements of a tensor lie."""
    last = sum((number - 1) * stride for number, stride in zip(cache.shape, cache.stride(), strict=True))
    begin: int = cache.data_ptr()
    return begin, begin + (last + 1) * cache.element_size()

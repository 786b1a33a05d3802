"""What three patches or more write; in a patch: `from ...sitecustomize.kit import attached` (docs/wrappers.md)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_Made = TypeVar("_Made")
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def attached(owner: Any, name: str, make: Callable[[], _Made]) -> _Made:
    """Return the attribute `name` of one of the engine's objects, made when it is first asked for; it ends with it.

    Two threads that ask at once are given the same. `make` may be called by both, and is not called again later.
    """
    found: _Made | None = vars(owner).get(name)
    return vars(owner).setdefault(name, make()) if found is None else found


class Remembered(OrderedDict[_Key, _Value]):
    """A dict, the oldest first, that forgets its oldest beyond `most`.

    A plain dict would search for its first entry past all that were taken from its front.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def remember(self, key: _Key, value: _Value) -> None:
        """Set an entry, as the newest."""
        self[key] = value
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)


def leaves(connector: Any) -> Iterator[Any]:
    """Yield the connector itself, or the children of a MultiConnector, at any depth."""
    children = getattr(connector, "_connectors", None)
    if not isinstance(children, (list, tuple)):
        yield connector
        return
    for child in children:
        yield from leaves(child)

"""What stands in the place of one object's method, and is seen by nobody who asks for the method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class SeenThrough:
    """A call in the place of a method: whatever else is asked of it, or set, is the method's own.

    A plain function would hide it: who made the object, and put a method of its own there, such as a mock, would not
    find it again.
    """

    __slots__ = ("_livepatch_call", "_livepatch_method")

    def __init__(self, call: Callable[..., Any], method: Callable[..., Any]) -> None:
        object.__setattr__(self, "_livepatch_call", call)
        object.__setattr__(self, "_livepatch_method", method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._livepatch_call(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        return self._livepatch_method

    def __getattr__(self, name: str) -> Any:
        return getattr(self._livepatch_method, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._livepatch_method, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._livepatch_method, name)

"""Calls that a patch's wrapper answers by itself, which the wrapper of another patch that stands beneath it misses.

Looked at only around such a wrapper, when it has returned: an error, and a call that is given up, are no answer. What
it is given, and what it gives, is the same object.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from . import guard, no_function
from .context import PatchContext

_LATER = (inspect.isawaitable, inspect.isgenerator, inspect.isasyncgen)
"""What answers when it is asked in its turn: until then nobody knows whether it will call the original."""


def watched(wrapper: Any, context: PatchContext, passed: Callable[[], None]) -> Any:
    """The wrapper in its form; `passed` is called where it has returned, and has not called its original.

    An observer has it called. Nothing can stand for an asynchronous generator, so these are not looked at.
    """
    if isinstance(wrapper, (guard.Before, guard.After)) or inspect.isasyncgenfunction(wrapper):
        return wrapper
    made: Any
    if isinstance(wrapper, guard.Shortcut):
        made = guard.Shortcut(wrapper.make, watched(wrapper.wrapper, context, passed))
    elif isinstance(wrapper, no_function.Proxy):
        made = no_function.Proxy(watched(wrapper.wrapper, context, passed))
    else:
        made = functools.update_wrapper(_watching(wrapper, passed), wrapper, updated=())
    return context.lasting(made) if context.lasts(wrapper) else made


def _watching(wrapper: Callable[..., Any], passed: Callable[[], None]) -> Callable[..., Any]:
    async def coroutine(original: guard.Wrapped, /, *args: Any, **named: Any) -> Any:
        answer = await wrapper(original, *args, **named)
        if guard.is_unasked(original, later=True):
            passed()
        return answer

    def generator(original: guard.Wrapped, /, *args: Any, **named: Any) -> Any:
        answer = yield from wrapper(original, *args, **named)
        if guard.is_unasked(original, later=True):
            passed()
        return answer

    def function(original: guard.Wrapped, /, *args: Any, **named: Any) -> Any:
        answer = wrapper(original, *args, **named)
        if guard.is_unasked(original) and not any(later(answer) for later in _LATER):
            passed()
        return answer

    if inspect.iscoroutinefunction(wrapper):
        return coroutine
    return generator if inspect.isgeneratorfunction(wrapper) else function

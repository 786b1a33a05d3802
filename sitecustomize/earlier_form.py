"""Wrappers in the form of before 0.3, which are given (wrapped, instance, args, kwargs): told by their parameters."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any


def spread(wrapper: Callable[..., Any], form: str = "method") -> Callable[..., Any]:
    """A wrapper in the form of today. That of before is wrapt's (wrapped, instance, args, kwargs), and of a look
    (instance, args, kwargs) or (instance, args, kwargs, answer): known by these two names.

    `form`: what it is for, a `method`, a `function`, or a look `before` or `after`.
    """
    at = 1 if form in ("before", "after") else 2
    if _parameters(wrapper)[at : at + 2] != ("args", "kwargs"):
        return wrapper
    given: Any = wrapper
    forms: dict[str, Callable[..., Any]] = {
        "method": lambda wrapped, instance, *args, **kwargs: given(wrapped, instance, args, kwargs),
        "function": lambda wrapped, *args, **kwargs: given(wrapped, None, args, kwargs),
        "before": lambda instance, *args, **kwargs: given(instance, args, kwargs),
        "after": lambda answer, instance, *args, **kwargs: given(instance, args, kwargs, answer),
    }
    return forms[form]


def _parameters(wrapper: Any) -> tuple[str, ...]:
    """The names of the parameters that a call of it fills, also of a partial, a decorated function or an object."""
    filled = 0
    while not hasattr(wrapper, "__code__") or hasattr(wrapper, "__wrapped__"):
        if isinstance(wrapper, functools.partial):
            filled += len(wrapper.args)
            wrapper = wrapper.func
        elif hasattr(wrapper, "__wrapped__"):
            wrapper = wrapper.__wrapped__
        elif isinstance(getattr(type(wrapper), "__call__", None), types.FunctionType):  # noqa: B004
            wrapper = type(wrapper).__call__.__get__(wrapper)
        else:
            return ()
    filled += getattr(wrapper, "__self__", None) is not None
    code = wrapper.__code__
    return tuple(code.co_varnames[filled : code.co_argcount])

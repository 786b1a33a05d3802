"""What stands where a target stood: the patch's wrapper, and the release's own code wherever that raises.

A plain function each, not a proxy object: it binds, pickles and copies as the function that it stands for, also by
cloudpickle, and costs less a call than wrapt's.

torch.compile traces all of it, also an error of a wrapper's own. So there are no slots beside `__getattr__`, no call of
`types.MethodType`, and an error's attributes are not asked for there: it can trace none of these.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .earlier_form import spread

if TYPE_CHECKING:
    from .context import PatchContext

Wrapper = Callable[..., Any]  # of the original, and then of what the caller gives: of a method, its instance first

_DELIBERATE = "_livepatch_deliberate"


class Unwrappable(TypeError):
    """The message says what stands there."""


class Wrapped:
    """What a wrapper is given to call: the release's own code, bound. It keeps what that answered last."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._answer: Any = _NOT_ASKED

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            self._answer = answer = self._function(*args, **kwargs)
        except BaseException as error:
            self._answer = _Raised(error)
            raise
        return answer

    def answered_by(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call `function`, the release's own code in another form: its answer counts as that of what is wrapped."""
        try:
            self._answer = answer = function(*args, **kwargs)
        except BaseException as error:
            self._answer = _Raised(error)
            raise
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._function


class Before:
    """In a wrapper's place: `look(instance, ...)`, then the release's own code, as it was called."""

    __slots__ = ("__weakref__", "look")

    def __init__(self, look: Callable[..., None]) -> None:
        self.look = look


class After:
    """In a wrapper's place: the release's own code, then `look(answer, instance, ...)`."""

    __slots__ = ("__weakref__", "look")

    def __init__(self, look: Callable[..., None]) -> None:
        self.look = look


class Shortcut:
    """In a wrapper's place, for what each step of an engine calls: `make(release, guarded)` stands there.

    It gives a function with the parameters of that method or function, which calls one of the two with the arguments of
    the caller: `release`, the release's own code, or `guarded`, which is `wrapper` around it, guarded as any. Nothing
    guards the function that was made: it does what cannot raise, and leaves all else to `guarded`.
    """

    __slots__ = ("__weakref__", "make", "wrapper")

    def __init__(self, make: Callable[[Any, Any], Callable[..., Any]], wrapper: Wrapper | Before | After) -> None:
        self.make = make
        self.wrapper = wrapper


class _Raised:
    """The release's own code answered with an error."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


_NOT_ASKED = object()
_MEANT = object()
_CALLS = (Wrapped.__call__.__code__, Wrapped.answered_by.__code__)
_NEVER_RAN = "_livepatch_never_ran"
"""Attribute of a TypeError: what was called never ran, as the guard says that it passed last."""


def is_unasked(wrapped: Wrapped, later: bool = False) -> bool:
    """Whether the original was never called; `later`: by a coroutine or a generator, which its guard has left."""
    return wrapped._answer is (None if later else _NOT_ASKED)


class _Always:
    """The state of a patch, for a wrapper that goes on after its patch has stood aside."""

    aside = False


def in_place_of(original: Any, wrapper: Wrapper | Before | After | Shortcut, context: PatchContext, target: str) -> Any:
    """What takes the place of `original` in a class or module; of a property, its getter is wrapped.

    Raises Unwrappable for what a function cannot stand for: values that are kept (cached_property), slots, functions
    that are not Python's, objects that bind in ways of their own.
    """
    kind = type(original)
    if kind is staticmethod or kind is classmethod:
        inner = original.__func__
        if isinstance(inner, types.FunctionType):
            return kind(_function(inner, wrapper, context, target, alone=kind is staticmethod))
    elif kind is property:
        if isinstance(original.fget, types.FunctionType):
            getter = _function(original.fget, wrapper, context, target, alone=False)
            return property(getter, original.fset, original.fdel, original.__doc__)
    elif isinstance(original, types.FunctionType):  # or says that it is one, as wrapt's objects do
        alone = ":" in target and "." not in target.partition(":")[2]
        return _function(original, wrapper, context, target, alone)
    raise Unwrappable(f"a {kind.__module__}.{kind.__qualname__}")


def _function(
    original: Any, wrapper: Wrapper | Before | After | Shortcut, context: PatchContext, target: str, alone: bool
) -> Any:
    """In the place of a function; `alone` says that it is called without an instance or a class in front."""
    if isinstance(wrapper, Shortcut):
        guarded = _function(original, wrapper.wrapper, context, target, alone)
        made = wrapper.make(original if alone else _callable(original), guarded)
    elif isinstance(wrapper, (Before, After)):
        made = _looked_at(original, wrapper, context, target, alone)
    else:
        made = (of_function if alone else of_method)(original, wrapper, context, target)
    return _of_its_kind(original, made)


def code_of(wrapper: Wrapper | Before | After | Shortcut) -> Callable[..., Any]:
    """The patch's own function, which what stands at the target calls."""
    if isinstance(wrapper, Shortcut):
        return code_of(wrapper.wrapper)
    return wrapper.look if isinstance(wrapper, (Before, After)) else wrapper


KINDS = (
    ("a coroutine function", inspect.iscoroutinefunction),
    ("an asynchronous generator", inspect.isasyncgenfunction),
    ("a generator", inspect.isgeneratorfunction),
)


def of_another_kind(wrapper: Wrapper | Before | After | Shortcut, original: Any) -> str:
    """What a wrapper is that the original is not, so that no caller gets what it expects; empty where there is none.

    A coroutine function may be behind a decorator that says so.
    """
    code, look = code_of(wrapper), isinstance(wrapper, (Before, After))
    awaited = inspect.iscoroutinefunction(inspect.unwrap(original, stop=inspect.iscoroutinefunction)) or bool(
        getattr(getattr(original, "__code__", None), "co_flags", 0) & inspect.CO_ITERABLE_COROUTINE  # types.coroutine
    )
    for name, is_one in KINDS:
        alike = is_one(original) or (awaited and is_one is inspect.iscoroutinefunction)
        if is_one(code) and (look or not alike):
            return name
    return ""


def around(
    function: Callable[..., Any],
    wrapper: Wrapper | Before | After | Shortcut,
    context: PatchContext,
    where: str,
    of: Any = None,
) -> Callable[..., Any]:
    """The same for something that is called as it is: a bound method, or, with a wrapper, any callable.

    `of` is the object whose method it is. Somebody may have put a plain function in the method's place, which does not
    say so itself.
    """
    method: Any = function
    if isinstance(wrapper, (Before, After, Shortcut)):
        return types.MethodType(in_place_of(method.__func__, wrapper, context, f":{where}"), method.__self__)
    of = getattr(function, "__self__", None) if of is None else of
    bound = () if of is None or type(of) is types.ModuleType else (of,)
    made = of_function(function, wrapper, context, where, bound)
    functools.update_wrapper(made, function, updated=())
    if bound:
        vars(made)["__self__"] = of  # another patch's wrapper around this one is given the instance, too
    return made


def deliberate(error: BaseException) -> None:
    """Mark an error as one that a wrapper means for its caller."""
    setattr(error, _DELIBERATE, True)


# The two forms differ in what `wrapped` is. They are written out twice: each further call would cost every call.
#
# A wrapper has keyword arguments of its own, and may change them: the release's own code gets those of the caller. An
# answer that is an error refers to its frames, and these to `wrapped`, so it is forgotten at the end.


def of_method(original: Any, wrapper: Wrapper, context: PatchContext, target: str) -> Callable[..., Any]:
    """For what is called with its instance, or its class, in front."""
    gate: Any = _Always if context.lasts(wrapper) else context
    wrapper = _awaitable(original, spread(wrapper))
    stand_aside = _stands_aside(context, target)
    bind = original.__get__ if type(original) is types.FunctionType else functools.partial(_bound, original)

    def method(instance: Any, /, *args: Any, **kwargs: Any) -> Any:
        if gate.aside or instance is None:
            return original(instance, *args, **kwargs)
        wrapped = Wrapped(bind(instance))
        try:
            return wrapper(wrapped, instance, *args, **kwargs)
        except Exception as error:
            answer = _answered(error, wrapped, original, (instance, *args), kwargs, stand_aside)
            if answer is _MEANT:
                raise
        finally:
            wrapped._answer = None
        return original(instance, *args, **kwargs) if answer is _NOT_ASKED else _again(answer)

    return method


def _looked_at(
    original: Any, look_at: Before | After, context: PatchContext, target: str, alone: bool
) -> Callable[..., Any]:
    """A function, and a look at its calls; of a method not where its instance is None."""
    gate: Any = _Always if context.lasts(look_at) else context
    stand_aside = _stands_aside(context, target)
    look: Callable[..., None] = spread(look_at.look, "before" if isinstance(look_at, Before) else "after")
    call = original if alone else _callable(original)

    def before(*args: Any, **kwargs: Any) -> Any:
        if not gate.aside and (alone or (args and args[0] is not None)):
            try:
                look(*args, **kwargs)
            except Exception as error:
                stand_aside(error)
        return call(*args, **kwargs)

    def after(*args: Any, **kwargs: Any) -> Any:
        answer = call(*args, **kwargs)
        if not gate.aside and (alone or (args and args[0] is not None)):
            try:
                look(answer, *args, **kwargs)
            except Exception as error:
                stand_aside(error)
        return answer

    return before if isinstance(look_at, Before) else after


def of_function(
    original: Any, wrapper: Wrapper, context: PatchContext, target: str, of: tuple[Any, ...] = ()
) -> Callable[..., Any]:
    """For what is called as it is. `of` has the instance that it is bound to, if it is to one."""
    gate: Any = _Always if context.lasts(wrapper) else context
    wrapper = _awaitable(original, spread(wrapper, "method" if of else "function"))
    stand_aside = _stands_aside(context, target)

    def function(*args: Any, **kwargs: Any) -> Any:
        if gate.aside:
            return original(*args, **kwargs)
        wrapped = Wrapped(original)
        try:
            return wrapper(wrapped, *of, *args, **kwargs)
        except Exception as error:
            answer = _answered(error, wrapped, original, args, kwargs, stand_aside)
            if answer is _MEANT:
                raise
        finally:
            wrapped._answer = None
        return original(*args, **kwargs) if answer is _NOT_ASKED else _again(answer)

    return function


def _awaitable(original: Any, wrapper: Wrapper) -> Wrapper:
    """A wrapper of a coroutine function whose answer cannot be awaited has failed, before a caller awaits it."""
    if not inspect.iscoroutinefunction(original) or inspect.iscoroutinefunction(wrapper):
        return wrapper

    def awaitable(*args: Any, **kwargs: Any) -> Any:
        answer = wrapper(*args, **kwargs)
        if not inspect.isawaitable(answer):
            raise TypeError(f"what is to be awaited is a {type(answer).__name__}")
        return answer

    return functools.update_wrapper(awaitable, wrapper, updated=())


def _bound(original: Any, instance: Any) -> Any:
    """Somebody else's object binds in its own way."""
    return original.__get__(instance, type(instance))


def _callable(original: Any) -> Callable[..., Any]:
    """The original as a function of its instance and its arguments."""
    return original if type(original) is types.FunctionType else functools.partial(_called, original)


def _called(original: Any, instance: Any, /, *args: Any, **kwargs: Any) -> Any:
    return _bound(original, instance)(*args, **kwargs)


def _answered(
    error: Exception,
    wrapped: Wrapped,
    original: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stand_aside: Callable[[Exception], None],
) -> Any:
    """What the release's own code has answered, where an error is the wrapper's own; _MEANT, where it is the caller's:
    the release's, or one that a wrapper raises on purpose.
    """
    answer = wrapped._answer
    raised = answer.error if type(answer) is _Raised else None
    if type(raised) is TypeError and not traced() and _never_ran(raised, wrapped) and _takes(original, args, kwargs):
        answer = _NOT_ASKED  # the wrapper called it with what it does not take
    elif raised is error:
        return _MEANT
    elif not traced():
        if getattr(error, _DELIBERATE, False):
            return _MEANT
        if answer is _NOT_ASKED and not _takes(original, args, kwargs):
            return _NOT_ASKED  # the caller's own mistake, of which the release is to tell
    stand_aside(error)
    return answer


def _never_ran(error: TypeError, wrapped: Wrapped) -> bool:
    """Whether a call of `wrapped` raised it, and not what was called, which cannot be called so.

    What was called may be another patch's guard. The answer is noted on the error, for a guard around this one.
    """
    step = error.__traceback__
    while step is not None and not (step.tb_frame.f_code in _CALLS and step.tb_frame.f_locals.get("self") is wrapped):
        step = step.tb_next
    found = step is not None
    step = step.tb_next if step is not None else None
    while step is not None and step.tb_frame.f_code is _called.__code__:
        step = step.tb_next
    if found and step is not None:
        found = step.tb_frame.f_globals is globals() and (step.tb_next is None or getattr(error, _NEVER_RAN, False))
    setattr(error, _NEVER_RAN, found)
    return found


def _takes(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function of Python's can be called so; true where that is not known."""
    try:
        inspect.signature(original).bind(*args, **kwargs)
    except TypeError:
        return not isinstance(original, (types.FunctionType, types.MethodType))
    except Exception:
        return True
    return True


def traced() -> bool:
    """Whether torch.compile traces this call, rather than Python making it."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return compiler is not None and compiler.is_compiling()


def _stands_aside(context: PatchContext, target: str) -> Callable[[Exception], None]:
    """What is done about a wrapper's own error."""

    def while_traced(kind: str, text: str) -> None:
        by_python(type(kind, (Exception,), {})(text))

    # As torch.compiler.assume_constant_result: torch.compile calls it while it traces, and it is no part of the graph.
    while_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def by_python(error: Exception) -> None:
        with contextlib.suppress(Exception):  # at the end of the stack, or of memory, this may fail as well
            context.stand_aside(target, error)

    def stand_aside(error: Exception) -> None:
        if traced():
            while_traced(type(error).__name__, str(error))
        else:
            by_python(error)

    return stand_aside


def _again(answer: Any) -> Any:
    """What the release's own code has answered before."""
    if type(answer) is _Raised:
        raise answer.error
    return answer


def _of_its_kind(original: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Named and documented as the original. What `inspect` knows of its code must hold for the function too."""
    made = function
    if inspect.iscoroutinefunction(original):

        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await function(*args, **kwargs)

        made = coroutine
    elif inspect.isgeneratorfunction(original):

        def generator(*args: Any, **kwargs: Any) -> Any:
            return (yield from function(*args, **kwargs))

        made = generator
    return functools.update_wrapper(made, original)

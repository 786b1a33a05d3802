"""What a wrapper names of its target's parameters, and what is not to be so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_livepatch.sitecustomize import guard
from vllm_livepatch.sitecustomize.installed import Tree
from vllm_livepatch.tools.bundles import leading
from vllm_livepatch.tools.commands import locking
from vllm_livepatch.tools.errors import UserError

from tests.unit.support import Sandbox

SOURCE = """
class Scheduler:
    def step(self, number, again=False): ...
    def steps(self, number, *, fast): ...
    async def answer(self, number): ...
    def again(self, *, original): ...
    async def wait(self, *numbers): ...
    @decorated
    def named(self, *numbers): ...
    @staticmethod
    def made(config): ...
    @property
    def ready(self): ...
def begin(config, role=None): ...
"""


def passed(original: Any, scheduler: Any, number: Any, *rest: Any, **named: Any) -> Any: ...
def whole(original: Any, scheduler: Any, number: Any) -> Any: ...
def by_place(original: Any, scheduler: Any, number: Any, *rest: Any) -> Any: ...
def by_name(original: Any, scheduler: Any, number: Any, **named: Any) -> Any: ...
def other(original: Any, scheduler: Any, count: Any, *rest: Any, **named: Any) -> Any: ...
def more(original: Any, scheduler: Any, number: Any, again: Any, third: Any, *rest: Any, **named: Any) -> Any: ...
def forgotten(original: Any, number: Any, *rest: Any, **named: Any) -> Any: ...
def nothing(original: Any, scheduler: Any, *rest: Any, **named: Any) -> Any: ...
def of_function(original: Any, config: Any, *rest: Any, **named: Any) -> Any: ...
def look(scheduler: Any, number: Any, *rest: Any, **named: Any) -> Any: ...
def answered(answer: Any, scheduler: Any, number: Any, *rest: Any, **named: Any) -> Any: ...
def without(original: Any, *rest: Any, **named: Any) -> Any: ...
def positional(original: Any, /, scheduler: Any, *rest: Any, **named: Any) -> Any: ...
async def awaited(original: Any, scheduler: Any, *rest: Any, **named: Any) -> Any: ...
def yielding(original: Any, scheduler: Any, *rest: Any, **named: Any) -> Any:
    yield


def empty() -> Any: ...
def of_before(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any: ...
def getter(original: Any, scheduler: Any) -> Any: ...


@pytest.mark.parametrize(
    ("target", "wrapper", "why"),
    [
        ("Scheduler.step", passed, ""),
        ("Scheduler.step", nothing, ""),
        ("Scheduler.step", of_before, ""),
        ("Scheduler.step", guard.Before(look), ""),
        ("Scheduler.step", guard.After(answered), ""),
        ("Scheduler.step", guard.Shortcut(lambda release, guarded: guarded, passed), ""),
        ("Scheduler.steps", passed, ""),
        ("Scheduler.answer", passed, ""),
        ("Scheduler.made", of_function, ""),
        ("Scheduler.ready", getter, ""),
        ("begin", of_function, ""),
        ("Scheduler.step", other, "names count, and its parameters begin with number, again"),
        ("Scheduler.step", more, "names number, again, third, and its parameters begin with number, again"),
        ("Scheduler.step", forgotten, "names number where it is given the instance"),
        ("Scheduler.step", whole, "does not forward the rest"),
        ("Scheduler.step", by_place, "does not forward the rest"),
        ("Scheduler.step", by_name, "does not forward the rest"),
        ("Scheduler.steps", whole, "does not forward the rest"),
        ("Scheduler.answer", whole, "does not forward what a later release adds"),
        ("Scheduler.step", guard.Before(answered), "names scheduler, number, and its parameters begin with number"),
        ("Scheduler.step", without, "names no parameter for the instance"),
        ("Scheduler.made", without, ""),
        ("Scheduler.step", empty, "takes nothing"),
        ("Scheduler.again", nothing, "has a parameter called original: its wrapper begins with (original, /, ...)"),
        ("Scheduler.again", positional, ""),
        ("Scheduler.step", awaited, "its wrapper is a coroutine function, and it is not"),
        ("Scheduler.step", yielding, "its wrapper is a generator, and it is not"),
        ("Scheduler.wait", awaited, ""),
        ("Scheduler.wait", nothing, ""),
        ("Scheduler.wait", yielding, "its wrapper is a generator"),
        ("Scheduler.wait", guard.Before(awaited), "its wrapper is a coroutine function"),  # type: ignore[arg-type]
        ("Scheduler.named", awaited, ""),  # what a decorator makes is not known
        ("begin", passed, "names scheduler, number, and its parameters begin with config"),
    ],
)
def test_names(tmp_path: Path, target: str, wrapper: Any, why: str) -> None:
    (tmp_path / "engine.py").write_text(SOURCE)
    found = list(leading.misread({f"engine:{target}": wrapper}, Tree([str(tmp_path)])))
    assert len(found) == bool(why)
    assert all(why in one for one in found)


CODE = """
from .parts import other

def wrappers(livepatch):
    def step(original, scheduler, {parameter}, *rest, **named):
        return original({parameter}, *rest, **named)

    return {{TARGETS[0]: step}}
"""


@pytest.mark.parametrize(("parameter", "locked"), [("number", True), ("count", False)])
def test_lock_refuses_other_names(sandbox: Sandbox, parameter: str, locked: bool) -> None:
    sandbox.patch("my-fix", code=CODE.format(parameter=parameter), variant=[])
    folder = sandbox.patches / "my_fix"
    (folder / "parts.py").write_text("other = 1\n")
    asked = {("fakeengine", "1.0"): Tree([str(sandbox.site)])}
    if locked:
        list(locking.lock(folder, asked))
    else:
        with pytest.raises(UserError, match=r"my-fix, fakeengine 1\.0: .* names count, and its parameters"):
            list(locking.lock(folder, asked))
    assert (folder / "patch.lock").exists() is locked


def test_code_that_makes_nothing_is_one_line(sandbox: Sandbox) -> None:
    sandbox.patch("my-fix", code="raise SystemExit(3)", variant=[])
    with pytest.raises(UserError, match="its code makes no wrappers: SystemExit: 3"):
        list(locking.lock(sandbox.patches / "my_fix", {("fakeengine", "1.0"): Tree([str(sandbox.site)])}))

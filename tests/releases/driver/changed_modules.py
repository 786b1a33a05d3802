"""Imports modules and compares the code that they run with what other sources, DIRECTORY, make.

`python changed_modules.py DIRECTORY MODULE...` prints, as JSON, for each module: whether the loader's text and code are
those of DIRECTORY, how many of the functions that are reached through the loaded module are, of how many, and how many
of its definitions a wrapper is around.
"""

from __future__ import annotations

from result import print_result, take_stdout

take_stdout()

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code object and all those inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def functions_of(module: ModuleType) -> Iterator[FunctionType]:
    """The functions that a module defines, those of its classes included, without what decorators put around them."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) == module.__name__:
            members = vars(value).values() if inspect.isclass(value) else [value]
            for member in members:
                function = inspect.unwrap(_bare(member)) if callable(_bare(member)) else None
                if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                    yield function


def wrappers_in(module: ModuleType) -> int:
    """How many members of the module's classes are the bundle's."""
    guard = sys.modules["_vllm_livepatch.sitecustomize.guard"].__file__
    classes = [
        value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__
    ]
    members = [_bare(member) for owner in classes for member in vars(owner).values()]
    return sum(member.__code__.co_filename == guard for member in members if isinstance(member, FunctionType))


def _bare(member: Any) -> Any:
    return member.fget if isinstance(member, property) else getattr(member, "__func__", member)


def compare(name: str, sources: Path) -> dict[str, Any]:
    module = importlib.import_module(name)
    file = sources.joinpath(*name.split("."))
    text = (file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text("utf-8")
    wanted = compile(text, "new", "exec", dont_inherit=True)
    codes = {(code.co_qualname, code.co_firstlineno): code for code in codes_in(wanted)}
    functions = [function.__code__ for function in functions_of(module)]
    own = [code for code in functions if code.co_filename.endswith(".changed.py")]
    loader: Any = module.__loader__
    return {
        "text": loader.get_source(name) == text,
        "code": loader.get_code(name) == wanted,
        "shown": inspect.getsource(module) == text,
        "functions": len(own),
        "equal": sum(codes.get((code.co_qualname, code.co_firstlineno)) == code for code in own),
        "wrapped": wrappers_in(module),
        "file": module.__file__,
    }


if __name__ == "__main__":
    modules = {name: compare(name, Path(sys.argv[1])) for name in sys.argv[2:]}
    print_result({"modules": modules}, sys.modules["vllm"])

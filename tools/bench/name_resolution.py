"""griffe in the place of our own resolution of names across two packages: what it sees, and how long it takes.

    python -m vllm_livepatch.tools.bench.name_resolution

For each pair, both read the modules that our check of the pair reads, from memory. Counted are the imports there of the
other package, but for those under TYPE_CHECKING. Of griffe it is the time to visit the modules, before anything is
resolved or judged; of ours that of the whole check. Needs griffe, which is in the extra `test`.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm_livepatch.tools.bench.figures import Figures, duration
from vllm_livepatch.tools.compatibility import imports, pairs
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.releases import PACKAGES, published, registry

COLUMNS = (
    "pairs",
    "modules",
    "imports of the other package",
    "griffe keeps",
    "ours, the whole check",
    "griffe, visiting alone",
    "griffe over ours",
)


class Texts:
    """Modules' texts, in memory."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def source(self, module: str) -> str | None:
        return self._texts.get(module)


def measured() -> Figures:
    """The newest releases; and each vLLM with the newest LMCache, and each LMCache with the newest vLLM, in all."""
    vllm, lmcache = ([pin.version for pin in registry.pins(package)] for package in PACKAGES)
    newest = (vllm[-1], lmcache[-1])
    every = dict.fromkeys([*((release, newest[1]) for release in vllm), *((newest[0], release) for release in lmcache)])
    rows = []
    for what, several in ((f"vLLM {newest[0]} with LMCache {newest[1]}", [newest]), (f"all {len(every)}", list(every))):
        found = [compared(*pair) for pair in several]
        modules, there, kept = (sum(one[at] for one in found) for at in (0, 1, 2))
        ours, griffe = (sum(one[at] for one in found) for at in (3, 4))
        times = [duration(ours), duration(griffe), f"{griffe / ours:.2f}"]
        rows.append([what, str(modules), str(there), f"{kept} ({kept / there:.0%})", *times])
    return Figures("python -m vllm_livepatch.tools.bench.name_resolution", COLUMNS, rows)


def compared(vllm: str, lmcache: str) -> tuple[int, int, int, float, float]:
    """Modules, imports across, those that griffe keeps; seconds of ours and of griffe."""
    trees = {
        package: published.tree(package, release) for package, release in zip(PACKAGES, (vllm, lmcache), strict=True)
    }
    read = pairs.modules_read(*trees.values())
    texts = {name: text for name in read if (text := trees[name.partition(".")[0]].source(name)) is not None}
    files = {name: Path(str(trees[name.partition(".")[0]].origin(name))) for name in texts}
    across = {(name, taken) for name, text in texts.items() for taken in taken_across(name, text)}
    imports.parsed.cache_clear()
    imports.bound_names.cache_clear()
    begun = time.perf_counter()
    pairs.look(Texts(texts), Texts(texts))
    between = time.perf_counter()
    found = {one for name, text in texts.items() for one in kept_by_griffe(name, text, files[name])}
    return len(texts), len(across), len(across & found), between - begun, time.perf_counter() - between


def taken_across(module: str, text: str) -> Iterator[str]:
    """What a module imports of the other package, anywhere in it."""
    top = module.partition(".")[0]
    for node in imports.statements(imports.parsed(text), functions=True):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_other(alias.name, top))
        elif isinstance(node, ast.ImportFrom) and not node.level and _is_other(node.module or "", top):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def kept_by_griffe(module: str, text: str, file: Path) -> Iterator[tuple[str, str]]:
    """The same, with the module, of what griffe keeps of it and of its classes. Raises UserError without griffe."""
    try:
        import griffe
    except ImportError as error:
        raise UserError("griffe is not there: pip install 'vllm-livepatch[test]'") from error
    waiting: list[griffe.Module | griffe.Class] = [griffe.visit(module, filepath=file, code=text)]
    while waiting:
        one = waiting.pop()
        yield from ((module, taken) for taken in one.imports.values() if _is_other(taken, module.partition(".")[0]))
        waiting += [member for member in one.members.values() if isinstance(member, griffe.Class)]


def _is_other(name: str, top: str) -> bool:
    return name.partition(".")[0] in set(PACKAGES) - {top}


if __name__ == "__main__":
    measured().show()

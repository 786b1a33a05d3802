"""What patches remember and forget oldest first costs the same, however much was forgotten before.

A dict keeps the places of entries that were deleted, so that the search for its first entry passes all that were taken
from its front. An OrderedDict does not.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from vllm_livepatch import patches, sitecustomize
from vllm_livepatch.patches.nixl_lease_guard import lease_table
from vllm_livepatch.patches.stale_finished_recving import early_sends
from vllm_livepatch.sitecustomize.context import PatchContext
from vllm_livepatch.sitecustomize.kit import Remembered

ROOMS = [Path(next(iter(package.__path__))) for package in (patches, sitecustomize)]


class Counted(Remembered[Any, Any]):
    """Counts the entries that are looked at, and what is done. Also in the place of an OrderedDict."""

    done: ClassVar[Counter[str]] = Counter()

    def __init__(self, most: int = 0) -> None:
        super().__init__(most)

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            self.done["entry"] += 1
            yield key

    def __contains__(self, key: object) -> bool:
        self.done["in"] += 1
        return super().__contains__(key)

    def popitem(self, last: bool = True) -> tuple[Any, Any]:
        self.done["popitem"] += 1
        return super().popitem(last)


def _sends() -> Callable[[int], None]:
    sends = early_sends.ChildSends(PatchContext("stale-finished-recving", {}, {}, lambda: None))

    def step(n: int) -> None:
        """Two requests end, of which the child sends one."""
        assert sends(lambda _: ({f"sent-{n}"}, None), None, {f"{n}", f"sent-{n}"}) == ({f"sent-{n}"}, None)

    return step


def _leases() -> Callable[[int], None]:
    table = lease_table.LeaseTable()

    def end(n: int) -> None:
        assert table.publish(f"{n}")
        assert table.withdraw(f"{n}", unread=True)

    return end


@pytest.mark.parametrize(("module", "made"), [(early_sends, _sends), (lease_table, _leases)])
def test_a_call_does_as_much_when_a_great_deal_was_forgotten(
    module: Any, made: Callable[[], Callable[[int], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 64)
    monkeypatch.setattr(module, "Remembered" if hasattr(module, "Remembered") else "OrderedDict", Counted)
    call = made()
    counts = []
    for n in range(1, 2048):
        Counted.done = Counter()
        call(n)
        counts.append(Counted.done)
    assert counts[100]["popitem"] == 1, "it forgets by then, by this structure"
    assert counts[100]["entry"] == 0
    assert all(count == counts[100] for count in counts[100:])


@pytest.mark.parametrize(
    "file", sorted(file for room in ROOMS for file in room.rglob("*.py")), ids=lambda file: file.stem
)
def test_no_dict_is_trimmed_at_its_front(file: Path) -> None:
    found = [ast.unparse(node) for node in ast.walk(ast.parse(file.read_text("utf-8"))) if _trims(node)]
    assert found == []


def _trims(node: ast.AST) -> bool:
    """`del d[next(iter(d))]`, `d.pop(next(iter(d)))`."""
    if isinstance(node, ast.Delete):
        places: list[ast.expr] = [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "pop":
        places = node.args[:1]
    else:
        return False
    return any(ast.unparse(place).startswith(("next(iter(", "list(")) for place in places)

"""What a load says of the bundle, stock beside patched: each finding is a sentence, and there are to be none.

A container with a bound (65,536 ids, in several patches) is flat once it is full: a load must be long enough for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

RATIO = 2.2
"""So many times the operations of a load are the most that twice the load may cost."""
FEW = 2000
"""Operations below which a ratio says nothing."""
SPREAD = 1.5
"""So many times what a container mostly had in the first half of a load is what it may mostly have in the second..."""
SOME = 64
"""...and so many entries more. Mostly, since a container has what is under way: twice as much at one moment as at the
next. What grows stays."""
FAILS = "the driver fails"
"""The case of a mixed fleet that could not be played."""


def findings(stock: Mapping[str, Any], patched: Mapping[str, Any]) -> list[str]:
    """What is worse than on stock, costs more than in proportion, or grows."""
    found = list(_growing(patched.get("kept", ())))
    if patched["ends"] != stock["ends"]:
        found.insert(0, f"stock ends with {stock['ends']}, patched with {patched['ends']}")
    elif "operations" in patched:
        found += _disproportionate(*patched["operations"])
    found += [f"the first entry of {name} is searched for" for name in patched.get("slow", ())]
    for name, more in patched.get("grown", {}).items():
        known = stock.get("grown", {}).get(name, more)
        if more > known:
            found.append(f"{name}: {more} more, on stock {known}")
    if isinstance(stock["ends"], str) or "never ends" in stock["ends"]:
        found.append(f"stock itself ends with {stock['ends']}: the load shows nothing of the bundle")
    return found


def differences(stock: Mapping[str, Any], cases: Mapping[str, Any]) -> list[str]:
    """Which cases of a mixed fleet do not come to what they come to on stock; and how a driver fails, also on stock."""
    names = [*stock, *(name for name in cases if name not in stock)]
    return [
        f"{name}: {cases.get(name)}, on stock {stock.get(name)}"
        for name in names
        if cases.get(name) != stock.get(name) or name == FAILS
    ]


def _disproportionate(once: Mapping[str, int], twice: Mapping[str, int]) -> Iterator[str]:
    for patch, operations in sorted(twice.items()):
        before = once.get(patch, 0)
        if operations > max(FEW, RATIO * before):
            yield f"{patch} executes {before} operations, and {operations} for twice the load"


def _growing(looks: Sequence[Mapping[str, int]]) -> Iterator[str]:
    half = len(looks) // 2
    for name in sorted({name for look in looks for name in look}):
        sizes = [look.get(name, 0) for look in looks]
        if half and median(sizes[half:]) > SPREAD * median(sizes[:half]) + SOME:
            yield f"{name} grows: {sizes}"

"""The page of the mutation figures, from what `mutation` has kept."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

KILLED = ("killed", "timeout")
HEAD = """# Mutation figures

A mutant is one module with one small change: a condition negated, a comparison moved by one, a number changed, an
exception not caught, a loop that does not run. The unit tests must notice it. The operators are
[Cosmic Ray's](https://github.com/sixty-north/cosmic-ray); `tools/upkeep/mutation.toml` lists those used, and the tests.

    pip install '.[lab,test,mutation]'
    python -m vllm_livepatch.tools.upkeep.mutation run sitecustomize/settings.py
    python -m vllm_livepatch.tools.upkeep.mutation run --draw 5 --seed 5 --sample 5 'sitecustomize/*.py'
    python -m vllm_livepatch.tools.upkeep.mutation report

`run` changes a copy of the checkout. For each mutant it runs the unit tests that execute the function, the quick ones
first, at most 10 s of them (25 s for about half of the first draw of `sitecustomize/`), and stops at the first that
fails. A patch's mutant that they do not notice gets the patch's release tests, those that `mutation.toml` lists. What
survives may be run once more with `--again --seconds 40`, more of the same tests: three of the first draw were, and
most of what survived of the later ones. (Which test executes what is seen in a run in which each function writes its
name, also in the processes that tests start.) Not made: mutants of annotations, which nothing evaluates, and those that
do not compile. "Timeout" counts as killed: four times what the same tests take unchanged, and 10 s. A survivor that
does what the original does, or differs in what nobody is promised, is listed with its reason and left out of the share.
A change outside of functions, as in most of `entry.py`, is executed by every test: the quick ones that have their turn
may not be those that notice it.

"All" means that each mutant was run. Where a part was drawn (with a seed), the share has its 95 % interval (Wilson).
The draws are about as large for a small module as for a large one: the share of a folder is that of its draws.
A survivor for which a test was written afterwards still counts as one, since it was that test's model; `run --since`
says which test notices it now; 15 were run by hand, with the test that is about them. Not so in the modules of
`sitecustomize/` of which all were run: on 2026-11-24 tests were written for their survivors, and all of these were run
again, with 40 s of tests each. So their share says that each of their mutants was looked at, and not what the tests
would notice of others: that is in the draws. Of the other modules, whose code changed on 2026-11-27, six mutants each
were drawn (draw 6).
Nor in the second draw of `patches/`, of 2026-11-25. It was run with the unit tests alone at first; six patches that had
few of them, or none, got their release tests too. Then tests were written for its survivors, and these were run again,
those that still survived with the release tests. It has none of the Mooncake patches, which are in the fourth and
fifth. The third draw was ended early. Where a share is of about ten mutants it says little: see its interval.
Modules that are not listed were not measured.
"""

DRAWS = """## Draws

A draw after the first takes none of what was run before. Its share at first, with its 95 % interval, is an independent
measure of the tests as they were then: none of them was written for its mutants. Some of its survivors would have been
noticed by tests that had no turn in so many seconds. The other columns are of now, when survivors have been run again.
A module that was changed since begins anew, in the last draw: its earlier mutants are counted nowhere.
"""


def interval(killed: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z, share = 1.959964, killed / count
    middle, width = (
        share + z * z / (2 * count),
        z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)),
    )
    whole = 1 + z * z / count
    return (middle - width) / whole, (middle + width) / whole


def reason(module: str, mutant: Mapping[str, Any], reasons: Iterable[Mapping[str, Any]]) -> str | None:
    """Why this mutant is no different, where the configuration says so."""
    for one in reasons:
        if one["module"] == module and one["was"] == mutant["was"] and mutant["now"] in one["now"]:
            return str(one["because"])
    return None


def page(
    kept: Sequence[Mapping[str, Any]],
    reasons: Sequence[Mapping[str, Any]],
    draws: Sequence[Mapping[str, Any]] = (),
    changed: Sequence[str] = (),
) -> str:
    """The page; `kept` has an object for each module, `draws` one for each draw of a folder, `changed` what changed."""
    rows = [
        "| module | mutants | run | killed | timeout | equivalent | survived | share killed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    drawn: dict[str, Counter[str]] = {}
    rooms: dict[str, Counter[str]] = {}
    by_draw: dict[tuple[str, int], Counter[str]] = {}
    equivalent: list[list[str]] = []
    survivors: list[list[str]] = []
    for one in sorted(kept, key=lambda one: str(one["module"])):
        module, mutants = one["module"], one["mutants"]
        room = module.partition("/")[0]
        count = Counter(mutant["outcome"] for mutant in mutants)
        of = Counter(mutant.get("draw", 1) for mutant in mutants)
        for number, run in of.items():
            if run < one["possible"]:  # else nothing was drawn: all were run
                whole = by_draw.setdefault((room, number), Counter())
                whole.update(mutant["outcome"] for mutant in mutants if mutant.get("draw", 1) == number)
                whole["run"] += run
        for mutant in sorted(mutants, key=lambda mutant: (mutant["line"], mutant["operator"], mutant["occurrence"])):
            if mutant["outcome"] == "survived":
                because = reason(module, mutant, reasons)
                count["equivalent"] += because is not None
                number = mutant.get("draw", 1)
                if because is not None and (room, number) in by_draw and of[number] < one["possible"]:
                    by_draw[room, number].update(equivalent=1, survived=-1)
                where = f"`{module}:{mutant['line']}`" + (f", draw {number}" if number > 1 else "")
                cells = [where, _code(mutant["was"]), _code(mutant["now"])]
                if because is None:
                    since = mutant.get("since", "survived")
                    survivors.append([*cells, "" if since == "survived" else f"`{since.rpartition('/')[2]}`"])
                else:
                    equivalent.append([*cells, because])
        count["survived"] -= count["equivalent"]
        count["mutants"], count["run"] = one["possible"], len(mutants)
        rooms.setdefault(room, Counter()).update(count)
        if count["run"] < count["mutants"]:
            drawn.setdefault(room, Counter()).update(count)
        rows.append(_row(f"`{module}`", count))
    rows += [_row(f"**`{room}/`, where a part was drawn**", count) for room, count in sorted(drawn.items())]
    rows += [_row(f"**`{room}/`**", count) for room, count in sorted(rooms.items()) if room not in drawn]
    dates = ", ".join(sorted({one["date"] for one in kept})) or "no day yet"
    lines = [HEAD, f"Measured on {dates}.", ""]
    if changed:
        names = ", ".join(f"`{name}`" for name in changed)
        lines += [f"**The code of these changed since; their figures are of the code before:** {names}.", ""]
    lines += [*rows, ""]
    described = {(one["folder"], one["number"]): one for one in draws}
    shown = [
        [f"`{room}/`", str(number), described[room, number]["what"], *_figures(count)]
        for (room, number), count in sorted(by_draw.items())
        if (room, number) in described
    ]
    if shown:
        heads = ("folder", "draw", "at first", "run", "killed", "timeout", "equivalent", "survived", "share killed")
        lines += [DRAWS, *_table(heads, shown), ""]
    lines += ["## Survivors", ""]
    lines += _table(("where", "was", "mutant", "noticed since by"), survivors) or ["None."]
    lines += ["", "## Survivors that do what the original does", ""]
    lines += _table(("where", "was", "mutant", "why"), equivalent) or ["None."]
    return "\n".join(lines) + "\n"


def _row(name: str, count: Mapping[str, int]) -> str:
    run, *figures, share = _figures(count)
    whole = count["run"] == count["mutants"]
    shown = "all" if whole else run
    cells = [name, str(count["mutants"]), shown, *figures, share.partition(" (")[0] if whole else share]
    return f"| {' | '.join(cells)} |"


def _figures(count: Mapping[str, int]) -> list[str]:
    """How many were run, killed, timed out, are equivalent and survived, and the share of the killed."""
    killed = count["killed"] + count["timeout"]
    counted = killed + count["survived"]
    share = ""
    if counted:
        low, high = interval(killed, counted)
        share = f"{100 * killed / counted:.1f} % ({100 * low:.0f} to {100 * high:.0f})"
    return [*(str(count[name]) for name in ("run", "killed", "timeout", "equivalent", "survived")), share]


def _code(text: str) -> str:
    return "`" + (text.replace("|", "\\|") or " ") + "`"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {' | '.join(row)} |" for row in rows)]

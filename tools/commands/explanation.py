"""What `check` prints: a line a patch, then each distinct change of the code once, with the patches that it stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text
from vllm_livepatch.sitecustomize.decision import APPLIED, variable
from vllm_livepatch.tools.commands.listing import Listing
from vllm_livepatch.tools.commands.rendering import FAULT, coloured, table_of
from vllm_livepatch.tools.compatibility.check import Checked
from vllm_livepatch.tools.compatibility.drift import Drift
from vllm_livepatch.tools.in_bundle.grouping import titled

MOST = 3
"""Of the names that a module lacks, so many are named."""
OFF = {"rocm": "off outside ROCm", "traced": "off: no traced code"}
"""Why `auto` does not apply a patch that is needed; else it is off by default everywhere."""


@dataclass
class Stop:
    """One change of the code, in the place of code that was verified, and the patches that it stops."""

    name: str  # of what has changed; of what is gone, its module
    against: str  # a package and its release
    lines: tuple[str, ...] = ()  # of the diff
    gone: dict[str, None] = field(default_factory=dict)  # names that the module does not have any more
    place: str = ""  # the module that has exactly their code
    patches: list[Checked] = field(default_factory=list)


def print_check(
    console: Console, packages: Mapping[str, str | None], answers: Sequence[Checked], verbose: bool = False
) -> None:
    """`packages`: the release of each distribution that was looked at, by its name."""
    found = ", ".join(f"{name} {release or 'of unknown release'}" for name, release in packages.items())
    console.print(Text(f"checked: {found or 'none of the packages that these patches are for'}"))
    stops = _stops(answers)
    rows = Listing("patch", "verdict", "applies", "why" if verbose else "fault, or why not")
    for heading, some in titled(answers, lambda answer: answer.patch):
        if heading and verbose:  # with what drifted, all has to fit a screen: there the order alone says it
            rows.add_heading(f"{heading}:")
        for answer in some:
            why = answer.decision.detail if verbose else _short(answer, stops)
            applies = "yes" if answer.decision.apply else "no"
            rows.add_row(answer.patch.name, coloured(answer.decision.verdict), applies, Text(why))
    console.print(rows)
    applied = sum(answer.decision.apply for answer in answers)
    off = any(answer.decision.reason == "optional" for answer in answers)
    hint = "" if verbose or not off else f"; {variable('NAME')}=on applies one that is off; --verbose says more"
    console.print(Text(f"{applied} of {len(answers)} apply{hint}"))
    for answer in answers:
        if answer.decision.reason in ("mismatch", "unwrappable") and not verbose:
            console.print(Text(f"{answer.patch.name}: a process refuses it: {answer.decision.detail}"), soft_wrap=True)
        for holder in (one for one in answer.held if not one.covered):
            refuses = "a process refuses it (captured)" if holder.certain else "a process may refuse it (captured)"
            console.print(Text(f"{answer.patch.name}: {refuses}: {holder.sentence}"), soft_wrap=True)
    for number, stop in enumerate(stops, 1):
        _print_stop(console, number, stop)
    for answer in answers:
        if answer.drift is not None:
            _print_rest(console, answer, answer.drift)
            if verbose:
                _print_variants(console, answer.patch.name, answer.drift)
        elif answer.decision.verdict == "drifted" and not verbose:
            console.print(Text(f"\n{answer.patch.name}: {answer.decision.detail}"))


def _stops(answers: Sequence[Checked]) -> list[Stop]:
    found: dict[tuple[object, ...], Stop] = {}
    for answer in answers:
        if answer.drift is None:
            continue
        against = f"{answer.drift.package} {answer.drift.release}"
        for change in answer.drift.changes:
            module, _, qualname = change.name.partition(":")
            place = answer.drift.moved.get(change.name, "")
            if change.gone:
                stop = found.setdefault((against, module, place), Stop(module, against, place=place))
                stop.gone[qualname] = None
            else:
                key = (against, change.name, change.lines)
                stop = found.setdefault(key, Stop(change.name, against, change.lines))
            if answer not in stop.patches:
                stop.patches.append(answer)
    return list(found.values())


def _short(answer: Checked, stops: Sequence[Stop]) -> str:
    """The fault of a patch that is applied, else why it is not; the numbers are those of the changes below."""
    decision = answer.decision
    if decision.apply and decision.verdict in APPLIED:
        return str(answer.patch.about.get("fault", ""))
    numbers = [str(number) for number, stop in enumerate(stops, 1) if answer in stop.patches]
    changed = ""
    if numbers:
        changed = f"see {', '.join(numbers)}" if len(numbers) < 5 else f"see {', '.join(numbers[:3])} and others"
    off = OFF.get(answer.patch.auto, "off by default") if decision.reason == "optional" else ""
    if changed or (off and decision.verdict in APPLIED):
        return "; ".join(filter(None, (off, changed)))
    if decision.reason == "replaced":
        return f"{decision.detail.partition(' ')[0]} instead of it"
    last = decision.detail.rpartition("; ")[2]
    return last if len(last) <= FAULT else ""


def _print_stop(console: Console, number: int, stop: Stop) -> None:
    console.print(Text(f"{'' if number == 1 else chr(10)}{number}. {stop.name}", style="bold"), soft_wrap=True)
    if stop.gone:
        names = [name or "the module itself" for name in stop.gone]
        more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
        console.print(Text(f"   has no {', '.join(names[:MOST])}{more}; {stop.against} has"))
    else:
        around = "" if stop.lines else ", in what stands around it"
        console.print(Text(f"   differs from {stop.against}{around}"))
    if stop.place:
        console.print(Text(f"   exactly such code is in {stop.place}"))
    for line in stop.lines:
        style = {"-": "red", "+": "green", "@": "cyan"}.get(line[:1], "")
        console.print(Text(line, style=style), soft_wrap=True)
    needed: dict[bool, list[str]] = {True: [], False: []}
    for answer in stop.patches:
        assert answer.drift is not None
        needed[answer.drift.nearest.verdict == "needed"].append(answer.patch.name)
    for is_needed, names in needed.items():
        if names:
            console.print(Text(f"   stops, {'needed' if is_needed else 'not needed'} there: {', '.join(names)}"))


def _print_rest(console: Console, answer: Checked, drift: Drift) -> None:
    """What no change says."""
    if drift.unread or not drift.changes:
        for target, place in drift.moved.items():
            console.print(Text(f"{target} has another place: {place} has exactly such code"), soft_wrap=True)
    if drift.unread:
        console.print(Text(f"{answer.patch.name}: {answer.decision.detail}"))
        console.print(Text(f"its code cannot be shown: {drift.unread}"))
    elif not drift.changes:
        console.print(Text(f"{answer.patch.name}: {answer.decision.detail}"))


def _print_variants(console: Console, name: str, drift: Drift) -> None:
    """Which releases had which code."""
    console.print(Text(f"\n{name}: the code that was verified", style="bold"))
    rows = table_of("verified variant", "verdict", "what differs from it")
    for variant, differs in drift.variants:
        rows.add_row(", ".join(variant.releases), coloured(variant.verdict), Text("\n".join(differs) or "nothing"))
    console.print(rows)

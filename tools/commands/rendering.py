"""What a person looks at: tables and pages. Plain text where the output is piped."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from vllm_livepatch.sitecustomize import settings
from vllm_livepatch.sitecustomize.decision import Option, Patch, variable
from vllm_livepatch.tools.commands.listing import Listing
from vllm_livepatch.tools.compatibility.drift import version_key
from vllm_livepatch.tools.in_bundle import summary as plain
from vllm_livepatch.tools.in_bundle.grouping import titled
from vllm_livepatch.tools.in_bundle.status import Reports
from vllm_livepatch.tools.releases import span

COLOURS = {
    "needed": "green",
    "applied": "green",
    "proven": "green",
    "unverified": "yellow",
    "armed": "yellow",
    "drifted": "red",
    "failed": "red",
    "fixed-upstream": "dim",
    "not-present": "dim",
    "skipped": "dim",
}

DEFAULTS = {"rocm": "on ROCm", "traced": "beside patches of traced code", "off": "off"}
"""Where a patch is on by default, in a table's cell: `needed` alone reads as if it applied."""
BY_DEFAULT = {
    "rocm": "`auto` applies it on ROCm only; {name}=on applies it anywhere",
    "traced": "`auto` applies it only beside patches that change traced code",
    "off": "`auto` does not apply it; {name}=on does",
}
"""What to say of a patch that `auto` does not apply wherever it is needed."""

FAULT = 26
"""Characters that `about.fault` has at most: on a terminal of 80 columns it stands in a row."""

SEEN = ("ends", "wrong", "stuck", "mooncake", "slow")
"""The tables of docs/troubleshooting.md: what a row of `about.seen` stands `under`."""

MEANINGS = {
    "partly": "the other targets' modules are not imported in this process. Where they never are, nothing is amiss",
    "bypassed": "the class named overrides the patched method without calling it: its objects run without the patch",
    "covered": "another patch's wrapper has answered calls by itself, which this patch did not see",
    "raised": "an error of the patch's own. The release's own code answers now; report the error",
    "overwritten": "somebody else replaced the patched code later: this process may run without the patch",
    "foreign": "somebody else had replaced the code before: this process runs without the patch",
    "imported": "the module was imported before the patch could change it: this process runs without the patch",
    "late": "the bundle was armed late, or not at all: the detail says why. This process runs without the patch",
    "drifted": "the code differs from every verified version. `vllm-livepatch check` shows where",
    "disproven": "the patch's proof was run on exactly this code, and failed there: what it does is not right here",
}
"""What a reason asks of an operator. Said below a process' patches, where one of them has it."""


def coloured(word: str) -> Text:
    return Text(word, style=COLOURS.get(word, ""))


def table_of(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        # Names stay whole, so that they can be searched for and copied.
        table.add_column(column, overflow="fold", no_wrap=column.strip() in ("patch", "variable", "counter"))
    return table


def releases(patch: Patch, verdict: str) -> list[str]:
    """The releases of a verdict, oldest first."""
    found = [release for variant in patch.variants if variant.verdict == verdict for release in variant.releases]
    return sorted(found, key=version_key)


def summary(patch: Patch) -> dict[str, Any]:
    return {
        "name": patch.name,
        "version": patch.version,
        "title": patch.title,
        "package": patch.package,
        "needed": releases(patch, "needed"),
        "fixed-upstream": releases(patch, "fixed-upstream"),
        **({"companions": _companions(patch)} if patch.companions else {}),
        "variable": variable(patch.name),
    }


def _companions(patch: Patch) -> dict[str, list[str]]:
    """The releases that it was verified with, of each other package."""
    return {
        package: [release for form in forms if form.code for release in form.releases]
        for package, forms in patch.companions.items()
    }


def catalogue_table(patches: Iterable[Patch]) -> Group:
    """A line a patch, by group, on a terminal of 80 columns; below them, how a group is turned off."""
    grouped = titled(patches, lambda patch: patch)
    table = table_of("patch", "without it", "needed on", "auto")
    table.collapse_padding = True
    for heading, some in grouped:
        if heading:
            table.add_row()
            table.add_row(Text(f"{heading}:", style="bold"))
        for patch in some:
            needed = f"{patch.package} {span(releases(patch, 'needed')).replace(' to ', '-')}"
            auto = {"needed": "on", "traced": "off"}.get(patch.auto, patch.auto)
            table.add_row(patch.name, str(patch.about.get("fault", patch.title)), needed, auto)
    switch = settings.of_group(next((patch.group for _, some in grouped for patch in some if patch.group), ""))
    hint = Text(f"\n{switch}=off turns a group off; docs/status.md has all groups")
    return Group(table, hint) if any(heading for heading, _ in grouped) else Group(table)


def explained(option: Option) -> str:
    """What an option is, and which values it takes."""
    allowed = settings.wanted(option)
    return f"{option.help} ({allowed})" if allowed else option.help


def print_page(console: Console, patch: Patch) -> None:
    """The page for somebody who has the symptom."""
    about = patch.about
    console.print(Text(patch.versioned, style="bold"), Text(patch.title))
    sections = {"What one sees": "symptom", "Why": "why", "What changes": "change", "Limits": "limits"}
    for heading, entry in sections.items():
        if entry in about:
            console.print(Text(f"\n{heading}", style="bold"))
            console.print(Text(str(about[entry]).strip().replace("\n", "\n\n")))
    if patch.auto in BY_DEFAULT:
        console.print(Text("\nTurn it on", style="bold"))
        console.print(Text(BY_DEFAULT[patch.auto].format(name=variable(patch.name))))
    console.print(Text("\nTurn it off", style="bold"))
    console.print(Text(f"{variable(patch.name)}=off (this patch), LIVEPATCH=off (everything)"))
    if patch.aliases:
        console.print(Text(f"Also switched by {', '.join(patch.aliases)} (1 or 0)"))
    if patch.options:
        console.print(Text("\nOptions", style="bold"))
        table = table_of("variable", "default", "meaning")
        for option in patch.options:
            names = "\n".join((variable(patch.name, option.name), *option.aliases))
            table.add_row(names, str(option.default), explained(option))
        console.print(table)
    if "counters" in about:
        console.print(Text("\nWhat `status` counts", style="bold"))
        table = table_of("counter", "meaning")
        for kind, meaning in about["counters"].items():
            table.add_row(kind, meaning)
        console.print(table)
    console.print(Text("\nWhere it comes from", style="bold"))
    for entry in ("origin", "upstream", "last_update"):
        if entry in about:
            console.print(Text(f"{entry.replace('_', ' ')}: {about[entry]}"))
    if "threads" in about:
        console.print(Text(f"threads: {', '.join(about['threads'])}"))
    console.print(Text("\nReleases", style="bold"))
    table = table_of("verdict", "releases", "fingerprint of the first target")
    for variant in sorted(patch.variants, key=lambda variant: [*map(version_key, variant.releases)]):
        first = next(iter(patch.targets_of(variant)), None)
        table.add_row(coloured(variant.verdict), ", ".join(variant.releases), variant.code[first] if first else "")
    console.print(table)
    for package, companions in patch.companions.items():
        console.print(Text(f"\nReleases of {package} that it relies on, where installed", style="bold"))
        table = table_of("its code", "releases")
        for form in companions:
            table.add_row("verified" if form.code else "not there yet", ", ".join(form.releases))
        console.print(table)
    console.print(Text("\nTargets", style="bold"))
    for target in patch.targets:
        console.print(Text(f"patched  {target}"))
    for call in patch.calls:
        console.print(Text(f"called   {call}"))


def status_view(reports: Reports, directory: Path, everything: bool = False) -> RenderableType:
    """The processes with their patches; of many, unless `everything` is asked, as many as fit on the screen."""
    processes = reports.live
    if plain.is_a_crowd(reports, everything):
        return Text(plain.overview(reports))
    if not processes:
        return Text(f"no live patched process has a report in {directory}")
    parts: list[RenderableType] = []
    for process in processes:
        parts += [Text(plain.head(process), style="bold"), Text(f"  {plain.command_of(process)}", style="dim")]
        table = Listing("  patch", "state", "verdict", "counters", "why")
        for patch in process["patches"]:
            counters = plain.counted(patch["counters"]) or "-"
            row = (coloured(patch["state"]), patch["verdict"] or "", counters, Text(plain.why(patch)))
            table.add_row(f"  {plain.versioned(patch)}", *row)
        parts.append(table)
        reasons = {patch["reason"] for patch in process["patches"]}
        parts += [Text(f"  {reason}: {text}", style="dim") for reason, text in MEANINGS.items() if reason in reasons]
    if any(patch["counters"] for process in processes for patch in process["patches"]):
        parts.append(
            Text(
                "vllm-livepatch show PATCH says what its counters count; of a patch of your own, with --patch-dir DIR",
                style="dim",
            )
        )
    return Group(*parts)

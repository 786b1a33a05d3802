"""What the documentation has of each patch, made from its folder: its page, and its rows in the pages about all.

python -m vllm_livepatch.tools.upkeep.patch_pages docs/patches     # writes a page a patch, removes others
"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from vllm_livepatch.sitecustomize.decision import Patch, variable
from vllm_livepatch.sitecustomize.settings import of_group
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.commands import ending, matrix, rendering
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.in_bundle.grouping import REST, TITLES, sections
from vllm_livepatch.tools.releases import registry, span
from vllm_livepatch.tools.upkeep import recipes

HEAD = """# Patches

`vllm-livepatch show NAME` prints the same, with the code that is patched and each release's fingerprint; `check` says
which of them your release needs. From a message in the log to its patch: [troubleshooting](../troubleshooting.md).
`auto`, the default, applies a patch wherever the release needs it, unless its page says else; `LIVEPATCH=off` turns
everything off. Every patch on every release: [compatibility](../compatibility.md). What replaces a recipe's own edit of
site-packages: [recipes](../recipes.md). What a patch keeps in memory, until when and how much:
`keeps` in its `patch.toml`. A patch whose page does not say what counts as gone takes no peer for gone, and ends no
hold.
"""

NOTHING = "The patch takes no peer for gone, and ends no hold."
"""`about.gone` of most patches: the head of the index says it for all."""


def page(patch: Patch) -> str:
    """One patch's page. The symptom is first, so that a search for a line of a log ends here."""
    about = patch.about
    lines = [f"# {patch.name}", "", f"{patch.title}. Version {patch.version}.", ""]
    for heading, entry in (("What one sees", "symptom"), ("Why", "why"), ("What changes", "change")):
        if entry in about:
            lines += [f"## {heading}", "", _text(about[entry]), ""]
    for one in about.get("gives_up", ()):
        lines += [f"## What it gives up{', ' if 'part' in one else ''}{one.get('part', '')}", ""]
        lines += [
            f"{_within(_first(one['what']))}. Protection: {_within(one['protects'])}",
            "",
        ]
        lines += [f"Evidence: {_within(one['evidence'])}.", ""]
    if "own_error" in about:
        error = about["own_error"]
        lines += ["## If its own code raises", "", f"May be left changed: {_within(error['changed'])}.", ""]
        lines += [f"Remedy: {_within(error['done'])}.", ""]
    if "limits" in about:
        lines += ["## Limits", "", f"{_within(_text(about['limits']))}.", ""]
    lines += ["## Where it applies", "", *_where(patch), ""]
    lines += ["## Turn it on and off", "", *_switch(patch), ""]
    if patch.options:
        lines += ["| option | default | meaning |", "|---|---|---|"]
        for option in patch.options:
            names = "<br>".join(f"`{name}`" for name in (variable(patch.name, option.name), *option.aliases))
            lines.append(f"| {names} | `{option.default}` | {_cell(rendering.explained(option))} |")
        lines.append("")
    if "counters" in about:
        lines += ["## What `status` counts", ""]
        lines += [f"- `{name}`: {_cell(meaning)}" for name, meaning in about["counters"].items()]
        lines.append("")
    if about.get("gone", NOTHING) != NOTHING:
        lines += ["## What counts as gone", "", _text(about["gone"]), ""]
    lines += ["## Where it comes from", ""]
    lines += [f"- {entry.replace('_', ' ')}: {_text(about[entry])}" for entry in _SOURCES if entry in about]
    if about.get("threads"):
        lines.append(f"- threads: {', '.join(map(_link, about['threads']))}")
    if about.get("more"):
        lines.append(f"- more: {', '.join(f'[{file}](../{file})' for file in about['more'])}")
    return "\n".join(lines).rstrip() + "\n"


_SOURCES = ("origin", "upstream")
_REPOSITORIES = {
    "vllm": "vllm-project/vllm",
    "vllm-ascend": "vllm-project/vllm-ascend",
    "LMCache": "LMCache/LMCache",
    "nixl": "ai-dynamo/nixl",
    "RIXL": "ROCm/RIXL",
    "llm-d-kv-cache": "llm-d/llm-d-kv-cache",
}


_VERDICTS = {
    "needed": "needed",
    "fixed-upstream": "not needed, fixed upstream",
    "not-present": "not this code",
    "drifted": "not verified",
}


def _spans(patch: Patch) -> dict[str, str]:
    """The pinned releases by verdict, in spans: `drifted` are those that the folder has nothing of."""
    found = {release: verdict for verdict in _VERDICTS for release in rendering.releases(patch, verdict)}
    spans: dict[str, list[str]] = {}
    pinned = [pin.version for pin in registry.all_pins(patch.package)]
    for verdict, group in groupby(pinned, lambda release: found.get(release, "drifted")):
        spans.setdefault(verdict, []).append(span(list(group)))
    return {verdict: ", ".join(spans[verdict]) for verdict in _VERDICTS if verdict in spans}


def _link(thread: str) -> str:
    """Of a thread upstream, as `vllm PR#1` names it; as it is where its repository is not known."""
    named = re.fullmatch(r"(\S+?)( PR)?#(\d+)", thread)
    if named is None or named[1] not in _REPOSITORIES:
        return thread
    kind = "pull" if named[2] else "issues"
    return f"[{thread}](https://github.com/{_REPOSITORIES[named[1]]}/{kind}/{named[3]})"


def _threads(threads: list[str]) -> str:
    """Threads in a table's cell, each repository named once: `vllm#1, PR#2; nixl#3`."""
    numbers: dict[str, list[str]] = {}
    for thread in threads:
        named = re.fullmatch(r"(\S+?)( PR)?(#\d+)", thread)
        repository, number = (named[1], f"{named[2] or ''}{named[3]}") if named else (thread, "")
        numbers.setdefault(repository, []).append(number)
    return "; ".join(name + ", ".join([some[0], *map(str.strip, some[1:])]) for name, some in numbers.items())


def _where(patch: Patch) -> list[str]:
    package = matrix.NAMES[patch.package]
    default = f"; by default: {rendering.DEFAULTS.get(patch.auto, 'on')}"
    return [
        f"- {package} {releases}: {_VERDICTS[verdict]}{default if verdict == 'needed' else ''}"
        for verdict, releases in _spans(patch).items()
    ]


def _switch(patch: Patch) -> list[str]:
    name = variable(patch.name)
    on = f"{rendering.BY_DEFAULT[patch.auto].format(name=name)}. " if patch.auto in rendering.BY_DEFAULT else ""
    lines = [f"{on}`{name}=off` turns it off."]
    if "without" in patch.about:
        lines += ["", f"Without it: {_text(patch.about['without'])}."]
    if patch.aliases:
        lines.append(f"Also switched by {', '.join(f'`{alias}`' for alias in patch.aliases)} (1 or 0).")
    return lines


def _text(value: object) -> str:
    return re.sub(r"\n+", "\n\n", str(value).strip()).replace("<", "&lt;")


def _cell(value: object) -> str:
    return " ".join(_text(value).split()).replace("|", "\\|")


def _first(text: str) -> str:
    return text[:1].upper() + text[1:]


def _within(text: str) -> str:
    """A cell of a page about all patches, in the page of one: its links begin one folder higher."""
    return re.sub(r"\]\((?!https?:)(#?)", lambda link: f"](../{'never-wrong.md#' if link[1] else ''}", text).rstrip(".")


def of_all(patches: list[Patch]) -> dict[tuple[str, str], str]:
    """The tables of the pages about all patches, by page, below docs, and block. Raises UserError."""
    gives_up = ["| patch | what it gives up or frees |", "|---|---|"]
    mooncake = ["| patch | works in | by default |", "|---|---|---|"]
    front = ["| patch | without it |", "|---|---|"]
    reports = ["| thread | without the patch | releases | mended by |", "|---|---|---|---|"]
    seen: dict[str, dict[str, list[str]]] = {part: {} for part in rendering.SEEN}
    for patch in [patch for _, some in sections(patches, lambda patch: patch) for patch in some]:
        about = patch.about
        for one in about.get("gives_up", ()):
            name = f"[`{patch.name}`](patches/{patch.name}.md)" + (f", {one['part']}" if "part" in one else "")
            if not re.match(r"nothing(?! itself| earlier)\b", one["what"]):
                gives_up.append(f"| {name} | {_cell(one['what'])} |")
        if "mooncake" in about:
            default = rendering.DEFAULTS.get(patch.auto, "on")
            mooncake.append(f"| `{patch.name}` | {_cell(about['mooncake'])} | {default} |")
        if about.get("threads"):
            needed = f"{matrix.NAMES[patch.package]} {_spans(patch).get('needed', 'none')}"
            default = f", {rendering.DEFAULTS[patch.auto]}" if patch.auto in rendering.DEFAULTS else ""
            fault = _cell(about.get("fault", ""))
            reports.append(f"| {_threads(about['threads'])} | {fault} | {needed} | `{patch.name}`{default} |")
        if about.get("readme"):
            first = _cell(about.get("without", "")).partition(". ")[0]
            front.append(f"| [`{patch.name}`](docs/patches/{patch.name}.md) | {first} |")
        for one in about.get("seen", ()):
            if one["under"] not in seen:
                raise UserError(
                    f"{patch.name}: about.seen has under = {one['under']!r}, none of {', '.join(rendering.SEEN)}"
                )
            told = f"`{patch.name}`" + (f": {_cell(one['do'])}" if "do" in one else "")
            seen[one["under"]].setdefault(_cell(one["what"]), []).append(told)
    found = {
        ("field-reports.md", ""): "\n".join(reports),
        ("never-wrong.md", ""): "\n".join(gives_up),
        ("operate.md", ""): "\n".join(mooncake),
        ("recipes.md", ""): recipes.table(patches, lambda patch: _spans(patch).get("needed", "none"), _link),
        ("../README.md", ""): "\n".join(front),
    }
    for part, rows in seen.items():
        lines = ["| what there is to see | patch, and what to do |", "|---|---|"]
        lines += [f"| {what} | {'; '.join(told)} |" for what, told in rows.items()]
        found["troubleshooting.md", part] = "\n".join(lines)
    return found


def with_rows(docs: Path) -> dict[Path, str]:
    """The pages about all patches, with the rows of today. Raises UserError, OSError."""
    texts: dict[Path, str] = {}
    for (name, block), table in of_all([entry.patch for entry in catalogue.load().values()]).items():
        page = docs / name
        texts[page] = placed(texts.get(page) or page.read_text("utf-8"), table, block)
    return texts


def placed(text: str, table: str, block: str = "") -> str:
    """A page's text with the table between the two marks of a block. Raises UserError where it has them not once."""
    begin, end = f"<!-- patches{block and ': '}{block} -->\n", "<!-- /patches -->\n"
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended or begin in rest:
        raise UserError(f"a page of the documentation lacks its marks, {begin.strip()} and {end.strip()}")
    return f"{before}{begin}{table}\n{end}{after}"


def index(patches: list[Patch]) -> str:
    lines = [HEAD]
    for group, some in sections(patches, lambda patch: patch):
        heading = TITLES.get(group, group) or REST
        lines += [f"## {_first(heading)}", ""]
        lines += [f"`{of_group(group)}=off` turns all of these off.", ""] if group else []
        lines += ["| patch | what it does | of | needed on | by default |", "|---|---|---|---|---|"]
        lines += [
            f"| [`{patch.name}`]({patch.name}.md) | {_cell(patch.title)} | {matrix.NAMES[patch.package]} "
            f"| {_spans(patch).get('needed', 'none')} | {rendering.DEFAULTS.get(patch.auto, 'on')} |"
            for patch in some
        ]
        lines.append("")
    return "\n".join(lines)


def texts() -> dict[str, str]:
    """Every page by its file's name."""
    patches = [entry.patch for entry in catalogue.load().values()]
    return {"index.md": index(patches)} | {f"{patch.name}.md": page(patch) for patch in patches}


def write(place: Path) -> None:
    """Raises UserError."""
    made = texts()
    try:
        place.mkdir(parents=True, exist_ok=True)
        for file in place.glob("*.md"):
            if file.name not in made:
                file.unlink()
        for name, text in made.items():
            (place / name).write_text(text, "utf-8")
    except OSError as error:
        raise UserError(f"{place}: {error.strerror or error}") from error


app = typer.Typer(add_completion=False)


@app.command()
def main(place: Annotated[Path, typer.Argument(help="the folder of the pages")]) -> None:
    """Write the documentation's page of each patch, and the rows of the pages beside the folder."""
    write(place)
    for file, text in with_rows(place.parent).items():
        file.write_text(text, "utf-8")


if __name__ == "__main__":
    ending.end_with(app, name="patch_pages")

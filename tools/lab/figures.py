"""The documentation's figures, from the results that are kept in tests/results/lab and tests/results/lab-NAME.

python -m vllm_livepatch.tools.lab.figures --keep RESULT.json --name NAME   # a run's result, small
python -m vllm_livepatch.tools.lab.figures --write docs/lab.md              # all that are kept, as a table
python -m vllm_livepatch.tools.lab.figures --name NAME --picture FILE.png   # what one of them completed over time

`--place DIR` is another folder of results. The table goes between the markers that have the folder's name.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from vllm_livepatch.sitecustomize.decision import variable
from vllm_livepatch.tools.commands import ending, matrix
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.releases import releases_file

with ending.needing("lab", "figures"):
    from vllm_livepatch.tools.lab import loads, report, summary, topology

PLACE = Path("tests/results/lab")
_COLUMNS = {
    "survived": "survived",
    "completed": "completed",
    "disconnected": "disconnected",
    "failed": "failed",
    "failures by kind": "failures",
    "outputs that differ from the undisturbed run's": "differ",
    "undisturbed outputs that differ from those without a connector": "differ without load",
    "longest wait for an answer": "longest wait",
    "KV usage at the end": "KV usage at the end",
    "blocks held with no request left, and the CPU meanwhile": "held with no request left",
}
"""Columns of a page's table, by what `summary.rows` calls them: what two setups of one run can be compared by."""
# The end of a log is full of one machine's paths; a message of upstream's may be. No table has the curves.
_NOT_KEPT = {"log_tail", "error_examples", "kv_usage", "requests", "cores"}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def kept(result: dict[str, Any]) -> dict[str, Any]:
    """What the tables and the picture take of a result, and its command line.

    Raises KeyError where it does not say when, with which revision and where it was made.
    """
    _ = [result[known] for known in ("date", "revision", "machine")]
    setups = {}
    for name, setup in result["setups"].items():
        counted = [
            {"name": patch, "counters": counters} for patch, counters in summary.counters(setup["status"]).items()
        ]
        own = {key: value for key, value in setup.items() if key not in _NOT_KEPT}
        completed = {"completed": setup["per_second"]["completed"]} if "per_second" in setup else {}
        setups[name] = own | {"status": [{"patches": counted}], "per_second": completed}
    return {**result, "command": command(result), "setups": setups}


def command(result: dict[str, Any]) -> str:
    """The command line of this result, made from it: what is as by default is left out."""
    load = dict(result["load"])
    name, seconds, clients = load.pop("name"), load.pop("seconds"), load.pop("clients")
    usual = loads.described(loads.parse(name))
    options = [
        f"{option}={value:g}" if isinstance(value, float) else f"{option}={value}"
        for option, value in load.items()
        if value != usual[option]
    ]
    words = ["vllm-livepatch", "lab", result["topology"]]
    # An interpreter of its own has its releases; its path is one machine's.
    releases = ["--vllm", result["vllm"], "--lmcache", result["lmcache"]]
    words += ["--python", "PYTHON"] if result.get("given") else releases
    for key, value in result.get("environment", {}).items():
        words += ["--env", f"{key}={value}"]
    if name != "storm" or options:
        words += ["--load", ":".join(filter(None, [name, ",".join(options)]))]
    words += ["--fault", "disconnects"] * result["disconnects"]
    for fault in result["faults"]:
        back = "" if fault["lasts"] is None else f"+{fault['lasts']:g}"
        words += ["--fault", f"{fault['kind']}-{fault['part']}@{fault['at']:g}{back}"]
    for fault, variables in result.get("injected", {}).items():
        words += ["--fault", "=".join([fault, *(value for value in variables.values() if value != "on")])]
    if result.get("settings"):
        settings = topology.load(result["topology"]).settings
        for setting, number in result["settings"].items():
            words += ["--with", f"{setting}={number:g}"] if number != settings.get(setting) else []
    chosen = result.get("patches", [])
    words += ["--patches", ",".join(chosen)] if chosen else []
    of_patches = {variable(patch): "on" for patch in chosen}
    for toggle, value in result.get("toggles", {}).items():
        words += ["--set", f"{toggle}={value}"] if of_patches.get(toggle) != value else []
    words += ["--compare"] * ("stock" in result["setups"])
    words += ["--alone"] * result.get("alone", False)
    for setup, revision in result.get("revisions", {}).items():
        words += ["--setup", f"{setup}={revision}"]
    words += ["--rounds", str(result["rounds"])] if result["rounds"] > 1 else []
    words += ["--seconds", f"{seconds:g}"] if seconds != 60 else []
    words += ["--clients", str(clients)] if clients != 12 else []
    words += ["--seed", str(result["seed"])] if result["seed"] != 1 else []
    return shlex.join(words)


def markdown(place: Path) -> str:
    """The results that are kept there, by name: a table with a row a setup, then the remarks of `NAME.txt` on a run.

    A column is left out where no setup has a figure for it.
    """
    found, remarks = [], []
    for file in sorted(place.glob("*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        figures = {called: cells for called, *cells in summary.rows(result)}
        for number, setup in enumerate(result["setups"]):
            own = [_short(figures[called][number]) for called in _COLUMNS]
            found.append([f"`{file.stem}`", setup, *own])
        note = file.with_suffix(".txt")
        if note.is_file():
            remarks.append(f"- `{file.stem}`: {note.read_text(encoding='utf-8').strip()}")
    columns = zip(["run", "setup", *_COLUMNS.values()], *found, strict=True)
    shown = [column for column in columns if any(cell != "-" for cell in column[1:])]
    header, *rows = (f"| {' | '.join(row)} |" for row in zip(*shown, strict=True))
    return "\n".join([header, "|---" * len(shown) + "|", *rows, "", *remarks, *([""] * bool(remarks))])


def _short(cell: str) -> str:
    """A cell without the engines that held nothing; `0` where that is all of them."""
    cell = re.sub(r"; [^;)]* cores, else [^)]*\)", ")", cell)  # no run had the machine for itself
    held = [part for part in re.split(r", (?!else)(?=\w+ \d)|\n", cell) if not re.fullmatch(r"\w+ 0(\.0%| s)", part)]
    return "<br>".join(held) or "0"


@app.command()
def figures(
    keep: Annotated[Path | None, typer.Option(metavar="RESULT", help="A result.json, to be kept small.")] = None,
    name: Annotated[str, typer.Option(help="Under this name.")] = "",
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Put the tables between FILE's markers.")] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the kept result of that --name.")] = None,
    place: Annotated[Path, typer.Option(metavar="DIR", help="Where results are kept.")] = PLACE,
) -> None:
    """Keep a run's result for the documentation, or write what is kept into it."""
    if keep is not None:
        if not name:
            raise UserError("--keep needs a --name")
        try:
            result = json.loads(keep.read_text(encoding="utf-8"))
            text = json.dumps(kept(result), separators=(",", ":")) + "\n"
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{keep} is no result of a run: {error!r}") from error
        place.mkdir(parents=True, exist_ok=True)
        releases_file.write(place / f"{name}.json", text)
    if picture is not None:
        try:
            report.completions(json.loads((place / f"{name}.json").read_text(encoding="utf-8")), picture)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"no picture of {name or 'a result without a --name'}: {error}") from error
    if write is not None:
        matrix.write(write, markdown(place), place.name)


if __name__ == "__main__":
    ending.end_with(app, name="figures")

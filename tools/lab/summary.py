"""What a lab run showed: a table with a column a setup, and a picture of the blocks in use over time."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from vllm_livepatch.tools.lab.report import colours

Setup = dict[str, Any]
_STYLES = ("-", "--", ":")
_CALLED, _CELL = 22, 20
"""Characters in a line of what a figure is called, at most, and of what it is, where its words allow that."""


def title(result: dict[str, Any]) -> str:
    """What was run, in a line."""
    hurt = [_label(fault) for fault in result["faults"]] + ["clients hang up"] * result["disconnects"]
    hurt += result.get("injected", {})
    what = f"{result['topology']}, vLLM {result['vllm']} + LMCache {result['lmcache']}"
    return f"{what}: {', '.join(hurt) or 'no fault'}"


def table(result: dict[str, Any]) -> Table:
    """A row a figure that there is, a column a setup; its words stay whole on a terminal of 80 columns."""
    built = Table(title=title(result), box=box.SIMPLE_HEAD, title_justify="left")
    shown = [row for row in rows(result) if any(cell != "-" for cell in row[1:])]
    built.add_column("", max_width=_CALLED)
    for name in result["setups"]:
        built.add_column(name, justify="right", overflow="fold")
    called, *found = map(list, zip(*shown, strict=True))
    columns = [called, *map(_wrapped, found)]
    for cells in zip(*columns, strict=True):
        built.add_row(*cells)
    return built


def _wrapped(cells: Sequence[str]) -> list[str]:
    """The cells of a setup, in lines as short as the longest word among them allows: names are searched for."""
    width = max((len(word) for cell in cells for word in cell.split()), default=0)
    return [
        "\n".join(wrapped for line in cell.splitlines() for wrapped in textwrap.wrap(line, max(width, _CELL)))
        for cell in cells
    ]


def rows(result: dict[str, Any]) -> list[list[str]]:
    """What a figure is called, and what it is in each setup; `-` where there is none. A cell may have several lines."""
    figures: list[tuple[str, Callable[[Setup], Any]]] = [
        (
            "survived",
            lambda setup: "yes" if setup["survived"] else f"no: {setup['death']}\ndead after {setup['died_after']} s",
        ),
        *((kind, lambda setup, kind=kind: setup[kind]) for kind in ("completed", "disconnected", "failed")),
        ("failures by kind", lambda setup: _kinds(setup["errors"])),
        (
            "undisturbed outputs that differ from those without a connector",
            lambda setup: setup.get("undisturbed_differ"),
        ),
        ("outputs that differ from the undisturbed run's", lambda setup: setup["mismatches"]),
        ("right completions a second", lambda setup: f"{setup['goodput']:.2f}"),
        ("first token, median / 99 %", lambda setup: _seconds(setup["first_token"])),
        ("between tokens, median / 99 %", lambda setup: _seconds(setup["between_tokens"])),
        ("longest wait for an answer", _longest),
        ("tokens loaded from LMCache or another engine", lambda setup: setup.get("loaded_tokens")),
        ("parts brought back", lambda setup: _kinds(setup["restarts"])),
        ("after its return, something is loaded again in", lambda setup: _again(setup.get("loaded_again", []))),
        ("lines of errors in logs", lambda setup: _kinds(setup["errors_logged"])),
        ("KV usage at the end", lambda setup: _usage(setup.get("kv_usage_at_end"))),
        ("after the load, back in", lambda setup: f"{setup['back_after']:.0f} s" if "back_after" in setup else None),
        ("blocks held with no request left, and the CPU meanwhile", lambda setup: _held(setup.get("held", {}))),
        ("done by patches", lambda setup: _counters(setup["status"])),
    ]
    found = [[called, *(value(setup) for setup in result["setups"].values())] for called, value in figures]
    return [["-" if cell is None else str(cell) for cell in row] for row in found]


def picture(result: dict[str, Any], file: Path) -> None:
    """The share of KV blocks in use over time, a line an engine and setup, as a PNG."""
    from matplotlib.figure import Figure  # here: it takes a second to import

    figure = Figure(figsize=(9, 4.5), dpi=120)
    axes = figure.subplots()
    shown = colours(result["setups"])
    for setup, values in result["setups"].items():
        for style, (engine, series) in zip(_STYLES, sorted(values["kv_usage"].items()), strict=False):
            times, shares = [when for when, _ in series], [100 * used for _, used in series]
            axes.plot(
                times, shares, _STYLES[0] if style == "-" else style, color=shown[setup], label=f"{setup}: {engine}"
            )
    for fault in result["faults"]:
        axes.axvline(fault["at"], color="#777777", linestyle=":", linewidth=1.2)
        axes.text(
            fault["at"], 0.98, f"  {_label(fault)}", transform=axes.get_xaxis_transform(), color="#777777", va="top"
        )
    axes.set_xlabel("seconds of load")
    axes.set_ylabel("KV blocks in use, %")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    axes.set_title(f"{result['topology']}, vLLM {result['vllm']} + LMCache {result['lmcache']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(file)


def _label(fault: dict[str, Any]) -> str:
    back = "" if fault["lasts"] is None else f", back {fault['lasts']:.0f} s later"
    return f"{fault['kind']}-{fault['part']} at {fault['at']:.0f} s{back}"


def _seconds(values: dict[Any, float] | None) -> str | None:
    if values is None:
        return None
    median, last = (values.get(share, values.get(str(share))) for share in (0.5, 0.99))
    return f"{median:.3f} / {last:.3f} s"


def _longest(setup: Setup) -> str | None:
    """The longest wait, and whether it ended because nobody was there to answer any more."""
    seconds = setup.get("longest_wait")
    if seconds is None:
        return None
    return f"{seconds:.1f} s" if setup["survived"] else f"{seconds:.1f} s, then {setup['death'].split()[0]} was dead"


def _again(returns: list[list[Any]]) -> str | None:
    """A line for each time that a part came back."""
    return "\n".join(f"{part}: {'never' if after is None else f'{after:.1f} s'}" for part, after in returns) or None


def _usage(left: dict[str, float | None] | None) -> str | None:
    if left is None:
        return None
    return ", ".join(f"{name} {'no answer' if share is None else f'{share:.1%}'}" for name, share in left.items())


def _kinds(counts: dict[str, int]) -> str | None:
    """Counts that are not 0, a line each."""
    return "\n".join(f"{kind}: {count}" for kind, count in counts.items() if count) or None


def _held(engines: dict[str, dict[str, float | None]]) -> str | None:
    """An engine a line: for how long, how much, and the cores that it used then and when it held none."""
    lines = []
    for name, found in engines.items():
        line = f"{name} {found['seconds']:.0f} s"
        if found["seconds"]:
            line += f" ({found['share']:.1%}; {_cores(found['cores_then'])} cores, else {_cores(found['cores_else'])})"
        lines.append(line)
    return "\n".join(lines) or None


def _cores(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"


def counters(status: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """By patch its counters that are not 0, added up over the processes."""
    total: dict[str, dict[str, int]] = {}
    for process in status:
        for patch in process["patches"]:
            for counter, count in patch["counters"].items():
                if count:
                    of_patch = total.setdefault(patch["name"], {})
                    of_patch[counter] = of_patch.get(counter, 0) + count
    return total


def _counters(status: list[dict[str, Any]]) -> str | None:
    found = counters(status)
    return "\n".join(f"{name} {key}: {count}" for name, own in found.items() for key, count in own.items()) or None

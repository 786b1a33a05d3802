"""What takes minutes to hours, each measured again by the command that its kept result names.

    python -m vllm_livepatch.tools.bench --long [NAME]... [--python PATH]

NAME is the path of a kept result below `docs`, without its ending: `layerwise`, `figures/idle_stepping`, `simulation`,
`lab-lease/late-0.32.0`. Its result and its page are written; what changed in the page is printed. PATH is an
interpreter that has vLLM and LMCache for this machine's GPU: what was measured on one is left out without it.
"""

from __future__ import annotations

import difflib
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.lab import figures as lab_figures

_OURS = "vllm_livepatch.tools."
_PYTHON = "PYTHON"
"""Stands for the interpreter in the command of a run that had one of its own."""


@dataclass(frozen=True)
class Long:
    """A kept result: its page, and the commands that make both anew, each with the file for what it prints."""

    page: Path
    commands: tuple[tuple[tuple[str, ...], Path | None], ...]
    on_gpu: bool = False


def kept(checkout: Path, work: Path, python: Path | None = None) -> dict[str, Long]:
    """Every result that is kept in `tests/results` and takes long, by its name. What is in between goes to `work`.

    `python` runs what was measured on a GPU.
    """
    docs, results = checkout / "docs", checkout / "tests/results"
    gpu = str(python or _PYTHON)
    found = {"figures/idle_stepping": _by_itself(results / "figures/idle_stepping.json", docs / "benchmarks.md")}
    found["layerwise"] = _layerwise(docs, results, "layerwise")
    found["simulation"] = _simulation(docs, results, work)
    found["gpu"] = _gpu(checkout, work, gpu)
    for file in sorted(results.glob("lab*/*.json")):
        found[f"{file.parent.name}/{file.stem}"] = _lab(file, docs, work, gpu)
    return found


def measure(checkout: Path, names: list[str], python: Path | None = None) -> Iterator[str]:
    """Measure these results again, or all; yield lines about what changed. Raises UserError, CalledProcessError.

    Of the simulation a command ends with 1 where a world goes wrong, as stock's do: what it wrote is the result.
    """
    with tempfile.TemporaryDirectory() as temporary:
        known = kept(checkout, Path(temporary), python)
        if unknown := [name for name in names if name not in known]:
            raise UserError(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
        left_out = [name for name in names or known if known[name].on_gpu and python is None]
        if left_out and names:
            raise UserError(f"{', '.join(left_out)}: measured on a GPU; --python PATH names an interpreter for one")
        if left_out:
            yield f"left out, since --python names no interpreter for a GPU: {', '.join(left_out)}"
        for name in (name for name in names or known if name not in left_out):
            before = known[name].page.read_text(encoding="utf-8")
            for command, output in known[name].commands:
                yield f"$ {shlex.join(command)}"
                _run(command, output, checkout)
            after = known[name].page.read_text(encoding="utf-8")
            yield from (f"{name}: {line}" for line in changes(before, after))


def changes(before: str, after: str) -> list[str]:
    """The lines that left a page (`- `) and that came (`+ `)."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return [f"{line[0]} {line[1:]}" for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]


def _run(command: tuple[str, ...], output: Path | None, checkout: Path) -> None:
    if output is None:
        subprocess.run(command, cwd=checkout, check=True)
        return
    with output.open("w", encoding="utf-8") as opened:
        code = subprocess.run(command, cwd=checkout, stdout=opened, check=False).returncode
    if code not in (0, 1) or not output.stat().st_size:
        raise subprocess.CalledProcessError(code, command)


def _module(name: str, *words: str) -> tuple[tuple[str, ...], None]:
    return (sys.executable, "-m", name, *words), None


def _by_itself(file: Path, page: Path) -> Long:
    """Its command keeps what it measures, and fills the page."""
    python, option, module, *words = shlex.split(json.loads(file.read_text(encoding="utf-8"))["command"])
    assert (python, option) == ("python", "-m")
    return Long(page, (_module(module, *words),))


def _layerwise(docs: Path, results: Path, name: str) -> Long:
    _, *words = shlex.split(json.loads((results / f"{name}.json").read_text(encoding="utf-8"))["command"])
    module, page = f"{_OURS}bench.layerwise", docs / "layerwise.md"
    shown = _module(module, "--kept", str(results / f"{name}.json"), "--write", str(page), "--table", name)
    return Long(page, (_module(module, *words), shown))


def _simulation(docs: Path, results: Path, work: Path) -> Long:
    commands: list[tuple[tuple[str, ...], Path | None]] = [
        _module(f"{_OURS}cli", "generate", "--out", str(work / "bundle"))
    ]
    made = []
    for run in json.loads((results / "simulation.json").read_text(encoding="utf-8")):
        first, seeds = run["seeds"]
        bundle = () if run["setup"] == "stock" else ("--bundle", str(work / "bundle"))
        options = ("--first", str(first), "--seeds", str(seeds), "--json", "--setup", run["setup"], *bundle)
        made.append(work / f"simulation-{run['setup']}.json")
        commands.append((_module("tests.simulation", *options)[0], made[-1]))
    commands.append(_module("tests.simulation.report", *map(str, made)))
    return Long(docs / "simulation.md", tuple(commands))


def _gpu(checkout: Path, work: Path, python: str) -> Long:
    """What ran on a device; the page says in words what it came to."""
    bundle = _module(f"{_OURS}cli", "generate", "--out", str(work / "bundle"))
    script, file = checkout / "tests/gpu/run.py", checkout / "tests/results/gpu.json"
    words = ("--python", python, "--bundle", str(work / "bundle"), "--write", str(file))
    return Long(checkout / "docs/lab-results.md", (bundle, ((sys.executable, str(script), *words), None)), on_gpu=True)


def lab_page(place: str) -> str:
    """The page of a folder of the lab's results."""
    return "docs/lab.md" if place == "lab" else "docs/lab-results.md"


def _lab(file: Path, docs: Path, work: Path, python: str) -> Long:
    """A run of the lab, its small result in the place of the last one, and the page of them all."""
    place, page = file.parent, docs.parent / lab_page(file.parent.name)
    out = work / place.name / file.stem
    _, *words = shlex.split(lab_figures.command(json.loads(file.read_text(encoding="utf-8"))))
    on_gpu = _PYTHON in words
    words = [python if word == _PYTHON else word for word in words]
    keep = ("--keep", str(out / "result.json"), "--name", file.stem, "--place", str(place))
    shown = ("--place", str(place), "--write", str(page))
    figures = f"{_OURS}lab.figures"
    run = _module(f"{_OURS}cli", *words, "--out", str(out))
    return Long(page, (run, _module(figures, *keep), _module(figures, *shown)), on_gpu)

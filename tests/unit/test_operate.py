"""docs/operate.md: its commands are there, its figures are those of docs/benchmarks.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from vllm_livepatch.sitecustomize.decision import variable
from vllm_livepatch.tools import deploy
from vllm_livepatch.tools.bundles import catalogue

from tests.unit.support import Cli

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/operate.md").read_text("utf-8")
COMMANDS = sorted(set(re.findall(r"vllm-livepatch ([a-z-]+)((?: (?!vllm-livepatch)[^`#\n|;>]+)?)", PAGE)))


@pytest.mark.parametrize(("command", "words"), COMMANDS)
def test_a_command_is_there(cli: Cli, command: str, words: str) -> None:
    said = cli(command, "--help")
    assert said.code == 0, command
    for option in re.findall(r"--[a-z-]+", words):
        assert option in said.out, (command, option)


def test_the_commands_were_found() -> None:
    assert {command for command, _ in COMMANDS} == {"check", "deploy", "generate", "show", "status", "verify"}


def test_what_it_names_is_there() -> None:
    entries = catalogue.load()
    known = {variable(name) for name in entries} | {"LIVEPATCH"}
    assert set(re.findall(r"\bLIVEPATCH(?:_[A-Z_]+)?\b", PAGE)) <= known
    for name in re.findall(r"(?:--require|show) ([a-z]+-[a-z-]+)", PAGE):
        assert name in entries
    for form in re.findall(r"deploy (\w+)", PAGE):
        assert form in {*deploy.FORMS, "prints"}


def test_its_figures_are_those_of_the_benchmarks() -> None:
    benchmarks = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    costs = benchmarks.partition("## What the bundle costs")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+) (ms|s|us) \| ([\d.]+) (?:ms|s|us) \| ([\d.]+) \|$", costs, re.MULTILINE)
    starts = [float(ratio) for name, _, _, _, ratio in rows if "python -c pass" in name]
    assert f"{min(starts):.3f} to {max(starts):.3f} of its start" in PAGE
    (imported,) = ((stock, patched) for name, stock, _, patched, _ in rows if name.startswith("`import vllm"))
    assert f"{imported[1]} s instead of {imported[0]} s" in PAGE
    steps = [
        (float(stock), float(patched), float(ratio))
        for name, stock, _, patched, ratio in rows
        if "a scheduler step" in name
    ]
    more = [patched - stock for stock, patched, _ in steps]
    assert (
        f"{min(more):.0f} to {max(more):.0f} us more: {min(s[2] for s in steps):.2f} to {max(s[2] for s in steps):.2f}"
        in PAGE
    )
    version = re.search(r"version ([\d.]+)", costs)
    assert version is not None
    assert f"version {version[1]}" in PAGE


def test_it_can_be_read_in_ten_minutes() -> None:
    """At 200 words a minute, which is slow; what stands in code blocks is looked up, not read."""
    assert len(re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL).split()) < 2000

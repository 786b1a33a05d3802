"""The rule by which a patch is on by default (docs/contributing.md, "On by default"), and where the catalogue lacks it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from vllm_livepatch.sitecustomize.decision import Patch
from vllm_livepatch.tools.bundles import catalogue, patch_files
from vllm_livepatch.tools.commands import matrix

PATCHES = Path(__file__).parents[2] / "patches"
OPENS = frozenset({"bind", "create_server", "create_unix_server", "listen", "serve_forever", "start_server"})
"""What a call that opens a port is called."""
ON = [entry.patch for entry in catalogue.load().values() if entry.patch.auto != "off"]

NOT_ATTACKED: frozenset[str] = frozenset()
"""On, and neither the history nor the changelog says that somebody who did not write it has attacked it."""


def opened(folder: Path) -> frozenset[str]:
    """The calls of a patch's code that open a port."""
    calls = [
        node.func
        for file in patch_files.code(folder)
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call)
    ]
    # `listen(...)` and `bind(...)` alone are functions of the patch's own.
    methods = {function.attr for function in calls if isinstance(function, ast.Attribute)}
    functions = {function.id for function in calls if isinstance(function, ast.Name)} - {"bind", "listen"}
    return OPENS & (methods | functions)


def not_driven(patch: Patch) -> list[str]:
    """The listed releases on which it is needed, and on which no release test has run its code of today."""
    needed = [release for form in patch.variants if form.verdict == "needed" for release in form.releases]
    return [release for release in needed if not matrix.files_of(patch.name, patch.package, release)]


@pytest.mark.parametrize("patch", ON, ids=lambda patch: patch.name)
def test_who_is_on_by_default_meets_the_rule(patch: Patch) -> None:
    """Or is named above. Nobody is added there."""
    assert not not_driven(patch)
    assert not opened(PATCHES / patch.name.replace("-", "_"))
    assert ("attacked" not in patch.about) is (patch.name in NOT_ATTACKED)


def test_those_that_lack_something_are_on() -> None:
    assert {patch.name for patch in ON} >= NOT_ATTACKED


@pytest.mark.parametrize(
    "code", ["socket.create_server(('', 1))", "await asyncio.start_server(f, port=1)", "s.bind(a)"]
)
def test_what_opens_a_port_is_seen(tmp_path: Path, code: str) -> None:
    (tmp_path / "wrappers.py").write_text(f"async def f():\n    {code}\n")
    assert opened(tmp_path)
    (tmp_path / "wrappers.py").write_text("# listen(), bind() and start_server\nlisten = 1\nconnect(listen)\n")
    assert not opened(tmp_path)

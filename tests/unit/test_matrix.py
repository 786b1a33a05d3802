"""The matrix's forms, and the data that it is refreshed with; what it says of real releases: tests/releases."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from vllm_livepatch.sitecustomize.decision import Installed, Patch, Variant
from vllm_livepatch.tools.commands import matrix
from vllm_livepatch.tools.commands.matrix import Cell, Matrix
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.releases import registry, releases_file

from . import local_index
from .support import Cli

FORMS = (Variant({"vllm.a:f": "0" * 16}, ("1.0",)), Variant({}, ("0.7", "0.8", "0.9"), verdict="not-present"))
PATCH = Patch("one-patch", "vllm", "One", ("vllm.a:f",), (), FORMS)
CELLS = {
    ("vllm", "1.0"): Cell("needed", "executed", ""),
    ("vllm", "1.1"): Cell("needed", "executed", ""),
    ("vllm", "1.2"): Cell("unverified", "read", ""),
    ("vllm", "1.3"): Cell("needed", "executed", ""),
    ("vllm", "1.4"): Cell("needed", "executed by hand", "", {"test_one.py": "executed by hand"}),
    ("vllm", "2.0"): Cell("fixed-upstream", "executed", ""),
    ("vllm", "2.1"): Cell("fixed-upstream", "read", ""),
}
MADE = Matrix(tuple(CELLS), (PATCH,), {"one-patch": CELLS})
FILE = """# What a person wrote.

[[vllm]]
version = "1.0"
wheel = "vllm-1.0-py3-none-any.whl"
sha256 = "aa"
sources_sha256 = "bb"

[[lmcache]]
version = "0.1"
wheel = "lmcache-0.1-py3-none-any.whl"
sha256 = "cc"
sources_sha256 = "dd"
"""


def test_markdown_has_spans_and_says_what_was_executed() -> None:
    *_, head, _, row = matrix.markdown(MADE).splitlines()
    assert head == "| patch | of | needed | fixed-upstream | unverified | by default |"
    assert row == "| `one-patch` | vLLM | **1.0 to 1.1**, **1.3 to 1.4**† | **2.0**, 2.1 | 1.2 | on |"


def test_a_person_sees_spans_with_what_is_known_of_them_and_whether_the_patch_is_on() -> None:
    printed = io.StringIO()
    matrix.show(MADE, Console(width=120, file=printed, color_system=None))
    head, row, _, *notes = [line.rstrip() for line in printed.getvalue().splitlines()]
    assert head.split("  ")[0] == "patch"
    assert [cell.strip() for cell in row.split("  ") if cell] == [
        "one-patch", "vLLM", "1.0 to 1.1*, 1.3 to 1.4†", "2.0*, 2.1", "1.2", "on",
    ]  # fmt: skip
    assert notes[0].startswith(
        "7 of vLLM (1.0 to 2.1); * executed on each of these: stock, and patched where it is needed"
    )


def test_json_is_as_in_the_contract_and_says_how_it_is_known() -> None:
    described = MADE.described()
    assert described["releases"][:2] == ["vllm==1.0", "vllm==1.1"]
    assert described["patches"]["one-patch"]["vllm==1.2"] == "unverified"
    assert described["files"]["one-patch"]["vllm==1.4"] == {"test_one.py": "executed by hand"}
    assert described["files"]["one-patch"]["vllm==1.2"] == {}
    assert described["known"]["one-patch"] == {f"vllm=={release}": cell.known for (_, release), cell in CELLS.items()}


def ran(monkeypatch: pytest.MonkeyPatch, file: str, *releases: str) -> None:
    monkeypatch.setattr(matrix, "executed", lambda: {"one-patch": {file: {"vllm": [*releases]}}})


def ran_by_hand(monkeypatch: pytest.MonkeyPatch, file: str, *releases: str) -> None:
    found = {"one-patch": {file: {"vllm": frozenset(releases)}}}
    monkeypatch.setattr(matrix, "executed_by_hand", lambda: found)


def test_a_patch_of_two_halves_is_known_as_the_half_that_is_run_least(monkeypatch: pytest.MonkeyPatch) -> None:
    ran(monkeypatch, "test_one.py", "1.0")
    ran_by_hand(monkeypatch, "test_half.py", "1.0")
    cell = matrix._cell(PATCH, "vllm", Installed("1.0", {"vllm.a:f": "0" * 16}))
    assert cell.known == "executed by hand"
    assert cell.files == {"test_half.py": "executed by hand", "test_one.py": "executed"}
    ran_by_hand(monkeypatch, "test_one.py", "1.0")
    cell = matrix._cell(PATCH, "vllm", Installed("1.0", {"vllm.a:f": "0" * 16}))
    assert (cell.known, cell.files) == ("executed", {"test_one.py": "executed"})


def test_what_was_run_counts_for_the_code_that_is_known_or_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ran(monkeypatch, "test_one.py", "0.9", "1.0", "1.1")
    ran_by_hand(monkeypatch, "test_one.py", "0.8")

    def known(release: str, fingerprint: str | None) -> tuple[str, str]:
        cell = matrix._cell(PATCH, "vllm", Installed(release, {"vllm.a:f": fingerprint}))
        return cell.verdict, cell.known

    assert known("1.0", "0" * 16) == ("needed", "executed")
    assert known("1.1", "0" * 16) == ("unverified", "read"), "the form does not list it"
    assert known("1.0", "1" * 16) == ("drifted", "read"), "what was run is not this code"
    assert known("0.9", None) == ("not-present", "executed")
    assert known("0.8", None) == ("not-present", "executed by hand")
    assert known("0.7", None) == ("not-present", "read")
    assert known("0.6", None) == ("drifted", "read"), "nobody listed it"


def test_a_run_by_hand_counts_for_the_code_that_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By this every dagger of the matrix stands."""
    folder = tmp_path / "one_patch"
    folder.mkdir()
    (folder / "patch.toml").write_text('targets = ["vllm.a:f"]\n', "utf-8")
    (folder / "wrappers.py").write_text("A = 1\n", "utf-8")

    def run(file: str, code: str, package: str, *releases: str) -> dict[str, Any]:
        return {"file": file, "code": code, "date": "", "revision": "", "releases": {package: [*releases]}}

    runs = [
        run("test_one.py", matrix.code_of(folder), "vllm", "1.0"),
        run("test_one.py", "of before", "vllm", "1.1"),
        run("test_one.py", matrix.code_of(folder), "vllm", "1.2", "1.3"),
        run("test_half.py", "of before", "vllm", "1.0"),
        run("test_half.py", matrix.code_of(folder), "lmcache", "0.1"),
    ]
    monkeypatch.setattr(matrix, "own_patches", SimpleNamespace(__path__=[str(tmp_path)]))
    monkeypatch.setattr(matrix, "by_hand", lambda: {"one-patch": runs})
    counts = matrix.executed_by_hand.__wrapped__
    found = {"test_one.py": {"vllm": {"1.0", "1.2", "1.3"}}, "test_half.py": {"lmcache": {"0.1"}}}
    assert counts() == {"one-patch": found}
    (folder / "wrappers.py").write_text("A = 1  # as it was\n", "utf-8")
    assert counts() == {"one-patch": found}
    (folder / "wrappers.py").write_text("A = 2\n", "utf-8")
    assert counts() == {}


def test_the_table_goes_between_the_markers(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text("above\n<!-- matrix -->\nold\n<!-- /matrix -->\nbelow\n", "utf-8")
    matrix.write(file, "new\n")
    assert file.read_text("utf-8") == "above\n<!-- matrix -->\nnew\n<!-- /matrix -->\nbelow\n"
    assert matrix.block(file.read_text("utf-8")) == "new\n"
    file.write_text("no markers\n", "utf-8")
    with pytest.raises(UserError, match="<!-- matrix -->"):
        matrix.write(file, "new\n")


def test_a_release_is_put_in_its_place_and_taken_out_again() -> None:
    for version in ("0.9", "1.1"):
        table = releases_file.table(registry.Pin("vllm", version, "w.whl", "ee", "ff"))
        text = releases_file.with_table(FILE, table)
        assert text != FILE
        assert releases_file.with_table(text, table) == text
        assert releases_file.without(text, "vllm", version) == FILE
        order = [line for line in text.splitlines() if line.startswith("version")]
        assert order == [f'version = "{one}"' for one in (*sorted(["1.0", version]), "0.1")]


def test_refresh_adds_what_the_registry_has_and_the_data_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = tmp_path / "releases.toml"
    pins.write_text(FILE, "utf-8")
    monkeypatch.setattr(registry, "PINS_FILE", pins)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    registry.all_pins.cache_clear()
    index = local_index.LocalIndex()
    for version in ("0.9", "1.0", "1.1", "1.2rc1", "2.0"):
        index.add("vllm", f"vllm-{version}-py3-none-any.whl", local_index.make_wheel("vllm", version, {}))
    index.yanked.add("vllm-2.0-py3-none-any.whl")
    try:
        with local_index.serving(index):
            monkeypatch.setenv("PIP_INDEX_URL", index.url)
            monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
            (added,) = matrix.refresh(["vllm"])
            assert matrix.refresh(["vllm"]) == []
        assert (added.version, added.read) == ("1.1", True)
        assert [pin.version for pin in registry.all_pins("vllm")] == ["1.0", "1.1"]
        assert [pin.version for pin in registry.pins("vllm")] == ["1.0"]  # the release tests do not drive it
        assert pins.read_text("utf-8").startswith("# What a person wrote.\n")
    finally:
        registry.all_pins.cache_clear()


def test_bad_input_is_one_line(cli: Cli, tmp_path: Path) -> None:
    done = cli("matrix", "--patch-dir", str(tmp_path / "nowhere"))
    assert (done.code, len(done.lines)) == (2, 1)

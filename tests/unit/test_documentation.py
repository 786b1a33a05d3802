"""The documentation: its links lead somewhere, its pages are those of the catalogue, the site is built."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest
from mkdocs.__main__ import cli as mkdocs
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.releases import registry
from vllm_livepatch.tools.upkeep import patch_pages

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
README = (ROOT / "README.md").read_text("utf-8")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Headings as they are linked to."""
    lines = [line for line in page.read_text("utf-8").splitlines() if re.match(r"#+ ", line)]
    return {re.sub(r"[^a-z0-9 _-]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_its_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text("utf-8"))):
        file, _, heading = target.partition("#")
        if ":" in file:
            continue
        place = page.parent / file if file else page
        assert place.exists(), target
        assert not heading or heading in anchors(place), target


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_commands_and_modules_it_names_are_there(page: Path) -> None:
    text = page.read_text("utf-8")
    if page.name == "CHANGELOG.md":
        return
    for module in set(re.findall(r"python -m (vllm_livepatch(?![_\w])[\w.]*)", text)):
        room, _, rest = module.removeprefix("vllm_livepatch").lstrip(".").partition(".")
        if room:
            place = ROOT / room / rest.replace(".", "/")
            assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), module
    for name in set(re.findall(r"(?:show|--require|regroup|--patches) ([a-z]+-[a-z-]+)", text)):
        assert name in catalogue.load(), name


def test_the_patches_pages_are_the_catalogues() -> None:
    """`python -m vllm_livepatch.tools.upkeep.patch_pages docs/patches` writes them."""
    written = {file.name: file.read_text("utf-8") for file in (ROOT / "docs/patches").iterdir()}
    assert written == patch_pages.texts()


def test_the_rows_of_the_pages_about_all_are_the_folders() -> None:
    """The same command writes them."""
    for file, text in patch_pages.with_rows(ROOT / "docs").items():
        assert file.read_text("utf-8") == text


def test_a_row_stands_in_a_table_that_there_is() -> None:
    patch = catalogue.load()["failed-loads"].patch
    about = {**patch.about, "seen": [{"under": "nowhere", "what": "x"}]}
    with pytest.raises(UserError, match="under = 'nowhere', none of ends, wrong, "):
        patch_pages.of_all([dataclasses.replace(patch, about=about)])


def test_the_threads_of_a_patch_are_in_one_row() -> None:
    """Somebody searches the page for the number; the repository is named once."""
    patch = catalogue.load()["mooncake-failed-loads"].patch
    threads = ["vllm PR#1", "vllm#2", "nixl#3", "vllm PR#4", "elsewhere"]
    patch = dataclasses.replace(patch, about={**patch.about, "threads": threads, "fault": "a | b"})
    (row,) = patch_pages.of_all([patch])["field-reports.md", ""].splitlines()[2:]
    assert row.startswith("| vllm PR#1, #2, PR#4; nixl#3; elsewhere | a \\| b | vLLM 0.")
    assert row.endswith(" | `mooncake-failed-loads`, off |")


def test_two_patches_of_one_message_share_a_row() -> None:
    patches = [catalogue.load()[name].patch for name in ("failed-loads", "idle-stepping")]
    seen = [[{"under": "ends", "what": "a | b"}], [{"under": "ends", "what": "a | b", "do": "wait"}]]
    told = [
        dataclasses.replace(patch, about={**patch.about, "seen": one}) for patch, one in zip(patches, seen, strict=True)
    ]
    rows = patch_pages.of_all(told)["troubleshooting.md", "ends"].splitlines()[2:]
    assert rows == ["| a \\| b | `failed-loads`; `idle-stepping`: wait |"]


def test_each_block_of_a_page_is_filled_by_itself() -> None:
    text = patch_pages.placed(f"{BEGIN}{END}<!-- patches: x -->\nold\n{END}after", "| a |", "x")
    assert text == f"{BEGIN}{END}<!-- patches: x -->\n| a |\n{END}after"
    assert patch_pages.placed(text, "| b |").startswith(f"{BEGIN}| b |\n{END}<!-- patches: x -->\n| a |\n")


BEGIN, END = "<!-- patches -->\n", "<!-- /patches -->\n"


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_page_without_the_marks_is_left_as_it_is(text: str) -> None:
    with pytest.raises(UserError, match="lacks its marks"):
        patch_pages.placed(text, "| a |")


def test_links_of_a_row_lead_somewhere_from_a_patchs_page() -> None:
    row = "see [a](mori.md#x), [b](#below), [c](https://x.y/z)"
    assert patch_pages._within(row) == "see [a](../mori.md#x), [b](../never-wrong.md#below), [c](https://x.y/z)"


def test_a_page_begins_with_what_one_sees(tmp_path: Path) -> None:
    (tmp_path / "gone.md").write_text("of a patch that is gone")
    patch_pages.write(tmp_path)
    assert not (tmp_path / "gone.md").exists()
    page = (tmp_path / "stale-finished-recving.md").read_text("utf-8")
    assert page.split("\n## ")[1].startswith("What one sees\n")
    assert "assert req_id in self.requests" in page.split("\n## ")[1]
    assert "- vLLM 0.14.1 to" in page


def test_where_a_patch_is_needed_its_page_says_whether_it_is_on_by_default() -> None:
    """`needed` alone reads as if it applied."""
    pages = {name: (ROOT / f"docs/patches/{name}.md").read_text("utf-8") for name in catalogue.load()}
    lines = {name: re.findall(r"^- .*: needed.*$", page, re.M) for name, page in pages.items()}
    assert all(lines.values())
    assert lines["mooncake-layerwise"] == ["- vLLM 0.20.2 to 0.33.0: needed; by default: off"]
    assert lines["mori-ep-fp8"][0].endswith("; by default: on ROCm")
    switched = {name: {line.rpartition("; by default: ")[2] for line in found} for name, found in lines.items()}
    assert {name for name, found in switched.items() if found == {"on"}} == {
        name for name, entry in catalogue.load().items() if entry.patch.auto == "needed"
    }


def test_a_release_that_a_patch_says_nothing_of_is_not_verified() -> None:
    patch = catalogue.load()["stale-finished-recving"].patch
    newest = [variant for variant in patch.variants if registry.pins("vllm")[-1].version in variant.releases]
    lines = patch_pages.page(dataclasses.replace(patch, variants=tuple(newest))).splitlines()
    (needed,) = [line for line in lines if line.endswith(": needed; by default: on")]
    assert f"{registry.pins('vllm')[-1].version}: " in needed
    assert any(re.fullmatch(r"- vLLM 0\.14\.1 to .*: not verified", line) for line in lines)


def test_what_the_readme_says_applies_by_default_does() -> None:
    """On CUDA, with the releases of its quick start."""
    releases = dict(re.findall(r"--release (vllm|lmcache)==(\S+)", README))
    assert releases == {package: registry.pins(package)[-1].version for package in ("vllm", "lmcache")}
    table = README.partition("## What applies by default")[2].partition("\n## ")[0]
    assert f"vLLM {releases['vllm']} and LMCache {releases['lmcache']}" in table
    listed = re.findall(r"\[`([a-z-]+)`\]\(docs/patches/", table)
    applies = {
        entry.patch.name
        for entry in catalogue.load().values()
        if entry.patch.auto == "needed"
        for variant in entry.patch.variants
        if variant.verdict == "needed" and releases[entry.patch.package] in variant.releases
    }
    assert listed
    assert set(listed) <= applies


@pytest.mark.parametrize("kept", sorted((ROOT / "tests/results").rglob("*.json")), ids=named)
def test_a_kept_figure_names_no_path_of_a_machine(kept: Path) -> None:
    assert not re.search(r"(?<![\w.-])/(tmp|root|home|work|Users)/", kept.read_text("utf-8"))


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 1200


def test_the_site_is_built_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.setattr(sys, "path", list(sys.path))
    mkdocs(
        [
            "build",
            "--strict",
            "--config-file",
            str(ROOT / "tools/upkeep/site.yml"),
            "--site-dir",
            str(tmp_path / "site"),
        ],
        standalone_mode=False,
    )
    front = (tmp_path / "site/index.html").read_text("utf-8")
    assert "images/lives.png" in front
    assert (tmp_path / "site/images/lives.png").is_file()
    for name in catalogue.load():
        assert (tmp_path / "site/patches" / name / "index.html").is_file()
    assert "assert req_id in self.requests" in (tmp_path / "site/search/search_index.json").read_text("utf-8")

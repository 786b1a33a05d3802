"""What MkDocs asks while it builds the site (site.yml): the README is its first page, each patch has its place.

A link out of the documentation, to the repository's code, has no page to lead to: its text stays.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"(?<!\[)`([^`\n]+)`")
_PATCHES = sorted(file.stem for file in (ROOT / "docs/patches").glob("*.md") if file.name != "index.md")
_FOUND_FIRST = {"troubleshooting.md": 3000, "operate.md": 700, "patches/": 700}  # where a log's message is looked up


def on_config(config: Any) -> Any:
    for section in config.nav:
        for entry in next(iter(section.values())) if isinstance(next(iter(section.values())), list) else ():
            if isinstance(entry, dict) and "All patches" in entry:
                entry["All patches"] = [f"patches/{name}.md" for name in _PATCHES]
    return config


def on_files(files: Any, config: Any) -> Any:
    front = (ROOT / "README.md").read_text("utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=front))
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=changes))
    files.append(File.generated(config, "site.css", abs_src_path=str(ROOT / "tools/upkeep/site.css")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    uri = page.file.src_uri
    page.meta["search"] = {"boost": next((boost for begin, boost in _FOUND_FIRST.items() if uri.startswith(begin)), 1)}
    place = (ROOT / "docs" / uri).parent
    up = "../" * uri.count("/")

    def link(found: re.Match[str]) -> str:
        target = found[3].partition("#")[0]
        if target.endswith("CHANGELOG.md"):
            return f"[{found[2]}]({up}changelog.md)"
        to = place / target
        stays = not target or ":" in target or (to.is_file() and to.resolve().is_relative_to(ROOT / "docs"))
        return found[0] if stays else found[2]

    def in_table(found: re.Match[str]) -> str:
        text = found[1].replace("\\|", "|")  # as GitHub wants it; here the bar needs no backslash
        return f"[`{text}`]({up}patches/{text}.md)" if text in _PATCHES and page.file.name != text else f"`{text}`"

    markdown = _LINK.sub(link, markdown)
    return re.sub(r"^\|.*$", lambda row: _CODE.sub(in_table, row[0]), markdown, flags=re.MULTILINE)

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


def on_config(config: Any) -> Any:
    pages = sorted(file.name for file in (ROOT / "docs/patches").glob("*.md") if file.name != "index.md")
    for section in config.nav:
        for entry in next(iter(section.values())) if isinstance(next(iter(section.values())), list) else ():
            if isinstance(entry, dict) and "All patches" in entry:
                entry["All patches"] = [f"patches/{name}" for name in pages]
    return config


def on_files(files: Any, config: Any) -> Any:
    text = (ROOT / "README.md").read_text("utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    place = (ROOT / "docs" / page.file.src_uri).parent

    def link(found: re.Match[str]) -> str:
        target = found[3].partition("#")[0]
        to = place / target
        stays = not target or ":" in target or (to.is_file() and to.resolve().is_relative_to(ROOT / "docs"))
        return found[0] if stays else found[2]

    return _LINK.sub(link, markdown)

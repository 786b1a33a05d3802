"""What a bundle takes: its files in a directory, and a zip file.

    python -m vllm_livepatch.tools.bench.bundle_size

All patches; and beside one that asks for wrapt: with its compiled form for every interpreter and machine, and for one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from vllm_livepatch.tools.bench.figures import Figures
from vllm_livepatch.tools.bundles import bundle, catalogue, extensions, placing

KINDS: dict[str, tuple[Sequence[str], Sequence[str]] | None] = {
    "the patches that come with it": None,
    "a patch that asks for wrapt": ((), ()),
    "the same, `--python 3.12 --arch x86_64`": (("3.12",), ("x86_64",)),
}


def measured() -> Figures:
    """Bytes are of the files, not of the blocks that they take on a disk."""
    rows, entries = [], catalogue.load()
    for kind, wanted in KINDS.items():
        chosen = extensions.chosen(*wanted) if wanted is not None else []
        files = bundle.contents(entries, extensions.gathered(chosen, lambda _: None))
        with tempfile.TemporaryDirectory() as temporary:
            place, packed = Path(temporary, "bundle"), Path(temporary, "bundle.zip")
            placing.write_directory(files, place)
            placing.write_zip(files, packed)
            written = [file for file in place.rglob("*") if file.is_file()]
            sizes = [sum(file.stat().st_size for file in written), packed.stat().st_size]
        rows.append([kind, *(f"{size / 1e6:.1f} MB" for size in sizes)])
    command = "python -m vllm_livepatch.tools.bench.bundle_size"
    return Figures(command, ("a bundle with", "directory", "zip file"), rows)


if __name__ == "__main__":
    measured().show()

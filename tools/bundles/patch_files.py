"""The files of a patch's folder that decide what it does: those that a bundle holds."""

from __future__ import annotations

from pathlib import Path

from vllm_livepatch.tools.errors import UserError

PROOF = "proof.py"
"""What shows the patch's fault and its mend. It runs beside the code that it is about, and is in no bundle."""
FACTS = ("patch.toml", "patch.lock")
"""What a bundle has in another form: its catalogue."""


def code(folder: Path) -> list[Path]:
    """Those of the patch's own code."""
    return [file for file in files(folder) if file.suffix == ".py"]


def files(folder: Path) -> list[Path]:
    """All but bytecode and the proof."""
    found = (file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return sorted(file for file in found if file != folder / PROOF)


def look(folder: Path) -> None:
    """Raises UserError where a file that is to be read is no regular one: to open a pipe, say, would wait for ever."""
    for file in (*(folder / name for name in FACTS), *folder.glob("*.py")):
        if file.exists() and not file.is_file():
            raise UserError(f"{file} is no regular file")

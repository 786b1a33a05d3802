"""Which mutants of a module its tests notice, by Cosmic Ray: `python -m vllm_livepatch.tools.upkeep.mutants MODULE`.

`mutants.toml` is Cosmic Ray's configuration, with the operators that are left out. What is changed is a copy of the
checkout, in an environment of its own; each survivor is printed as a diff.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from vllm_livepatch.tools.commands import ending
from vllm_livepatch.tools.errors import UserError

CHECKOUT = Path(__file__).resolve().parents[2]
CONFIG = Path(__file__).with_name("mutants.toml")
ROOMS = ("patches", "sitecustomize", "tools")


def tests_of(module: str, given: list[str]) -> list[str]:
    """The tests of one module: those that were given, or those called after it or its patch. Raises UserError."""
    path = Path(module)
    if path.parts[0] not in ROOMS or path.suffix != ".py" or not (CHECKOUT / path).is_file():
        raise UserError(f"no module of {', '.join(ROOMS)} is {module}")
    name = path.parent.name if path.parts[0] == "patches" else path.stem
    own = [f"tests/unit/test_{name}.py", f"tests/releases/test_{name}.py"]
    found = given or [test for test in own if (CHECKOUT / test).is_file()]
    if not found:
        raise UserError(f"no test is called after {module}: name those that it should have")
    return found


def copied(root: Path) -> tuple[Path, Path]:
    """A copy of the checkout below `root`, and the interpreter of an environment in which the copy is installed."""
    tree, place = root / "tree", root / "environment"
    listed = ["git", "-C", str(CHECKOUT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (CHECKOUT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, tree / name)
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "-q", "-p", sys.executable, str(place)], check=True)
    python = place / "bin" / "python"
    subprocess.run([*uv, "pip", "install", "-q", "--no-deps", "--python", str(python), "-e", str(tree)], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    # A path in a .pth file: the .pth files there, which install the checkout, are not read.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    return tree, python


app = typer.Typer(add_completion=False)


@app.command()
def main(
    module: Annotated[str, typer.Argument(help="as sitecustomize/settings.py")],
    test: Annotated[list[str] | None, typer.Argument(help="pytest's words (default: tests called after it)")] = None,
    sample: Annotated[int | None, typer.Option(min=1, help="so many mutants, drawn by --seed (default: all)")] = None,
    seed: Annotated[int, typer.Option()] = 1,
) -> None:
    """Print the survivors, and how many mutants were noticed; 1 where one survived."""
    chosen = tests_of(module, test or [])
    from cosmic_ray.work_db import WorkDB, use_db
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

    with tempfile.TemporaryDirectory(prefix="livepatch-mutants-") as directory:
        tree, python = copied(Path(directory))
        config, session = tree / "mutants.toml", Path(directory) / "session.sqlite"
        text = CONFIG.read_text("utf-8").replace("MODULE", module)
        config.write_text(text.replace("TESTS", " ".join([str(python), "-m pytest -x -q", *chosen])), "utf-8")
        # Python takes bytecode of the text before for this one's where both are of one second and size.
        environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}

        def cosmic_ray(program: str, *words: str) -> None:
            command = [str(Path(sys.executable).with_name(program)), *words]
            if subprocess.run(command, cwd=tree, env=environ, check=False).returncode:
                raise UserError(f"Cosmic Ray's {' '.join([program, *words[:1]])} has failed")

        cosmic_ray("cosmic-ray", "init", str(config), str(session))
        cosmic_ray("cr-filter-operators", str(session), str(config))
        with use_db(session, WorkDB.Mode.open) as db:
            waiting = sorted(item.job_id for item in db.pending_work_items)
            kept = random.Random(seed).sample(waiting, min(sample or len(waiting), len(waiting)))
            for job in {*waiting} - {*kept}:
                db.set_result(job, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))
        cosmic_ray("cosmic-ray", "baseline", str(config))
        cosmic_ray("cosmic-ray", "exec", str(config), str(session))
        with use_db(session, WorkDB.Mode.open) as db:
            results = [result for job, result in db.results if job in kept]
    for result in results:
        if result.test_outcome == TestOutcome.SURVIVED:
            typer.echo(result.diff)
    count = Counter(result.test_outcome for result in results)
    survived = count[TestOutcome.SURVIVED]
    typer.echo(f"{module}: {len(results) - survived} of {len(results)} mutants noticed")
    raise typer.Exit(int(survived > 0))


if __name__ == "__main__":
    ending.end_with(app, name="mutants")

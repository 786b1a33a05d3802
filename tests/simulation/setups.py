"""Runs worlds on releases: forks of a warm interpreter, one driver process for each job."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RELEASE_TESTS = ROOT / "tests" / "releases"
if str(RELEASE_TESTS) not in sys.path:
    sys.path.insert(0, str(RELEASE_TESTS))

# Found by the line above, as by pytest's conftest.
from interpreter import DRIVERS, Interpreter  # noqa: E402
from interpreter import SERVED as SERVED  # noqa: E402
from interpreter import engine_python as engine_python  # noqa: E402
from interpreter import made_bundle as made_bundle  # noqa: E402

DRIVER = "../../simulation/driver"
"""Where Interpreter.run, which looks in its own folder, finds ours."""
MODES = ("Scheduler", "AsyncScheduler")
AT_ONCE = 400
"""Worlds in one job: well within the time that an interpreter gives a driver, on a busy machine too."""


@dataclass
class Setup:
    """What is to be run on one release. `policy` is one of reference.py's, where there is no bundle."""

    release: str
    bundle: Path | None = None
    policy: str | None = None
    modes: Sequence[str] = MODES
    tame: bool = False
    tell: bool = False
    answers: str = ""
    """How workers answer for what is lost, of answers.py; as stock's do where there is neither bundle nor policy."""
    until_one_fails: bool = False
    """Whether it is enough that some world fails."""
    environ: dict[str, str] = field(default_factory=dict)


def run(
    warm: Interpreter,
    setup: Setup,
    seeds: Sequence[int] = (),
    plans: Sequence[dict[str, Any]] = (),
    losses: Sequence[int] = (),
) -> list[Any]:
    """What each world came to: `seed`, `losses`, `mode`, `faults`, `notes`, `steps`, and the `story` where it is told.

    `seeds` are drawn by plan.py, `losses` are seeds that losses.py draws.
    """
    with tempfile.TemporaryDirectory() as directory:
        job = {
            "seeds": list(seeds),
            "losses": list(losses),
            "answers": setup.answers or ("patched" if setup.bundle or setup.policy else "stock"),
            "until_one_fails": setup.until_one_fails,
            "plans": list(plans),
            "modes": list(setup.modes),
            "policy": setup.policy,
            "tame": setup.tame,
            "tell": setup.tell,
        }
        work = Path(directory)
        (work / "job.json").write_text(json.dumps(job), encoding="utf-8")
        result = warm.run(
            DRIVER,
            {"vllm": setup.release},
            work,
            bundle=setup.bundle,
            environ=setup.environ,
            arguments=[str(work / "job.json")],
            path=[DRIVERS, ROOT],
        )
        worlds: list[Any] = result["worlds"]
        return worlds


@contextmanager
def interpreters(count: int, python: Path) -> Iterator[list[Interpreter]]:
    """As many warm interpreters; closed at the end."""
    with tempfile.TemporaryDirectory() as directory:
        places = [Path(directory) / str(number) for number in range(count)]
        for place in places:
            place.mkdir()
        with ThreadPoolExecutor(count) as pool:
            found = list(pool.map(lambda place: Interpreter(python, place), places))
        try:
            yield found
        finally:
            for each in found:
                each.close()

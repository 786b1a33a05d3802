"""Starts of Python while the bundle that they use is replaced, again and again: whose code does each of them run?

    python -m tests.unit.upgrades --starts 1000 --upgrades 100

Each start imports two targets, the second a moment after the first; each upgrade gives its own number to everything of
the bundle that a process reads. A start is whole if both targets, and the digest that its report has, are of one bundle,
and of one that lay there while it started.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_livepatch.tools.bundles import bundle, placing

from tests.unit.support import DEADLINE, PYTHON, STEP, WORK, Sandbox

MARKED = """
def wrappers(livepatch):
    def around(wrapped, instance, args, kwargs):
        return [NUMBER, wrapped(*args, **kwargs)]
    return dict.fromkeys(TARGETS, around)
"""
CODE = """
import time
from fakeengine.scheduler import Scheduler
first = Scheduler().step(7)
time.sleep(0.05)
from fakeengine import worker
print([first, worker.work(8)])
"""


@dataclass
class Found:
    """What became of the starts. `wrong` is a sentence each."""

    whole: int = 0
    of: set[int] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)


def numbered(sandbox: Sandbox, number: int) -> dict[str, bytes]:
    """A bundle whose two patches, each a module of its own, mark what their targets return with a number."""
    code = MARKED.replace("NUMBER", str(number))
    sandbox.patch("around", [STEP], code)
    sandbox.patch("other", [WORK], code)
    return bundle.contents(sandbox.entries())


def run(
    sandbox: Sandbox, starts: int, upgrades: int, at_once: int = 2, within: Sequence[str] = (), path: Path | None = None
) -> Found:
    """Start so many processes, and spread the upgrades over them.

    ``within`` is a command that runs another, and ``path`` where the bundle is seen in there.
    """
    numbers = {}
    files = numbered(sandbox, 0)
    numbers[bundle.digest(files)] = 0
    placing.write_directory(files, sandbox.bundle)
    found, lock, begun = Found(), threading.Lock(), [0]
    newest = [0]

    def start() -> None:
        while True:
            with lock:
                if begun[0] == starts:
                    return
                begun[0] += 1
                turn, least = begun[0], newest[0]
            environ = sandbox.environ(
                path=[path or sandbox.bundle, sandbox.site],
                LIVEPATCH_STATE_DIR=str(sandbox.root / "states" / str(turn)),
            )
            command = [*within, PYTHON, "-c", CODE]
            done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE, check=False)
            reports = list((sandbox.root / "states" / str(turn)).glob("*.json"))
            digests = [json.loads(report.read_text("ascii"))["digest"] for report in reports]
            with lock:
                number = numbers.get(digests[0]) if len(digests) == 1 else None
                whole = number is not None and done.stdout == f"[[{number}, [7]], [{number}, [8]]]\n"
                if whole and number is not None and least <= number <= newest[0] + 1 and done.returncode == 0:
                    found.whole += 1
                    found.of.add(number)
                else:
                    found.wrong.append(f"bundle {number} of {least} to {newest[0]}: {done.stdout}{done.stderr}")

    threads = [threading.Thread(target=start) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    pause = threading.Event()
    try:
        for number in range(1, upgrades + 1):
            while begun[0] < number * starts // (upgrades + 1) and any(thread.is_alive() for thread in threads):
                pause.wait(0.005)
            files = numbered(sandbox, number)
            with lock:
                numbers[bundle.digest(files)] = number
            placing.write_directory(files, sandbox.bundle)
            newest[0] = number
    finally:
        for thread in threads:
            thread.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.unit.upgrades", description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=1000)
    parser.add_argument("--upgrades", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=2, help="processes that start at the same time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = run(Sandbox(Path(temporary, "sandbox")), options.starts, options.upgrades, options.at_once)
    print(f"{found.whole} of {options.starts} starts whole, of {len(found.of)} of {options.upgrades + 1} bundles")
    for wrong in found.wrong:
        print(wrong)
    sys.exit(bool(found.wrong))


if __name__ == "__main__":
    main()

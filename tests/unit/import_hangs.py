"""Starts of processes whose threads import targets and standard modules at once, counted: does any of them hang?

    python -m tests.unit.import_hangs [--starts N]

Each start is a fresh interpreter with two to four threads, in turn on each interpreter of this machine, in one of several
ways. A process that has not ended after a minute hangs; its threads' stacks are shown.
"""

from __future__ import annotations

import argparse
import collections
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.unit import interpreters
from tests.unit.support import STEP, WORK, Sandbox

HANGS_SECONDS = 60
WAYS = ("threads", "pool", "lazy", "fork")
PROGRAM = """
import faulthandler, os, signal, sys, threading  # in a child, faulthandler waits for its parent's thread
faulthandler.dump_traceback_later({limit}, exit=True)
way, number = sys.argv[1], int(sys.argv[2])
standard = ["inspect", "dataclasses", "importlib.metadata", "email.message", "json", "ast", "tempfile", "logging"]
names = ["fakeengine.scheduler", standard[number % 8], "fakeengine.worker", standard[(number // 8) % 8]][: 2 + number % 3]
import fakeengine
if way == "lazy":
    import importlib.util
    spec = importlib.util.find_spec("fakeengine.scheduler")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
if way == "pool":
    import concurrent.futures
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(__import__, names))
else:
    gate = threading.Barrier(len(names) + 1)
    def load(name):
        gate.wait()
        __import__(name)
        if way == "lazy" and name == "fakeengine.scheduler":
            lazy.Scheduler
    threads = [threading.Thread(target=load, args=[name]) for name in names]
    for thread in threads:
        thread.start()
    gate.wait()
    if way == "fork":  # of what the threads are importing the child needs nothing but what is ours
        child = os.fork()
        if not child:
            signal.alarm({limit})
            import fakeengine.other
            os._exit(0 if fakeengine.other.work(8) == ["patched", 8] else 3)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit("the forked child")
    for thread in threads:
        thread.join()
import fakeengine.scheduler, fakeengine.worker
scheduler = sys.modules["fakeengine.scheduler"]  # a lazy module is no attribute of its package
assert (scheduler.Scheduler().step(7), fakeengine.worker.work(8)) == (["patched", 7], ["patched", 8])
"""


def sandbox(place: Path) -> Sandbox:
    made = Sandbox(place)
    made.write({"fakeengine/other.py": "def work(item):\n    return [item]\n"})
    made.patch(targets=[STEP, WORK], per_module=True)
    made.patch("alone", ["fakeengine.other:work"])
    made.generate()
    return made


def start(place: Sandbox, version: str, way: str, number: int) -> str:
    """What went wrong in one start, nothing where all was well."""
    command = [str(interpreters.find(version)), "-c", PROGRAM.format(limit=HANGS_SECONDS), way, str(number)]
    done = subprocess.run(command, env=place.environ(), capture_output=True, text=True, timeout=3 * HANGS_SECONDS)
    return "" if done.returncode == 0 else f"{version} {way} {number}: exit {done.returncode}\n{done.stderr}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--starts", type=int, default=1000)
    options = parser.parse_args()
    versions = interpreters.found(interpreters.SERVED)
    wrong: list[str] = []
    count: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as temporary:
        place = sandbox(Path(temporary) / "sandbox")
        for number in range(options.starts):
            version, way = versions[number % len(versions)], WAYS[number // len(versions) % len(WAYS)]
            count[f"{version} {way}"] += 1
            message = start(place, version, way, number)
            if message:
                wrong.append(message)
                print(message, flush=True)
    print(f"{options.starts} starts, {len(wrong)} went wrong; {dict(sorted(count.items()))}")
    print(f"interpreters that this machine lacks: {', '.join(interpreters.missing(interpreters.SERVED)) or 'none'}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

"""What a call of a wrapped method costs by what is around it, from a bundle's directory and from its zip file.

    python -m vllm_livepatch.tools.bench.wrapped_call [--rounds N]

In turn, medians. What stands around a target is our own function (sitecustomize/guard.py) and needs no wrapt; the
bundle's copy of wrapt is for patches that import it, compiled where the interpreter can load that, from no zip file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from vllm_livepatch.tools.bench import figures
from vllm_livepatch.tools.bench.figures import Figures
from vllm_livepatch.tools.bundles import bundle, catalogue, extensions, placing

CODE = """
import json, timeit
from _vllm_livepatch.sitecustomize import guard
from _vllm_livepatch.sitecustomize.context import PatchContext
from _vllm_livepatch.vendor import wrapt

class Target:
    def bare(self, number):
        return number

def passes_on(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs)

context = PatchContext("one", {}, {}, lambda: None)
Target.own = guard.in_place_of(Target.bare, passes_on, context, "module:Target.bare")
Target.wrapt = wrapt.FunctionWrapper(Target.bare, passes_on)
target = Target()
forms = {"bare": lambda: target.bare(7), "our own": lambda: target.own(7), "wrapt": lambda: target.wrapt(7)}
calls = 20000
taken = {name: min(timeit.repeat(form, number=calls, repeat=5)) / calls for name, form in forms.items()}
print(json.dumps({**taken, "compiled": wrapt.__wrapt__._using_c_extension}))
"""


def calls(path: Path) -> dict[str, float]:
    """Seconds a call, by what is around the function; `compiled` says which form of wrapt that was."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("LIVEPATCH", "PYTHON"))}
    python = str(getattr(sys, "_base_executable", sys.executable))
    command = [python, "-c", CODE]
    done = subprocess.run(command, env={**environ, "PYTHONPATH": str(path)}, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def measured(rounds: int = 9) -> Figures:
    """The least of five means of 20,000 calls, the median over the rounds."""
    with tempfile.TemporaryDirectory() as temporary:
        places = {"directory": Path(temporary, "bundle"), "zip": Path(temporary, "bundle.zip")}
        files = bundle.contents(catalogue.load(), extensions.at_hand(extensions.chosen()))
        placing.write_directory(files, places["directory"])
        placing.write_zip(files, places["zip"])
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in places}
        for _ in range(rounds):
            for name, place in places.items():
                taken[name].append(calls(place))
    rows = [
        [
            name,
            *(figures.duration(statistics.median(one[form] for one in found)) for form in ("bare", "our own", "wrapt")),
            "compiled" if found[0]["compiled"] else "pure",
        ]
        for name, found in taken.items()
    ]
    columns = ("a method's call, bundle", "bare", "our own function around it", "wrapt around it", "wrapt is")
    return Figures(f"python -m vllm_livepatch.tools.bench.wrapped_call --rounds {rounds}", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.wrapped_call", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    measured(parser.parse_args().rounds).show()


if __name__ == "__main__":
    main()

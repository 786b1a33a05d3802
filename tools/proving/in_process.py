"""Runs one patch's proof in this process, as it was started (with a bundle or without), and prints what came of it.

    python in_process.py PROOF WORLDS PACKAGE...

PROOF is a patch's proof.py, WORLDS the directory of what proofs are made of. Standard library only: this runs beside
an engine's code, in the engine's interpreter. Prints one JSON object: `cases`, by its sentence what went wrong in each
(null: nothing), or `trouble`, why they could not be played; and `packages`, from which file each PACKAGE came,
and `modules`, which modules of them it imported.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib.util
import inspect
import os
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def cases_of(proof: Path) -> Mapping[Any, Any]:
    """What the proof's `cases` gives. Raises NotBuilt."""
    spec = importlib.util.spec_from_file_location("livepatch_proof", proof)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    import result

    cases = getattr(module, "cases", None)
    if not callable(cases):
        raise result.NotBuilt(f"{proof.name} defines no cases()")
    found = cases()
    if not isinstance(found, Mapping):
        given = type(found).__name__
        raise result.NotBuilt(f"cases() of {proof.name} gives a {given}, not functions by their sentences")
    return found


def finding(case: Any) -> str | None:
    """What went wrong in a case: said already, or what calling it says or raises. Raises NotBuilt."""
    import result

    if not callable(case):
        return None if case is None else str(case)
    try:
        found = case()
        if inspect.isawaitable(found):
            raise result.NotBuilt("a case gives something to be awaited, and is not awaited")
        return None if found is None else str(found)
    except Exception as error:
        traceback.print_exc()
        return str(result.raised(error))


def findings(cases: Mapping[Any, Any]) -> dict[str, str | None]:
    """The finding of each case. Raises NotBuilt, which names the case."""
    import result

    found: dict[str, str | None] = {}
    for sentence, case in cases.items():
        try:
            found[sentence] = finding(case)
        except result.NotBuilt as error:
            raise result.NotBuilt(f"{sentence}: {error}") from error
    return found


def end_with_caller() -> None:
    """End this process, and what it started, when who waits for it has ended: the pipe that is its stdin ends then."""
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    """Play the cases."""
    end_with_caller()
    proof, worlds, *packages = sys.argv[1:]
    sys.argv[1:] = []  # what a driver of the release tests takes for its arguments
    sys.path[0] = worlds
    import result

    result.begin_driver()
    found: dict[str, Any]
    try:
        found = {"cases": findings(cases_of(Path(proof)))}
        if not found["cases"]:
            found = {"trouble": "its proof has no case for this code"}
        elif not all(isinstance(sentence, str) for sentence in found["cases"]):
            found = {"trouble": "its proof has a case whose name is no text"}
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        traceback.print_exc()
        found = {"trouble": result.trouble(error)}
    files = {name: sys.modules[name].__file__ for name in packages if name in sys.modules}
    modules = [name for name in list(sys.modules) if name.partition(".")[0] in packages]
    result.print_result({**found, "packages": files, "modules": modules})
    result.leave()


if __name__ == "__main__":
    main()

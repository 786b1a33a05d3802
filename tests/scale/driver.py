"""Play loads on one release, each in a process of its own; print what they came to as one JSON object.

Run by a fresh interpreter with the release's sources, and a bundle or none, on PYTHONPATH. The job is a file of JSON: a list
of loads, each with a `name`, the `load` of loads.py or push.py, and its arguments.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from result import begin_driver, leave, print_result

begin_driver()

import faulthandler
import gc
import importlib
import json
import logging
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import native_double

native_double.stand_in()

import lmcache

native_double.device_ops(lmcache)
import real_scheduler as real
import vllm

gc.enable()

real.MAX_MODEL_LEN = 1 << 21


LIMIT = float(os.environ.get("SCALE_LIMIT_SECONDS", 300))
"""Seconds after which a load hangs: its process says where, and ends."""


def play(job: dict[str, Any]) -> dict[str, Any]:
    """Play one load in a child of this process; an error of it is how it ends."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        begin = time.process_time()
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        arguments = {name: value for name, value in job.items() if name not in ("name", "load")}
        module, _, name = job["load"].rpartition(".")
        try:
            with tempfile.TemporaryDirectory() as directory:
                model_config = real.make_model_config(Path(directory))
                found = getattr(importlib.import_module(f"tests.scale.{module}"), name)(model_config, **arguments)
        except Exception as error:
            traceback.print_exc()
            place = traceback.extract_tb(error.__traceback__)[-1]
            found = {"ends": f"{type(error).__name__} in {place.name}"}
        found["seconds"] = round(time.process_time() - begin, 1)  # of a core: the machine may be busy
        with os.fdopen(writer, "w") as pipe:
            json.dump(found, pipe)
        leave()
    os.close(writer)
    with os.fdopen(reader) as pipe:
        output = pipe.read()
    _, status = os.waitpid(child, 0)
    result: dict[str, Any] = json.loads(output) if output else {"ends": f"the process ends with {status}"}
    return {"name": job["name"], "seconds": 0.0, **result}


def main() -> None:
    """Read the job, play its loads."""
    real.quiet()
    logging.getLogger("lmcache").setLevel(logging.CRITICAL)
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    importlib.import_module("tests.scale.loads")  # once, and not by each child
    gc.collect()
    gc.freeze()
    print_result({"loads": [play(job) for job in jobs]}, vllm, lmcache)


if __name__ == "__main__":
    main()

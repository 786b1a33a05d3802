"""A model of several KV groups, and the prefill engine that decode is to ask is not there; print what comes of it, as JSON.

`mooncake_hybrid.py PATIENCE`: how many seconds to wait for what is never told.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import mooncake_groups as groups  # its first lines are this driver's too

# isort: split
import atexit
import json
import os
import tempfile
from pathlib import Path

import mooncake_sides as sides
import real_scheduler as real
import vllm
from mooncake_layerwise import PATIENCE, RESULT
from mooncake_sides import wait
from ports import free_port
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash


def asked_in_vain(model_config: object) -> str:
    """What the request comes to, or the error with which the engine's step ends."""
    decode = groups.Decode(model_config)
    where = {"remote_engine_id": "nobody", "remote_bootstrap_addr": f"http://127.0.0.1:{free_port()}"}
    request = decode.add("d", tokens=16, do_remote_prefill=True, transfer_id="t", **where)

    def runs() -> bool:
        decode.step()
        return request in decode.scheduler.running

    try:
        wait(runs, PATIENCE)
    except ValueError:
        return "the engine ends"
    return str(request.status.name)


def main() -> None:
    real.quiet()
    with tempfile.TemporaryDirectory() as directory:
        model_config = real.make_model_config(Path(directory))
        sides.begin_distributed(model_config, Path(directory) / "rendezvous")
        init_none_hash(sha256)
        sides.MODEL = groups.Windows()
        result = asked_in_vain(model_config)
    print(json.dumps({"vllm": vllm.__file__, "pid": os.getpid(), "came_to": result}), file=RESULT, flush=True)
    atexit._run_exitfuncs()  # the bundle's last report
    os._exit(0)  # sockets that wait would be waited for


if __name__ == "__main__":
    main()

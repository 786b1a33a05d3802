"""A model of several KV groups, and the prefill engine that decode is to ask is not there; print what comes of it, as JSON.

`mooncake_hybrid.py PATIENCE`: how many seconds to wait for what is never told.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import mooncake_engines as engines
import mooncake_groups as groups
import mooncake_sides as sides
from mooncake_engines import PATIENCE
from ports import free_port
from result import wait


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
    sides.MODEL = groups.Windows()
    engines.drive(asked_in_vain, word="came_to")


if __name__ == "__main__":
    main()

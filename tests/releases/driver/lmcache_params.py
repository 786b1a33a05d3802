# mypy: disable-error-code="import-not-found"
"""What a client's `kv_transfer_params` make of an engine with LMCache's connector and server; one JSON object."""

from __future__ import annotations

from result import attempted, begin_driver, leave, print_result

begin_driver()

import copy
import importlib
from typing import Any

import lmcache_identity as identity
from vllm import SamplingParams
from vllm.v1.request import RequestStatus

LIMIT, STATISTICS = "lmcache.max_offload_tokens", "cached_token_stats"
PARAMS: dict[str, Any] = {
    "none": None,
    "limit": {LIMIT: identity.CHUNK},
    "no limit": {LIMIT: None},
    "limit is text": {LIMIT: "x"},
    "limit is a fraction": {LIMIT: identity.CHUNK + 0.5},
    "limit is a list": {LIMIT: [1], "lmcache.tag.tenant": "a"},
    "statistics": {STATISTICS: True},
    "both": {STATISTICS: [], LIMIT: {}},
}


def request(number: int, params: Any) -> Any:
    made = identity.request(prompt=30 + number)
    made.sampling_params = SamplingParams(
        max_tokens=2, ignore_eos=True, extra_args={"kv_transfer_params": copy.deepcopy(params)} if params else None
    )
    made.kv_transfer_params = (made.sampling_params.extra_args or {}).get("kv_transfer_params")
    return made


def answered(server: Any, number: int, params: Any) -> Any:
    """What a request comes to, and the same one in the next engine: tokens from LMCache, and whether its KV is right."""
    return [
        identity.Engine(server, adapters=False).run(request(number, params)),
        identity.Engine(server, adapters=False).run(request(number, None)),
    ]


def left(server: Any, number: int, params: Any) -> Any:
    """Its client leaves while it is queued; the next is answered."""
    engine = identity.Engine(server, adapters=False)
    asked = request(number, params)
    engine.scheduler.add_request(asked)
    engine.scheduler.finish_requests(asked.request_id, RequestStatus.FINISHED_ABORTED)
    return [engine.run(request(number, None)), len(engine.connector.request_trackers)]


def session(server: Any, number: int, params: Any) -> Any:
    """A session's second chunk comes with them while its first is queued; another request's KV of that chunk is stored."""
    identity.Engine(server, adapters=False).run(request(number + 50, None))
    engine = identity.Engine(server, adapters=False)
    begun, more, end = request(number, None), request(number + 50, params), request(number, None)
    for chunk, resumable in ((begun, True), (more, True), (end, False)):
        chunk.request_id, chunk.resumable = begun.request_id, resumable
        engine.scheduler.add_request(chunk)
    engine.scheduler.add_request = lambda request: None  # it is there
    return engine.run(begun)


def main() -> None:
    identity.PLAYED[0] = "lmcache"
    importlib.import_module("lmcache.integration.vllm.vllm_multi_process_adapter")
    server: Any = identity.Server() if identity.serves_without_a_gpu() else identity.Messages()
    cases = [(play, name) for play in (answered, left) for name in PARAMS]
    cases += [(session, "statistics")]
    came = {
        f"{play.__name__}: {name}": attempted(
            lambda play=play, number=number, name=name: play(server, number, PARAMS[name])
        )
        for number, (play, name) in enumerate(cases)
    }
    server.kill()
    print_result({"cases": came}, identity.lmcache, identity.vllm)
    leave()


if __name__ == "__main__":
    main()

# mypy: disable-error-code="import-not-found"
"""The cases of `lmcache_identity` that LMCache in the engine's process has, where engines share what is stored.

vLLM's LMCacheConnectorV1, LMCache's LMCacheConnectorV1Impl on both sides and the keys, of LMCache's `ChunkedTokenDatabase`,
are the releases' own. LMCache's engine is stood in for: it copies chunks by those keys.
"""

from __future__ import annotations

from result import attempted, begin_driver, leave, print_result

begin_driver()

import importlib
import itertools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import lmcache_identity as identity
import lmcache_within_step as within
import real_scheduler as real
import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.token_database import ChunkedTokenDatabase

Metadata = importlib.import_module("lmcache.v1.metadata").LMCacheMetadata
FACTORY = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
CHUNK, BLOCK = within.CHUNK, within.BLOCK


class Chunks:
    """In the place of one worker's LMCacheEngine; `stored` is what all engines share."""

    def __init__(self, stored: dict[str, Any], rank: int, workers: int) -> None:
        config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, pre_caching_hash_algorithm="sha256_cbor")
        metadata = Metadata("m", workers, workers, rank, rank, torch.float32, (1, 2, CHUNK, 2, 8))
        self.database = ChunkedTokenDatabase(config, metadata)
        self.stored = stored

    def keys(self, tokens: Any, configs: Any) -> list[str]:
        whole = len(tokens) // CHUNK * CHUNK
        found = self.database.process_tokens(tokens=[int(token) for token in tokens[:whole]], request_configs=configs)
        return [key.to_string() for _, _, key in found]

    def lookup(self, tokens: Any, configs: Any) -> int:
        keys = self.keys(tokens, configs)
        return next((number for number, key in enumerate(keys) if key not in self.stored), len(keys)) * CHUNK

    def retrieve(self, tokens: Any, mask: Any, *, kvcaches: Any, slot_mapping: Any, **others: Any) -> Any:
        loaded = torch.zeros(len(tokens), dtype=torch.bool)
        for number, key in enumerate(self.keys(tokens, others.get("request_configs"))):
            start = number * CHUNK
            if mask[start] and key in self.stored:
                for place, content in zip(range(start, start + CHUNK), self.stored[key], strict=True):
                    slot = int(slot_mapping[place])
                    kvcaches[0][:, slot // BLOCK, :, slot % BLOCK] = content
                    loaded[place] = True
        return loaded

    def store(self, tokens: Any, mask: Any, *, kvcaches: Any, slot_mapping: Any, **others: Any) -> None:
        for number, key in enumerate(self.keys(tokens, others.get("request_configs"))):
            start = number * CHUNK
            if mask[start] and key not in self.stored:
                slots = [int(slot) for slot in slot_mapping[start : start + CHUNK]]
                self.stored[key] = [kvcaches[0][:, slot // BLOCK, :, slot % BLOCK].clone() for slot in slots]

    def store_layer(self, tokens: Any, mask: Any, **others: Any) -> Iterator[None]:
        self.store(tokens, mask, **others)
        yield from itertools.repeat(None)

    def retrieve_layer(self, tokens: Any, mask: Any, **others: Any) -> Iterator[None]:
        self.retrieve(tokens, mask, **others)
        yield from itertools.repeat(None)

    def lookup_unpin(self, name: str) -> None: ...


class Shared:
    """In the place of a server: what is stored, and by which keys."""

    def __init__(self) -> None:
        self.stored: dict[str, Any] = {}

    def ask(self, question: str) -> list[str]:
        if question == "evict":
            self.stored.clear()
        return sorted(self.stored)


class Engine(identity.Engine):
    """LMCache in the workers' processes."""

    def __init__(
        self, shared: Shared, *, adapters: bool = True, workers: int = 1, multi: bool = False, client: Any = None
    ) -> None:
        self.chunks = chunks = [Chunks(shared.stored, rank, workers) for rank in range(workers)]
        within.lookup_client = lambda: (
            client
            or SimpleNamespace(
                lookup_cache=lambda lookup_id: -1,
                lookup=lambda tokens, lookup_id, request_configs=None: min(
                    one.lookup(tokens, request_configs) for one in chunks
                ),
                clear_lookup_status=lambda name: None,
                cancel_lookup=lambda name: None,
            )
        )
        super().__init__(shared, adapters=adapters, workers=workers, multi=multi)

    def worker(self, shared: Any, vllm_config: Any, rank: int, workers: int) -> tuple[Any, Any]:
        within.ENGINES[:] = self.chunks
        config = within.config_of(vllm_config, rank, workers, 1)
        role = within.KVConnectorRole.WORKER
        worker = FACTORY.create_connector(config=config, role=role, kv_cache_config=self.scheduler.kv_cache_config)
        cache = torch.zeros(2, real.NUM_BLOCKS, 2, BLOCK, 8)
        worker._lmcache_engine.kv_caches = {"layer0": cache}
        return worker, cache

    def ended(self, scheduled: Any) -> Any:
        for worker in self.workers if within.OPTIONS.get("use_layerwise") else ():
            worker.save_kv_layer("layer0", None, None)
        return super().ended(scheduled)


def by_layer(shared: Shared) -> list[Any]:
    """Each layer by itself: two adapters and the base model, twice; then by an engine of text alone. Then a producer whose
    adapter's files cannot be read."""
    within.OPTIONS["use_layerwise"] = True
    first, second, text = Engine(shared), Engine(shared), Engine(shared, adapters=False)
    within.OPTIONS["kv_role"] = "kv_producer"
    producer = Engine(shared)
    within.OPTIONS.clear()
    within.OPTIONS["use_layerwise"] = True
    loras = [identity.adapter(name, number, f"weights of {name}") for number, name in enumerate("ab", 1)]
    came = []
    for engine in (first, second):
        for lora in loras:
            engine.load(lora)
        came.append([engine.run(identity.request(lora, prompt=18)) for lora in (*loras, None)])
    came.append(text.run(identity.request(prompt=18)))
    producer.weights[1] = "of the hub"
    before = len(shared.stored)
    producer.run(identity.request(identity.LoRARequest("hub", 1, "org/not-here"), prompt=19))
    within.OPTIONS.clear()
    return [*came, len(shared.stored) - before]


class MooncakeLookupClient:
    """As LMCache's own, which asks a Mooncake store: its keys are of ids alone."""

    def __init__(self, chunks: Chunks) -> None:
        self.chunks, self.token_database = chunks, chunks.database
        for name in ("clear_lookup_status", "cancel_lookup"):
            setattr(self, name, lambda name: None)

    def lookup_cache(self, lookup_id: str) -> int:
        return -1

    def lookup(self, token_ids: Any, lookup_id: Any = None, request_configs: Any = None) -> int:
        return self.chunks.lookup(token_ids, None)


def by_mooncake(shared: Shared) -> list[Any]:
    """Lookups by LMCache's Mooncake client: the base model twice, of engines with adapters; a text engine stored it, too."""
    engines = []
    for adapters in (False, True, True):
        chunks = Chunks(shared.stored, 0, 1)
        engine = Engine(shared, adapters=adapters, client=MooncakeLookupClient(chunks))
        engines.append(engine)
    return [engine.run(identity.request(prompt=20)) for engine in engines]


def images_in_process(shared: Shared) -> list[Any]:
    """Three images behind one text, the third of the second's last 16 bits; then each again."""
    first, second = Engine(shared, adapters=False), Engine(shared, adapters=False)
    names = ("a" * 60 + "0001", "b" * 60 + "0002", "c" * 60 + "0002")
    came = [first.run(identity.request(image=name, prompt=11)) for name in names]
    return [*came, *(second.run(identity.request(image=name, prompt=11)) for name in names)]


def users_tags(shared: Shared) -> list[Any]:
    """A user's tag stays. A client that sends ours, by an engine without adapters, does not get at another's key."""
    engine, plain = Engine(shared), Engine(shared, adapters=False)
    lora = identity.adapter("a", 1, "weights of a")
    engine.load(lora)
    asked = identity.request(lora, prompt=15)
    asked.sampling_params.extra_args = {"kv_transfer_params": {"lmcache.tag.user": "u1"}}
    came = [engine.run(asked)]
    keys = shared.ask("keys")
    with_user = [key for key in keys if "user%u1" in key]
    (ours,) = {part for key in keys for part in key.split("@") if part.startswith("livepatch%")} or {"livepatch%x"}
    forged = identity.request(prompt=15)
    tags = {"lmcache.tag.user": "u1", "lmcache.tag.livepatch": ours.partition("%")[2]}
    forged.sampling_params.extra_args = {"kv_transfer_params": tags}
    return [*came, len(with_user), plain.run(forged)]


def preempted(shared: Shared) -> list[Any]:
    """A request that is not looked up is preempted, and goes on: the engine does not end."""
    engine = Engine(shared)
    nowhere = identity.LoRARequest("hub", 1, "org/not-here")
    engine.weights[1] = "of the hub"
    scheduler, updated = engine.scheduler, engine.scheduler.update_from_output

    def once(*given: Any) -> Any:
        scheduler.update_from_output = updated
        output = updated(*given)
        scheduler.reset_prefix_cache(reset_running_requests=True)
        return output

    scheduler.update_from_output = once
    return [engine.run(identity.request(nowhere, prompt=16)), len(shared.stored)]


def unreadable(shared: Shared) -> list[Any]:
    """Clients of an adapter whose files are not there give parameters that LMCache cannot read."""
    engine = Engine(shared)
    nowhere = identity.LoRARequest("hub", 1, "org/not-here")
    engine.weights[1] = "of the hub"
    came = []
    for given in ({"disagg_spec": {}}, {"disagg_spec": None}):
        asked = identity.request(nowhere, prompt=17)
        asked.kv_transfer_params = given
        asked.sampling_params.extra_args = {"kv_transfer_params": given}
        came.append(engine.run(asked))
        engine.scheduler.reset_prefix_cache()
    return came


CASES = (
    identity.adapters,
    identity.tensor_parallel,
    identity.two_pods,
    identity.new_weights,
    identity.behind_old_weights,
    identity.unknown,
    identity.changed_files,
    by_layer,
    by_mooncake,
    images_in_process,
    identity.plain,
    users_tags,
    preempted,
    unreadable,
    identity.new_base_weights,
    identity.updated_while_it_runs,
)


def played(*names: str) -> dict[str, Any]:
    """What each of these cases, or all, came to."""
    identity.PLAYED[0] = "in-process"
    identity.Engine = Engine
    cases = {case.__name__: case for case in CASES}
    return {name: attempted(lambda name=name: cases[name](Shared())) for name in names or cases}


def main() -> None:
    print_result({"cases": played(*sys.argv[2:])}, identity.lmcache, identity.vllm)
    leave()


if __name__ == "__main__":
    main()

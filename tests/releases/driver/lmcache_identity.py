# mypy: disable-error-code="import-not-found"
"""One prompt to several adapters, images and embeddings of engines that share a real LMCache server; one JSON object.

Run by a fresh interpreter with the releases' sources, and the bundle or not, on PYTHONPATH. Each engine has the release's
scheduler, both sides of its LMCacheMPConnector (`vllm`: the built-in one, `lmcache`: LMCache's own), and a model that is
stood in for: what a token leaves in each layer's cache is a digest of all that decides it. A request is right where its
whole prompt holds that when it is answered.

The arguments are whose connector, and the cases.
"""

from __future__ import annotations

from result import attempted, begin_driver, leave, print_result

begin_driver()

import contextlib
import gc
import hashlib
import importlib
import inspect
import json
import os
import pickle
import sys
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import lmcache_server

lmcache_server.compiled()

import lmcache
import real_scheduler as real
import torch
import vllm
from lmcache_messages import Copies, Messages
from lmcache_server import Server, until
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

BLOCK, CHUNK = real.BLOCK_SIZE, lmcache_server.CHUNK
PROMPT = 3 * CHUNK + 5
IMAGE_AT, IMAGE_TOKENS = CHUNK + 20, 24
"""An image begins in the second chunk and ends in the third."""
ADAPTED, RANK, WIDTH = "q_proj", 8, 64
"""The module that an adapter changes, and its matrices' sizes."""
UNPINNED = "cpu:0"
"""Host memory, by a name by which vLLM does not pin it: older releases do, where there is no device."""
V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
MODULES = {"vllm": f"{V1}.lmcache_mp_connector", "lmcache": "lmcache.integration.vllm.lmcache_mp_connector"}
DIRECTORY = Path(tempfile.mkdtemp())
WEIGHTS: dict[int, str] = {}
"""Of each adapter id of an engine, what a worker has read from its files."""

PLAYED = ["lmcache"]
"""Whose connector is played."""

real.quiet()
MODEL = real.make_model_config(DIRECTORY)


def connector_class(whose: str) -> tuple[str, str]:
    if whose == "in-process":
        return "lmcache_within_step", "InProcess"
    module = importlib.import_module(MODULES[whose])
    name = "LMCacheMPConnector"
    return MODULES[whose], f"{name}Upstream" if hasattr(module, f"{name}Upstream") else name


class Engine:
    """`adapters`: whether LoRA is enabled; `workers` of one tensor-parallel group."""

    patience: ClassVar[float] = lmcache_server.PATIENCE
    """Longest time for a request's answer."""

    def __init__(self, server: Any, *, adapters: bool = True, workers: int = 1, multi: bool = False) -> None:
        module, name = connector_class(PLAYED[0])
        extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": getattr(server, "port", 0)}
        vllm_config = real.make_config(
            "Scheduler", MODEL, (module, name), adapters=4 if adapters else 0, extra=extra, workers=workers
        )
        if hasattr(vllm_config.cache_config, "kv_cache_layout"):
            vllm_config.cache_config.kv_cache_layout = "LBHNC"  # resolved by the engine core otherwise, from 0.29
        if multi:
            child = {"kv_connector": name, "kv_connector_module_path": module, "kv_role": "kv_both"}
            given = vllm_config.kv_transfer_config
            given.kv_connector, given.kv_connector_module_path = "MultiConnector", None
            given.kv_connector_extra_config = {"connectors": [{**child, "kv_connector_extra_config": extra}]}
        self.scheduler = real.scheduler_of("Scheduler", vllm_config)
        self.weights: dict[int, str] = {0: "base"}
        """What its worker has read: the base model's, and each adapter's by its id."""
        self.loaded: dict[str, int] = {}  # tokens that came from LMCache
        self.core = SimpleNamespace(model_executor=MagicMock(), scheduler=self.scheduler)
        connector = self.scheduler.connector
        self.connector = connector._connectors[0] if multi else connector
        allocated = connector.update_state_after_alloc

        def noted(request: Any, blocks: Any, tokens: int, *others: Any) -> None:
            self.loaded[request.request_id] = self.loaded.get(request.request_id, 0) + tokens
            allocated(request, blocks, tokens, *others)

        connector.update_state_after_alloc = noted
        made = [self.worker(server, vllm_config, rank, workers) for rank in range(workers)]
        self.workers = [worker for worker, _ in made]
        self.caches = [cache for _, cache in made]

    def worker(self, server: Any, vllm_config: Any, rank: int, workers: int) -> tuple[Any, Any]:
        """A worker's connector, and its cache."""
        factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
        role = importlib.import_module(f"{V1}.base").KVConnectorRole.WORKER
        vllm_config.parallel_config.rank = rank
        groups = self.scheduler.kv_cache_config
        with set_current_vllm_config(vllm_config):
            worker = factory.create_connector(config=vllm_config, role=role, kv_cache_config=groups)
        vllm_config.parallel_config.rank = 0
        cache = torch.zeros(2, real.NUM_BLOCKS, 2, BLOCK, 8)
        for one in getattr(worker, "_connectors", [worker]):
            if isinstance(server, Messages):
                one.worker_adapter, worker.register_kv_caches = Copies(server, rank, cache, BLOCK), MagicMock()
            elif (
                one.worker_adapter.instance_id == os.getpid()
            ):  # to LMCache 0.4.7: several workers are several processes
                one.worker_adapter.instance_id = next(NUMBERS)
        with set_current_vllm_config(vllm_config):
            worker.register_kv_caches({"layer0": cache})
        return worker, cache

    @property
    def adapters(self) -> dict[int, Any]:
        """What the patch, where there is one, knows of this engine's adapters, by their ids."""
        known = getattr(self.scheduler.connector, "_livepatch_adapters", None)
        return known._known if known is not None else {}

    def load(self, lora: Any) -> None:
        """As `/v1/load_lora_adapter` does, in this engine's process."""
        EngineCore.add_lora(self.core, lora)
        self.read(lora)
        adapter = self.adapters.get(lora.lora_int_id)
        if adapter is not None:
            until(lambda: bool(adapter.lost) or adapter.digest is not None)

    def read(self, lora: Any) -> None:
        """A worker reads an adapter that it does not have, or that is to be read again."""
        if lora.lora_int_id not in self.weights or getattr(lora, "load_inplace", False):
            self.weights[lora.lora_int_id] = weights_in(lora.lora_path)

    def run(self, request: Any) -> list[Any]:
        """A request until it has been answered: how many tokens came from LMCache, and whether its KV is right."""
        self.scheduler.add_request(request)
        if request.lora_request is not None:
            self.read(request.lora_request)
        right = True
        deadline = time.monotonic() + Engine.patience
        while self.scheduler.has_requests():
            if time.monotonic() > deadline:
                Engine.patience = 2.0  # one that is never answered takes the time of all others
                raise AssertionError(f"{request.request_id} was never answered: {request.status}")
            scheduled = self.scheduler.schedule()
            metadata = pickle.dumps(scheduled.kv_connector_metadata)  # a worker has a copy, in a process of its own
            for worker in self.workers:
                worker.bind_connector_metadata(pickle.loads(metadata))
                worker.start_load_kv(SimpleNamespace(attn_metadata=object()))
            before = real.computed_before(scheduled)
            for name, number in scheduled.num_scheduled_tokens.items():
                self.compute(request, before[name], before[name] + number)
                right = right and self.is_right(request)
            output = self.ended(scheduled)
            self.scheduler.update_from_output(scheduled, output)
            if not scheduled.num_scheduled_tokens:
                time.sleep(0.005)
        return [self.loaded.get(request.request_id, 0), right]

    def ended(self, scheduled: Any) -> Any:
        sent: list[set[str]] = []
        received: list[set[str]] = []
        for worker in self.workers:
            worker.wait_for_save()
            sending, recving = worker.get_finished(scheduled.finished_req_ids)
            sent.append(set(sending or ()))
            received.append(set(recving or ()))
            worker.clear_connector_metadata()
        output = real.run_model(scheduled)
        output.kv_connector_output = real.transfers(self.all_of(received), self.all_of(sent))
        return output

    def all_of(self, reported: list[set[str]]) -> set[str]:
        """Whom all workers have reported by now."""
        done = set()
        for names in reported:
            for name in names:
                counts = vars(self).setdefault("counts", {})
                counts[name] = counts.get(name, 0) + 1
                if counts[name] == len(self.workers):
                    del counts[name]
                    done.add(name)
        return done

    def slots(self, request: Any, tokens: int) -> list[tuple[int, int]]:
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return [(blocks[place // BLOCK], place % BLOCK) for place in range(tokens)]

    def compute(self, request: Any, start: int, end: int) -> None:
        values = left_by(request, self.weights, end)
        for (block, offset), value in list(zip(self.slots(request, end), values, strict=True))[start:]:
            for rank, cache in enumerate(self.caches):
                cache[:, block, :, offset] = value + rank

    def is_right(self, request: Any) -> bool:
        tokens = min(request.num_prompt_tokens, request.num_computed_tokens)
        values = left_by(request, self.weights, tokens)
        return all(
            bool((cache[:, block, :, offset] == value + rank).all())
            for (block, offset), value in zip(self.slots(request, tokens), values, strict=True)
            for rank, cache in enumerate(self.caches)
        )


def left_by(request: Any, weights: dict[int, str], tokens: int) -> list[float]:
    """What each token of a request leaves in a cache: by all tokens up to it, what lies in their place, and the weights."""
    lora = request.lora_request
    state = hashlib.blake2b(weights[0 if lora is None else lora.lora_int_id].encode(), digest_size=4)
    values: list[float] = []
    embeds = getattr(request, "prompt_embeds", None)
    for place, token in enumerate(request.all_token_ids[:tokens]):
        state.update(str(token).encode())
        for feature in request.mm_features or ():
            first, length = feature.mm_position.offset, feature.mm_position.length
            if first <= place < first + length:
                state.update(f"{feature.identifier} {place - first}".encode())
        if embeds is not None and place < len(embeds):
            state.update(embeds[place].numpy().tobytes())
        values.append(float(int.from_bytes(state.digest()[:3], "big")))
    return values


class Asked(Request):  # type: ignore[misc]
    """Its images need no encoder: none is here."""

    has_encoder_inputs = property(lambda self: False, lambda self, value: None)


NUMBERS = iter(range(100_000))


def request(
    lora: Any = None,
    image: str = "",
    prompt: int = 0,
    salt: str | None = None,
    embeds: Any = None,
    place: int = IMAGE_AT,
) -> Any:
    ids = [3 + (prompt + 7 * place) % 200 for place in range(PROMPT)]
    features = []
    if image:
        position = PlaceholderRange(offset=place, length=IMAGE_TOKENS)
        ids[place : place + IMAGE_TOKENS] = [2] * IMAGE_TOKENS
        features = [MultiModalFeatureSpec(data=None, modality="image", identifier=image, mm_position=position)]
    return Asked(
        request_id=f"r{next(NUMBERS)}",
        prompt_token_ids=None if embeds is not None else ids,
        sampling_params=SamplingParams(max_tokens=2, ignore_eos=True),
        pooling_params=None,
        lora_request=lora,
        mm_features=features,
        cache_salt=salt,
        block_hasher=real.get_request_block_hasher(BLOCK, real.sha256),
        **({"prompt_embeds": embeds} if embeds is not None else {}),
        **real.end_token_named_per_request(),
    )


def adapter(name: str, number: int, weights: str, folder: str = "") -> Any:
    """An adapter whose files lie in a folder of its own, or in this one."""
    path = DIRECTORY / (folder or f"{name}-{number}-{weights}")
    path.mkdir(parents=True, exist_ok=True)
    write_weights(path, weights)
    return LoRARequest(name, number, str(path))


def write_weights(path: Path, weights: str) -> None:
    """Write an adapter's files, in PEFT's format; what its one module adds spells `weights`."""
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none", "target_modules": [ADAPTED]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    spelt = torch.tensor(list(weights.encode().ljust(WIDTH)), dtype=torch.float32)
    module = f"base_model.model.model.layers.0.self_attn.{ADAPTED}"
    tensors = {"lora_A": torch.ones(RANK, WIDTH), "lora_B": spelt.repeat(RANK, 1).T.contiguous()}
    save_file(
        {f"{module}.{name}.weight": tensor for name, tensor in tensors.items()}, path / "adapter_model.safetensors"
    )


def weights_in(path: str) -> str:
    """A digest of what the release's own code reads in an adapter's folder, as its worker calls it."""
    helper = PEFTHelper.from_local_dir(path, real.MAX_MODEL_LEN)
    read = LoRAModel.from_local_checkpoint(
        path, {ADAPTED}, peft_helper=helper, lora_model_id=1, device=UNPINNED, dtype=torch.float32
    )
    assert read.loras
    digest = hashlib.blake2b(digest_size=16)
    for name, layer in sorted(read.loras.items()):
        for tensor in (layer.lora_a, layer.lora_b):
            digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def adapters(server: Server) -> list[Any]:
    """Two adapters and the base model, of one engine; then of another engine, whose ids are others."""
    first, second = Engine(server), Engine(server)
    came = []
    for engine, numbers in ((first, (1, 2)), (second, (2, 1))):
        a, b = (
            adapter(name, number, f"weights of {name}")
            for name, number in zip(("org/a", "org/b"), numbers, strict=True)
        )
        for lora in (a, b):
            engine.load(lora)
        came.append([engine.run(request(lora, prompt=1)) for lora in (a, b, None)])
    return came


def tensor_parallel(server: Server) -> list[Any]:
    """The same of engines of two workers, each with a server's object of its own for each chunk."""
    first, second = Engine(server, workers=2), Engine(server, workers=2)
    came = []
    for engine in (first, second):
        lora = adapter("a", 1, "weights of a")
        engine.load(lora)
        came.append([engine.run(request(one, prompt=2)) for one in (lora, None)])
    return came


def within_multi(server: Server) -> list[Any]:
    engine = Engine(server, multi=True)
    lora = adapter("a", 1, "weights of a")
    engine.load(lora)
    return [engine.run(request(one, prompt=3)) for one in (lora, None)]


def two_pods(server: Server) -> list[Any]:
    """One name with other files, and one with the same files under another path."""
    first, other, same = (Engine(server) for _ in range(3))
    came = []
    for engine, weights, folder in ((first, "v1", "pod1"), (other, "v2", "pod2"), (same, "v1", "pod3")):
        lora = adapter("sql", 1, weights, folder)
        engine.load(lora)
        came.append(engine.run(request(lora, prompt=4)))
    return came


def new_weights(server: Server) -> list[Any]:
    """In one engine: unloaded, and loaded again from the same path with other files. Then a second prompt."""
    engine = Engine(server)
    old = adapter("sql", 1, "old", "sql")
    engine.load(old)
    came = [engine.run(request(old, prompt=5))]
    new = adapter("sql", 2, "newer", "sql")
    engine.load(new)
    engine.scheduler.reset_prefix_cache()
    return [*came, engine.run(request(new, prompt=5))]


def behind_old_weights(server: Server) -> list[Any]:
    """vLLM's own prefix cache may have the old weights' KV: what is computed behind it is not stored for others."""
    engine, later = Engine(server), Engine(server)
    old, new = adapter("sql", 1, "old", "p1"), adapter("sql", 2, "newer", "p1")
    old = adapter("sql", 1, "old", "p1")
    engine.load(old)
    engine.run(request(old, prompt=6))
    new = adapter("sql", 2, "newer", "p1")
    engine.load(new)
    engine.run(request(new, prompt=6))
    later.load(adapter("sql", 1, "newer", "p1"))
    return [later.run(request(adapter("sql", 1, "newer", "p1"), prompt=6))[1]]


def unknown(server: Server) -> list[Any]:
    """An adapter that cannot be read by its path, one loaded in the place of another, one whose id another has: each twice."""
    engine, other = Engine(server), Engine(server)
    nowhere = LoRARequest("hub", 1, "org/not-here")
    before = adapter("x", 2, "before", "in-place")
    engine.load(before)
    in_place = LoRARequest("x", 2, before.lora_path, load_inplace=True)
    came = []
    for one in (engine, other):
        one.weights[1] = "of the hub"
        came.append(one.run(request(nowhere, prompt=7)))
    adapter("x", 2, "after!", "in-place")
    engine.load(in_place)
    engine.run(request(in_place, prompt=8))
    other.load(adapter("x", 2, "after!", "in-place"))
    came.append(other.run(request(adapter("x", 2, "after!", "in-place"), prompt=8)))
    engine.load(adapter("y", 3, "of y"))
    engine.run(request(LoRARequest("z", 3, adapter("z", 4, "of z").lora_path), prompt=9))
    other.load(adapter("z", 4, "of z"))
    return [*came, other.run(request(adapter("z", 4, "of z"), prompt=9))]


def changed_files(server: Server) -> list[Any]:
    """Files that are written over while their adapter is loaded: a worker may read the new ones any time from then on."""
    engine = Engine(server)
    lora = adapter("a", 1, "before")
    engine.load(lora)
    came = [engine.run(request(lora, prompt=10))]
    write_weights(Path(lora.lora_path), "after!")
    until(lambda: all(one.lost for one in engine.adapters.values()))
    engine.scheduler.reset_prefix_cache()
    engine.weights[1] = weights_in(lora.lora_path)
    return [*came, engine.run(request(lora, prompt=10))]


def update(engine: Engine) -> None:
    """Other weights of the base model, as vLLM has it done (`pause` with `clear_cache`, sleep): all caches are reset."""
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.weights[0] = "newer base"


def new_base_weights(server: Server) -> list[Any]:
    """A prompt before an update, after it, and once more; then of an engine that has the old weights still."""
    engine, other = Engine(server, adapters=False), Engine(server, adapters=False)
    came = [engine.run(request(prompt=22))]
    update(engine)
    for _ in range(2):
        came.append(engine.run(request(prompt=22)))
        engine.scheduler.reset_prefix_cache()
    other.run(request(prompt=22))
    other.scheduler.reset_prefix_cache()
    return [*came, other.run(request(prompt=22))]


def updated_while_it_runs(server: Server) -> list[Any]:
    """A request goes on with new weights, anew, and is answered; then another engine, which has the old ones."""
    engine, other = Engine(server, adapters=False), Engine(server, adapters=False)
    updated = engine.scheduler.update_from_output

    def once(*given: Any) -> Any:
        engine.scheduler.update_from_output = updated
        output = updated(*given)
        update(engine)
        server.ask("evict")
        return output

    engine.scheduler.update_from_output = once
    return [engine.run(request(prompt=23)), other.run(request(prompt=23))]


def updated_while_it_waits(server: Server) -> list[Any]:
    """A request that was looked up waits for blocks, meanwhile the weights are updated. Nobody holds anything of it then."""
    engine = Engine(server, adapters=False)
    came = [engine.run(request(prompt=24))]
    engine.scheduler.reset_prefix_cache()
    pool = engine.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(real.free_blocks(engine.scheduler))
    waits, schedule = request(prompt=24), engine.scheduler.schedule
    trackers = engine.connector.request_trackers

    def scheduled() -> Any:
        if waits.request_id in trackers and trackers[waits.request_id].num_lmcache_hit_tokens and taken:
            pool.free_blocks(taken)
            taken.clear()
            update(engine)
        return schedule()

    engine.scheduler.schedule = scheduled
    came.append(engine.run(waits))
    until(lambda: server.ask("evict") and not server.ask("keys"))
    return came


def replaced_while_it_waits(server: Server) -> list[Any]:
    """An adapter is unloaded while a request that was looked up waits for blocks. The server then has what nobody holds."""
    engine = Engine(server)
    lora = adapter("a", 1, "weights of a")
    engine.load(lora)
    came = engine.run(request(lora, prompt=17))
    engine.scheduler.reset_prefix_cache()
    pool = engine.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(real.free_blocks(engine.scheduler))
    waits, schedule = request(lora, prompt=17), engine.scheduler.schedule
    trackers = engine.connector.request_trackers

    def scheduled() -> Any:
        if waits.request_id in trackers and trackers[waits.request_id].num_lmcache_hit_tokens and taken:
            EngineCore.remove_lora(engine.core, lora.lora_int_id)
            schedule()
            pool.free_blocks(taken)
            taken.clear()
        return schedule()

    engine.scheduler.schedule = scheduled
    engine.run(waits)
    until(lambda: server.ask("evict") and not server.ask("keys"))
    return came


def dropped(server: Server) -> bool:
    """An engine of this process is given up, as `del llm` does: nobody holds its scheduler, worker and cache."""
    engine = Engine(server)
    lora = adapter("a", 1, "weights of a")
    engine.load(lora)
    engine.run(request(lora, prompt=21))
    for connector in (engine.scheduler.connector, *engine.workers):
        connector.shutdown()
    held = [weakref.ref(one) for one in (engine.scheduler, engine.scheduler.connector, *engine.workers, *engine.caches)]
    del engine, connector
    gc.unfreeze()  # what is frozen is not collected: the interpreter that this one was forked of has frozen what it had
    gc.collect()
    return all(one() is None for one in held)


def images(server: Server) -> list[Any]:
    """Three images behind one text, the third of the second's last 16 bits: the text before is everybody's."""
    first, second = Engine(server, adapters=False), Engine(server, adapters=False)
    names = ("a" * 60 + "0001", "b" * 60 + "0002", "c" * 60 + "0002")
    came = [first.run(request(image=name, prompt=11)) for name in names]
    return [*came, *(second.run(request(image=name, prompt=11)) for name in names)]


def embeddings(server: Server) -> list[Any]:
    first, second = Engine(server, adapters=False), Engine(server, adapters=False)
    given = [torch.full((PROMPT, 64), float(number)) for number in (1, 2)]
    given[1][:CHUNK] = given[0][:CHUNK]
    came = [first.run(request(embeds=one)) for one in given]
    return [*came, *(second.run(request(embeds=one)) for one in given)]


def salts(server: Server) -> dict[str, int]:
    """What the server has of each tenant: the salt as it was given."""
    engine = Engine(server)
    before = Counter(server.ask("salts"))
    lora = adapter("org/a", 1, "weights of a")
    engine.load(lora)
    for salt in ("tenant-1", "tenant-1", "tenant-2"):
        engine.run(request(lora, prompt=12, salt=salt))
    engine.run(request(None, prompt=12, salt="tenant-1"))
    return dict(Counter(server.ask("salts")) - before)


def plain(server: Server) -> list[Any]:
    """Keys of an engine without adapters, for text: they are to be the same with the patch and without it."""
    engine = Engine(server, adapters=False)
    before = server.ask("keys")
    came = engine.run(request(prompt=13))
    return [came, sorted(set(server.ask("keys")) - set(before))]


def many_images(server: Server) -> list[Any]:
    """Keys of 10,000 images of which one token lies in a chunk, as LMCache hashes them: how many there are."""
    engine = Engine(server, adapters=False)
    hasher = importlib.import_module("lmcache.v1.multiprocess.token_hasher")
    found: dict[str, set[bytes]] = {name: set() for name in ("blake3", "sha256_cbor", "builtin")}
    hashers = {name: hasher.TokenHasher(CHUNK, name) for name in found}
    asked = request(image="?", prompt=14, place=2 * CHUNK - 1)
    for number in range(10_000):
        asked.mm_features[0].identifier = hashlib.sha256(str(number).encode()).hexdigest()
        tracker = engine.connector._get_or_create_request_tracker(asked)
        ids = getattr(tracker, "get_token_ids", lambda tracker=tracker: list(tracker.all_token_ids))()
        for name, one in hashers.items():
            found[name].add(one.compute_chunk_hashes(ids[: 2 * CHUNK])[1])
        del engine.connector.request_trackers[asked.request_id]
    return [len(ids) == PROMPT, *(len(keys) for keys in found.values())]


CASES: tuple[Callable[[Server], Any], ...] = (
    adapters,
    tensor_parallel,
    within_multi,
    two_pods,
    new_weights,
    behind_old_weights,
    unknown,
    changed_files,
    images,
    embeddings,
    salts,
    plain,
    many_images,
    dropped,
    replaced_while_it_waits,
    new_base_weights,
    updated_while_it_runs,
    updated_while_it_waits,
)


def serves_without_a_gpu() -> bool:
    """From LMCache 0.4.7 on."""
    with contextlib.suppress(ImportError):  # of cupy
        importlib.import_module("lmcache.v1.multiprocess.server")
        config = importlib.import_module("lmcache.v1.multiprocess.config")
        return "supported_transfer_mode" in inspect.getsource(config)
    return False


def played(whose: str, *names: str) -> dict[str, Any]:
    """What each of these cases, or all, came to with this connector."""
    PLAYED[0] = whose
    importlib.import_module("lmcache.integration.vllm.vllm_multi_process_adapter")
    server: Any = Server() if serves_without_a_gpu() else Messages()
    cases = {case.__name__: case for case in CASES}
    came = {}
    for name in names or cases:
        began = time.monotonic()
        came[name] = attempted(lambda name=name: cases[name](server))
        print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    server.kill()
    return came


def main() -> None:
    print_result({"cases": played(*sys.argv[1:])}, lmcache, vllm)
    leave()


if __name__ == "__main__":
    main()

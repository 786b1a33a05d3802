# mypy: disable-error-code="import-not-found"
"""In the place of a server of LMCache 0.4.6 and before, which needs a GPU: what the adapters send it is answered here.

Lookups are answered by the keys that they send, hashed by the release's own `TokenHasher`. What its worker's adapter does,
which takes CUDA's handles of a cache, is stood in for too: it copies chunks by the ids that the connector gives it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from lmcache_server import CHUNK

ADAPTER = "lmcache.integration.vllm.vllm_multi_process_adapter"


class Messages:
    """The server, with the methods of `lmcache_server.Server` that cases use."""

    port = 1  # nobody listens there

    def __init__(self) -> None:
        self.stored: dict[tuple[str, int, bytes], list[Any]] = {}
        """Contents by salt, worker and hash of a chunk."""
        self.hits: dict[str, int] = {}
        self.hasher = importlib.import_module("lmcache.v1.multiprocess.token_hasher").TokenHasher(CHUNK)
        module = importlib.import_module(ADAPTER)
        module.send_lmcache_request = self.send
        module.CudaIPCWrapper = MagicMock()
        for name, stub in (("stream", lambda *_: contextlib.nullcontext()), ("current_stream", MagicMock())):
            setattr(torch.cuda, name, stub)
            setattr(torch.cpu, name, stub)
        torch.cuda.Event = torch.cpu.Event = MagicMock()  # type: ignore[attr-defined,misc]

    def send(self, _: Any, kind: Any, payloads: list[Any]) -> Any:
        answer: Any = {"GET_CHUNK_SIZE": CHUNK, "PING": True}.get(kind.name)
        if kind.name == "LOOKUP":
            key = payloads[0]
            self.hits[key.request_id] = self.hit(key)
            answer = key.request_id
        if kind.name == "QUERY_PREFETCH_STATUS":
            answer = self.hits[payloads[0]]
        return SimpleNamespace(query=lambda: True, wait=lambda timeout=None: True, result=lambda timeout=None: answer)

    def hit(self, key: Any) -> int:
        """Chunks from the prompt's beginning on of which each worker has stored its part."""
        hashes = self.hasher.compute_chunk_hashes(list(key.token_ids)[: key.end])
        salt = getattr(key, "cache_salt", "")
        found = 0
        for one in hashes:
            if not all((salt, worker, one) in self.stored for worker in range(key.world_size)):
                break
            found += 1
        return found

    def ask(self, question: str) -> Any:
        if question == "salts":
            return Counter(salt for salt, _, _ in self.stored)
        return sorted(key.hex() for _, _, key in self.stored)

    def kill(self) -> None: ...


class Copies:
    """In the place of a worker's adapter: a store and a load are over in the step that begins them."""

    use_mla = False

    def __init__(self, messages: Messages, rank: int, cache: Any, block: int) -> None:
        self.messages, self.rank, self.cache, self.block = messages, rank, cache, block
        self.loaded: set[str] = set()

    def chunks(self, op: Any, salt: str) -> Any:
        hashes = self.messages.hasher.compute_chunk_hashes(list(op.token_ids), start=op.start, end=op.end)
        blocks = [one for group in op.block_ids for one in group] if isinstance(op.block_ids[0], list) else op.block_ids
        for number, one in enumerate(hashes):
            of_chunk = blocks[number * CHUNK // self.block : (number + 1) * CHUNK // self.block]
            yield (salt, self.rank, one), of_chunk

    def batched_submit_store_requests(self, names: list[str], ops: list[Any], event: Any, **others: Any) -> None:
        for op, salt in zip(ops, others.get("cache_salts") or [""] * len(ops), strict=True):
            for key, blocks in self.chunks(op, salt):
                self.messages.stored.setdefault(key, [self.cache[:, block].clone() for block in blocks])

    def batched_submit_retrieve_requests(self, names: list[str], ops: list[Any], event: Any, **others: Any) -> None:
        for name, op, salt in zip(names, ops, others.get("cache_salts") or [""] * len(ops), strict=True):
            skipped = getattr(op, "skip_first_n_tokens", 0) // self.block
            for number, (key, blocks) in enumerate(self.chunks(op, salt)):
                for place, (block, content) in enumerate(zip(blocks, self.messages.stored[key], strict=True)):
                    if number * CHUNK // self.block + place >= skipped:
                        self.cache[:, block] = content
            self.loaded.add(name)

    def get_finished(self, finished: set[str]) -> tuple[set[str], set[str]]:
        loaded, self.loaded = self.loaded, set()
        return set(finished), loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

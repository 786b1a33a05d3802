"""Drive one LMCache release's real MP server code from a registered cache to stored chunks and back; print what happened.

There is no device: `torch.cuda`'s streams and events, and cupy's, are stood in for by ones that do at once what they are
asked to, the cache lies in CPU memory, and so does the server's staging buffer. The storage is a dictionary. Everything
between, that is `GPUCacheContext`, `store` and `retrieve`, is the release's. LMCache 0.4.3 needs its compiled module to be
imported at all, so it finds one that lacks the operation (a build for ROCm); from 0.4.4 on there is none.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from result import NotBuilt, print_result, raised, take_stdout, trouble

take_stdout()

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import native_doubles
import torch

native_doubles.install()


class Stream(native_doubles.Stream):
    """A stream that is never behind."""

    def launch_host_func(self, function: Callable[[Any], Any], argument: Any) -> None:
        function(argument)


class Event:
    """An event that has happened once it is recorded."""

    def __init__(self, interprocess: bool = False) -> None:
        self.recorded = False

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Event:
        return cls()

    def record(self, stream: Any = None) -> None:
        self.recorded = True

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return self.recorded

    def ipc_handle(self) -> bytes:
        return b"handle"


class Nothing(contextlib.nullcontext[None]):
    """A current device or stream; a class, since annotations name it."""

    def __init__(self, *args: Any) -> None:
        super().__init__()


def without_device() -> None:
    """Stand in for what the server asks the device for."""
    for name, double in (("Stream", Stream), ("ExternalStream", Stream), ("Event", Event)):
        setattr(torch.cuda, name, double)
    torch.cuda.is_available = lambda: True
    torch.cuda.device = torch.cuda.stream = Nothing
    torch.cuda.empty_cache = lambda: None
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(ExternalStream=Stream, Stream=Stream)  # type: ignore[attr-defined]
    sys.modules["cupy"] = cupy


def compiled_without_the_operation() -> None:
    """For LMCache to 0.4.3; to 0.4.2, where more is needed of it, one of which everything can be asked, and noted."""
    import lmcache

    file = os.path.join(os.path.dirname(lmcache.__file__), "non_cuda_equivalents.py")
    if not hasattr(lmcache, "_get_backend") and os.path.exists(file):
        spec = importlib.util.spec_from_file_location("lmcache.c_ops", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, "GPUKVFormat"):
            module = native_doubles._Module("lmcache.c_ops")
        sys.modules["lmcache.c_ops"] = lmcache.c_ops = module


class Object:
    """A chunk in host memory."""

    def __init__(self, layout: Any) -> None:
        shapes, dtypes = layout.shapes, layout.dtypes
        (self.tensor,) = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        self.raw_tensor = self.tensor.view(-1).view(torch.uint8)

    def parent(self) -> None:
        return None

    def get_size(self) -> int:
        return self.raw_tensor.numel()


class Storage:
    """A dictionary with the storage manager's methods."""

    def __init__(self, config: Any = None) -> None:
        self.objects: dict[Any, Object] = {}
        self.finished: list[str] = []

    def reserve_write(self, keys: list[Any], layout: Any, mode: str) -> dict[Any, Object]:
        made = {key: Object(layout) for key in keys}
        self.objects.update(made)
        return made

    def finish_write(self, keys: list[Any]) -> None:
        self.finished.append(f"{len(keys)} written")

    def finish_read_prefetched(self, keys: list[Any]) -> None:
        self.finished.append(f"{len(keys)} read")

    @contextlib.contextmanager
    def read_prefetched_results(self, keys: list[Any]) -> Iterator[list[Object]]:
        yield [self.objects[key] for key in keys]

    def close(self) -> None:
        pass


CHUNK, BLOCK, BLOCKS, LAYERS = 8, 4, 64, 3
FORMS: dict[str, tuple[tuple[int, ...], torch.dtype, str]] = {
    "mla": ((BLOCKS, BLOCK, 9), torch.bfloat16, "NHD"),
    "nhd": ((2, BLOCKS, BLOCK, 3, 8), torch.float16, "NHD"),
    "hnd": ((2, BLOCKS, 3, BLOCK, 8), torch.bfloat16, "HND"),
    "infer": ((BLOCKS, 2, BLOCK, 2, 16), torch.uint8, "NHD"),
    "infer hnd": ((BLOCKS, 2, 2, BLOCK, 16), torch.float32, "HND"),
}
"""Shape of a layer, dtype, and where the heads are."""
CONFIG = types.SimpleNamespace(
    l1_manager_config=types.SimpleNamespace(
        gds_l1_config=None, memory_config=types.SimpleNamespace(shm_name="", use_lazy=True)
    )
)
"""What of a storage's configuration LMCache 0.4.7 looks at."""


class Server:
    """The release's server code with a dictionary behind it, and an engine's cache."""

    def __init__(self, form: str) -> None:
        shape, dtype, self.layout = FORMS[form]
        self.block_axis = shape.index(BLOCKS)
        self.layers = [
            torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8) for _ in range(LAYERS)
        ]
        self.caches = [types.SimpleNamespace(to_tensor=functools.partial(layer.view, dtype)) for layer in self.layers]
        self.storage = Storage()
        self.closes: list[Callable[[], None]] = []
        if importlib.util.find_spec("lmcache.v1.multiprocess.modules"):
            context = importlib.import_module("lmcache.v1.multiprocess.engine_context")
            context.StorageManager = lambda config: self.storage
            module = importlib.import_module("lmcache.v1.multiprocess.modules.gpu_transfer")
            self.engine = module.GPUTransferModule(context.MPCacheEngineContext(CONFIG, CHUNK))
            self.closes.append(self.engine.close)
        else:
            module = importlib.import_module("lmcache.v1.multiprocess.server")
            module.StorageManager = lambda config: self.storage
            self.engine = module.MPCacheEngine(None, CHUNK)

    def register(self) -> None:
        utils = importlib.import_module("lmcache.utils")
        given: dict[str, Any] = {
            "instance_id": 1,
            "kv_caches": self.caches,
            "model_name": "model",
            "world_size": 1,
            "layout_hints": {"kv_layout": self.layout},
            "engine_type": getattr(getattr(utils, "EngineType", None), "VLLM", None),
            "engine_group_infos": [],
        }
        taken = inspect.signature(self.engine.register_kv_cache).parameters
        self.engine.register_kv_cache(**{name: value for name, value in given.items() if name in taken})
        self.by_group = "engine_group_infos" in taken

    def store(self, chunks: int, ids: list[int]) -> Any:
        return self.engine.store(self.key(chunks), 1, [ids] if self.by_group else ids, b"")

    def retrieve(self, chunks: int, ids: list[int], **more: Any) -> Any:
        return self.engine.retrieve(self.key(chunks), 1, [ids] if self.by_group else ids, b"", **more)

    def key(self, chunks: int) -> Any:
        types_ = importlib.import_module("lmcache.v1.multiprocess.custom_types")
        tokens = list(range(chunks * CHUNK))
        return types_.IPCCacheEngineKey.from_token_ids("model", 1, 0, tokens, 0, len(tokens), "request")

    def blocks(self, ids: list[int]) -> list[Any]:
        """The layers' bytes in these blocks."""
        return [layer.index_select(self.block_axis, torch.tensor(ids)) for layer in self.layers]


def made(form: str) -> Server:
    """A server. Raises NotBuilt where the release's is made of something else."""
    try:
        return Server(form)
    except (AttributeError, ImportError, TypeError) as error:
        raise NotBuilt(trouble(error)) from error


def there_and_back(form: str) -> dict[str, Any]:
    """Store 6 chunks of 2 blocks each, and load them into other blocks, but for the first of them."""
    server = made(form)
    try:
        server.register()
        old, new = list(range(5, 17)), list(reversed(range(40, 52)))
        _, stored = server.store(6, old)
        before = server.blocks(old)
        rest = server.blocks([block for block in range(BLOCKS) if block not in new[1:]])
        skipped = (
            {"skip_first_n_tokens": BLOCK} if "skip_first_n_tokens" in inspect.getsource(type(server.engine)) else {}
        )
        _, loaded = server.retrieve(6, new, **skipped)
        same = all(
            torch.equal(was.narrow(server.block_axis, 1, 11), now.narrow(server.block_axis, 1, 11))
            for was, now in zip(before, server.blocks(new), strict=True)
        )
        untouched = all(
            torch.equal(was, now)
            for was, now in zip(
                rest, server.blocks([block for block in range(BLOCKS) if block not in new[1:]]), strict=True
            )
        )
    finally:
        for close in server.closes:
            close()
    objects = len(server.storage.objects)
    return {
        "stored": stored,
        "loaded": loaded,
        "objects": objects,
        "same": same,
        "untouched": untouched,
        "finished": server.storage.finished,
    }


def wrong_block() -> dict[str, Any]:
    """A store and a load that name a block which the cache does not have."""
    server = made("mla")
    errors = []
    try:
        server.register()
        server.store(1, [3, 4])
        before = server.blocks(list(range(BLOCKS)))
        for attempt in (
            lambda: server.store(2, [1, 2, 3, BLOCKS]),
            lambda: server.retrieve(1, [1, BLOCKS + 7]),
        ):
            try:
                errors.append(f"answered {attempt()[1]}")
            except Exception as error:
                errors.append(said(error))
        same = all(map(torch.equal, before, server.blocks(list(range(BLOCKS)))))
    finally:
        for close in server.closes:
            close()
    return {"errors": errors, "cache_untouched": same}


def said(error: Exception) -> str:
    """What an error of the release's, or of the patch's, says. Raises NotBuilt."""
    raised(error)
    return f"{type(error).__name__}: {error}"


def outcome(case: Callable[[], Any]) -> Any:
    try:
        return case()
    except Exception as error:
        return said(error)


def played() -> dict[str, Any]:
    """What all cases came to."""
    without_device()
    compiled_without_the_operation()
    return {
        "forms": {form: outcome(lambda form=form: there_and_back(form)) for form in FORMS},  # type: ignore[misc]
        "wrong_block": outcome(wrong_block),
    }


def main() -> None:
    """Run all cases."""
    result = played()
    result["asked"] = sorted(name for name in vars(sys.modules["lmcache.c_ops"]) if name.endswith("kv_transfer"))
    print_result(result, sys.modules["lmcache"])


if __name__ == "__main__":
    main()

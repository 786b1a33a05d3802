# mypy: disable-error-code="import-not-found"
"""Make stores fail on a real LMCache server that copies KV itself; print what others load then, as JSON.

The server is the release's, with its message queue and storage, in a process of its own; so are the adapters. There is no
device: blocks lie in CPU memory that both processes share. From 0.4.7 on LMCache has a stand-in for a device of its own;
to 0.4.6 `torch.cuda` and cupy are stood in for, and the operation that moves blocks is mp-block-transfer's, whose file is
the first argument; to 0.4.2 the server moves tokens, by `move_tokens`. The other arguments are the cases. Blocks have
contents: those of a prompt are filled with its number.
"""

from __future__ import annotations

from result import NotBuilt, attempted, begin_driver, leave, print_result, until

begin_driver()

import argparse
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import inspect
import mmap
import os
import pickle
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import lmcache_server
import native_doubles
import torch
from lmcache_operations import operation, packed
from ports import free_port

lmcache_server.compiled()

CHUNK, BLOCK, BLOCKS, LAYERS = 32, 16, 32, 2
PATIENCE = 60.0
"""Longest time, in seconds, for what must come about."""
FIRST, SECOND = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]
"""Blocks of three chunks."""
CHUNK_BYTES = LAYERS * 2 * CHUNK * 2 * 8 * 4


# The device, to LMCache 0.4.6


class Stream(native_doubles.Stream):
    """A stream that is never behind; calls in its order are made by a thread, as a device's driver does."""

    host = None

    def launch_host_func(self, function: Callable[[Any], Any], argument: Any) -> None:
        if getattr(function, "__name__", "") == "finish_write":
            FAULT.reached("submit")
        HOST.submit(function, argument)

    def synchronize(self) -> None:
        FAULT.reached("synchronize")
        HOST.submit(int).result(PATIENCE)


class Event:
    """An event that has happened once it is recorded."""

    def __init__(self, interprocess: bool = False) -> None:
        pass

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Event:
        return cls()

    def record(self, stream: Any = None) -> None:
        FAULT.reached("record")

    def wait(self, stream: Any = None) -> None:
        pass

    synchronize = wait

    def query(self) -> bool:
        return True

    def ipc_handle(self) -> bytes:
        return b"handle"


class Nothing(contextlib.nullcontext[None]):
    """A current device or stream; a class, since annotations name it."""

    def __init__(self, *args: Any) -> None:
        super().__init__()


class Fault:
    """Raises where and when it was told to; or holds who comes there, and raises then."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.holds: set[str] = set()
        self.holding, self.go, self.gone = threading.Event(), threading.Event(), threading.Event()

    def arm(self, place: str, nth: int, *, hold: bool = False) -> None:
        for event in (self.holding, self.go, self.gone):
            event.clear()
        self.left[place] = nth
        if hold:
            self.holds.add(place)

    def is_reached(self, place: str) -> bool:
        try:
            self.reached(place)
        except RuntimeError:
            return True
        return False

    def reached(self, place: str) -> None:
        if place not in self.left:
            return
        self.left[place] -= 1
        if self.left[place]:
            return
        del self.left[place]
        if place in self.holds:
            self.holds.remove(place)
            self.holding.set()
            self.go.wait(PATIENCE)
        self.gone.set()
        raise RuntimeError(f"as where the device refuses: {place}")


FAULT = Fault()
HOST = ThreadPoolExecutor(1)
"""The thread of the device's driver."""
PLACE = next(Path(entry, "lmcache") for entry in sys.path if Path(entry, "lmcache", "__init__.py").exists())
"""Where LMCache is. To import it is to have it look for a device."""
MODES = (
    ("handle", "data")
    if (PLACE / "v1/multiprocess/modules/non_gpu_transfer.py").exists()
    else ("lmcache_driven", "engine_driven")
)
"""How LMCache calls the server's copies, and a worker's."""
DRIVEN = (PLACE / "v1" / "platform" / "cache_context.py").exists()
"""From 0.4.7 on LMCache has a device of its own for CPU memory."""
RECORDS = (PLACE / "v1" / "mp_observability" / "trace").exists()
"""From 0.4.4 on LMCache records calls, and has groups of layers."""
TOKENWISE = not (PLACE / "v1" / "multiprocess" / "affinity_pool.py").exists()
"""To 0.4.2 LMCache moves tokens, not blocks, from caches whose heads are behind a block's tokens; under one lock."""
SHAPES: dict[str, tuple[int, ...]] = {
    f"layer{number}": (2, BLOCKS, *((BLOCK, 2) if TOKENWISE else (2, BLOCK)), 8) for number in range(LAYERS)
}
WITH_GROUPS = SHAPES | {"wide": (2, BLOCKS, 4, BLOCK, 8)}
"""A layer of another form, which is a group of its own."""


CONFIGURED = [
    f"parse_args_to_{what}"
    for what in ("mp_server_config", "config", "observability_config", "prometheus_config", "telemetry_config")
]
"""What makes a server's configuration of its options, in the order in which it is given; not all are in each release."""


class Handle:
    """To 0.4.6, in the place of a handle of device memory: a file that both processes map."""

    files: ClassVar[dict[int, str]] = {}

    def __init__(self, tensor: torch.Tensor) -> None:
        self.file, self.shape = self.files[tensor.data_ptr()], tuple(tensor.shape)

    def to_tensor(self) -> torch.Tensor:
        return mapped(self.file, self.shape)


def mapped(file: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of float32 in a file's memory."""
    size = 4 * functools.reduce(lambda one, other: one * other, shape)
    with open(file, "a+b") as opened:
        opened.truncate(size)
        memory = mmap.mmap(opened.fileno(), size)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)


class Directions:
    """What `move_tokens` is told: from the cache to a chunk, or back."""

    D2H, H2D = range(2)


def move_tokens(
    chunk: torch.Tensor,
    addresses: torch.Tensor,
    tokens: torch.Tensor,
    device: Any,
    count: int,
    direction: int,
    form: int,
    block: int,
    skip: int = 0,
) -> None:
    """Copies all but `skip` tokens between layers of [2, count, values] at `addresses`, and [2, layers, tokens, values]."""
    for layer, address in enumerate(addresses.tolist()):
        words = ctypes.c_float * (2 * count * chunk.shape[3])
        cache = torch.frombuffer(words.from_address(address), dtype=torch.float32).view(2, count, -1)
        if direction == Directions.D2H:
            chunk[:, layer, skip:] = cache[:, tokens[skip:]]
        else:
            cache[:, tokens[skip:]] = chunk[:, layer, skip:]


def without_device(transfer: str) -> None:
    """Stand in for what LMCache to 0.4.6 asks the device for, and for the operations that its wheel has compiled."""
    if DRIVEN:
        return
    for name, double in (("Stream", Stream), ("ExternalStream", Stream), ("Event", Event)):
        setattr(torch.cuda, name, double)
    torch.cuda.is_available = lambda: True
    torch.cuda.device = torch.cuda.stream = Nothing  # type: ignore[assignment,misc]
    torch.cuda.empty_cache = torch.cuda.init = lambda: None
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda device=None: Stream()  # type: ignore[assignment,return-value]
    # To 0.4.1 no option turns the lazy allocation off, which registers its memory.
    torch.cuda.cudart = lambda: types.SimpleNamespace(cudaHostRegister=lambda address, size, flags: 0)
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(ExternalStream=Stream, Stream=Stream)  # type: ignore[attr-defined]
    sys.modules["cupy"] = cupy
    importlib.import_module("lmcache")
    # To 0.4.3 the package does not choose its stand-ins for the compiled operations; its modules would import the latter.
    ops = sys.modules.get("lmcache.c_ops") or importlib.import_module("lmcache.non_cuda_equivalents")
    sys.modules["lmcache.c_ops"] = ops
    spec = importlib.util.spec_from_file_location("transfer", transfer)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    recorded: list[tuple[str, bytes]] = []
    doubles = {
        "multi_layer_block_kv_transfer": module.transfer,
        "multi_layer_kv_transfer": move_tokens,
        "TransferDirection": Directions,
        "lmcache_memcpy_async": lambda there, here, size, *_: ctypes.memmove(there, here, size),
        "GPUKVFormat": native_doubles._Names("GPUKVFormat", (), {}),
        "PageBufferShapeDesc": module.PageBufferShapeDesc,
        "record_completion_on_stream": lambda stream, kind, payload: recorded.append((kind, payload)),
        "drain_recorded_completions": lambda: [recorded.pop(0) for _ in range(len(recorded))],
    }
    for name, double in doubles.items():
        if not hasattr(ops, name):
            setattr(ops, name, double)
    handles = importlib.import_module("lmcache.v1.multiprocess.custom_types").CudaIPCWrapper
    handles.files = Handle.files
    handles.__init__, handles.to_tensor = Handle.__init__, Handle.to_tensor


# The server


class Server:
    """A server in a child process. It serves once it starts."""

    def __init__(self, *words: str) -> None:
        self.port = free_port()
        self.pipe, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.pipe.close()  # so that it ends when who asks it does
                theirs.recv()
                serve(self.port, theirs, words)
            except BaseException as error:
                lmcache_server.told_of(error, theirs)
            os._exit(1)
        theirs.close()

    def start(self) -> None:
        assert self.ask("start") == "ready"

    def ask(self, *question: Any) -> Any:
        self.pipe.send(question)
        return lmcache_server.answer_of(self.pipe, question)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        for left in Path("/dev/shm").glob(f"*lmcache-{self.port}"):
            left.unlink(missing_ok=True)


def serve(port: int, pipe: Connection, words: tuple[str, ...]) -> None:
    module = importlib.import_module("lmcache.v1.multiprocess.server")
    sys.argv = ["lmcache", "--host", "127.0.0.1", "--port", str(port), "--chunk-size", str(CHUNK)]
    sys.argv += ["--l1-size-gb", "0.1", "--no-l1-use-lazy", "--eviction-policy", "LRU", "--disable-observability"]
    sys.argv += ["--disable-prometheus", "--max-gpu-workers", "16", *words]
    # To 0.4.2 some of these options are not there.
    argparse.ArgumentParser.parse_args = lambda parser: parser.parse_known_args()[0]  # type: ignore[assignment,misc]
    given = module.parse_args()
    configured = [getattr(module, name)(given) for name in CONFIGURED if hasattr(module, name)]
    a_thread_each()
    apart = {**vars(given), "start_prometheus_http_server": False}  # in 0.3.15 the port and others are options apart
    taken = inspect.signature(module.run_cache_server).parameters
    engine = module.run_cache_server(
        *configured, return_engine=True, **{name: value for name, value in apart.items() if name in taken}
    )[1]
    storage = getattr(engine, "storage_manager", None) or engine._modules[0]._ctx.storage_manager
    l1 = storage._l1_manager
    reserved_for = l1._write_ttl_seconds
    lock = importlib.import_module("lmcache.v1.distributed.l1_manager").TTLLock(1)
    settle = faults(engine)
    recorded: list[dict[str, Any]] = []

    def trace() -> None:
        calls: Any = importlib.import_module("lmcache.v1.mp_observability.trace.decorator")
        calls.set_tracing_enabled(True)
        calls.publish_call_event = lambda _, given: recorded.append(given)

    def expire() -> None:
        """What was reserved before, in `short`, has had its time."""
        lock.lock()
        until(lambda: not lock.is_locked())

    def free() -> int:
        return -int(l1.get_memory_usage()[0])

    def held() -> None:
        assert FAULT.holding.wait(PATIENCE)

    def go() -> None:
        FAULT.go.set()
        assert FAULT.gone.wait(PATIENCE)

    def act(name: str, *args: Any) -> Any:
        if name in ("fail", "hold"):
            FAULT.arm(*args, hold=name == "hold")
        if name == "disarm":
            FAULT.left.clear()
        if name == "forget":
            with contextlib.suppress(Exception):  # to 0.5.0 its stand-in for a device's context has no `close`
                transfers_of(engine).unregister_kv_cache(args[0])
        l1._write_ttl_seconds = {"short": 1, "long": reserved_for}.get(name, l1._write_ttl_seconds)
        called = {
            "settle": settle,
            "expire": expire,
            "free": free,
            "held": held,
            "go": go,
            "armed": lambda: dict(FAULT.left),
            "evict": lambda: l1.delete(list(l1._objects)) and None,
            "remembered": remembered,
            "trace": trace,
            "traced": lambda: sorted({type(key).__name__ for given in recorded for key in given.get("keys", ())}),
        }.get(name)
        return called() if called else "ready"

    pipe.send("ready")
    while True:
        pipe.send(act(*pipe.recv()))


class ThreadEach:
    """To 0.4.2, in the place of a server's threads: one by default, or several that may overtake each other."""

    def __init__(self, max_workers: int) -> None:
        self.threads = defaultdict[Any, ThreadPoolExecutor](lambda: ThreadPoolExecutor(1))

    def submit(self, handler: Callable[..., Any], *given: Any) -> Any:
        """`given` has, of a store and a load, the client's number behind the key."""
        return self.threads[given[1:2]].submit(handler, *given)


def a_thread_each() -> None:
    """Each client's stores and loads have a thread of their own; else two clients may draw the same by lot."""
    if TOKENWISE:
        importlib.import_module("lmcache.v1.multiprocess.mq").ThreadPoolExecutor = ThreadEach  # type: ignore[attr-defined]
        return
    pool = importlib.import_module("lmcache.v1.multiprocess.affinity_pool").AffinityThreadPool
    submit, clients = pool.submit, dict[int, int]()

    def submitted(self: Any, function: Any, *args: Any, affinity_key: int = 0, **kwargs: Any) -> Any:
        client = clients.setdefault(affinity_key, len(clients))
        return submit(self, function, *args, affinity_key=client, **kwargs)

    pool.submit = submitted


def remembered() -> int:
    """Objects of the patches' classes, and what is in their containers."""
    gc.collect()
    ours = [one for one in gc.get_objects() if str(type(one).__module__).startswith("_vllm_livepatch.patches.")]
    kept = [kept for one in ours for kept in getattr(one, "__dict__", {}).values() if hasattr(kept, "__len__")]
    return len(ours) + sum(map(len, kept))


def faults(engine: Any) -> Callable[[], None]:
    """Puts the faults where a store passes; returns what waits until all that stores submitted was done."""
    transfers = transfers_of(engine)
    if transfers is None:
        in_messages()
        return lambda: None
    module = sys.modules[type(transfers).__module__]
    copies = module
    if not hasattr(module, "lmcache_memcpy_async_d2h"):
        copies = importlib.import_module("lmcache.v1.multiprocess.object_group_transfer")  # from 0.5.6 on
    passed(copies, "lmcache_memcpy_async_d2h", "copy")
    if TOKENWISE:
        passed(module.GPUCacheContext, "get_tmp_gpu_buffer", "buffer")
    else:
        ops = getattr(copies, "device_ops", None) or copies.lmc_ops
        passed(ops, "multi_layer_block_kv_transfer", "move")
    if DRIVEN:
        device = importlib.import_module("lmcache").torch_dev
        passed(device.Event, "record", "record")
        passed(device.Stream, "synchronize", "synchronize")
    if not hasattr(module, "submit_callback_to_stream"):
        return lambda: HOST.submit(int).result(PATIENCE)
    submit, done = module.submit_callback_to_stream, threading.Event()
    passed(module, "submit_callback_to_stream", "submit")
    dispatcher = next(one for one in vars(transfers).values() if type(one).__name__ == "DeviceHostFuncDispatcher")
    dispatcher.register("settled", lambda _: done.set(), int)

    def settle() -> None:
        done.clear()
        submit(Stream(), "settled", 1)
        assert done.wait(PATIENCE)

    return settle


def transfers_of(engine: Any) -> Any:
    """The part of a server that copies, or None."""
    names = ("MPCacheEngine", "GPUTransferModule", "LMCacheDrivenTransferModule")
    modules = getattr(engine, "_modules", [engine])
    return next((one for one in modules if type(one).__name__ in names), None)


def in_messages() -> None:
    """Puts the faults where a server takes what its workers copied themselves."""
    name = "non_gpu_transfer" if not DRIVEN else "server_transfer"
    module: Any = importlib.import_module(f"lmcache.v1.multiprocess.modules.{name}")

    def loads(data: bytes) -> Any:
        chunks = pickle.loads(data)
        if FAULT.is_reached("short"):
            return chunks[:1]
        return [chunks[0], None, *chunks[2:]] if FAULT.is_reached("odd") else chunks

    module.pickle = types.SimpleNamespace(**{**vars(pickle), "loads": loads})


def passed(owner: Any, name: str, place: str) -> None:
    function = getattr(owner, name)

    def around(*args: Any, **kwargs: Any) -> Any:
        if place != "submit" or any(kind in args for kind in ("finish_write", "finish_write_by_owner")):
            FAULT.reached(place)
        return function(*args, **kwargs)

    setattr(owner, name, around)


# Workers


CONTEXTS: list[Any] = []
"""ZMQ's, one for each adapter."""


class Worker(lmcache_server.Caches):
    """The release's adapters of a worker and of a scheduler, and a cache whose blocks have contents."""

    made = 0

    def __init__(
        self,
        server: Server,
        shapes: dict[str, tuple[int, ...]] = SHAPES,
        *,
        copies: bool = False,
        alone: bool = False,
    ) -> None:
        """`copies`: the worker copies itself, into messages or shared memory, and not the server. `alone`: it has the
        number that LMCache gives it, as in a container of its own; to 0.4.7 its process's."""
        import zmq

        Worker.made += 1
        CONTEXTS.extend([zmq.Context(), zmq.Context()])
        self.server, self.number, self.requests = server, Worker.made, 0
        self.groups = len(set(shapes.values()))
        self.module = importlib.import_module("lmcache.integration.vllm.vllm_multi_process_adapter")
        hints = {"kv_layout": "HND"}
        for place in (self.module, importlib.import_module("lmcache.integration.vllm.utils")):
            place.vllm_layout_hints = lambda *args: hints  # type: ignore[attr-defined]
        url = f"tcp://127.0.0.1:{server.port}"
        given: dict[str, Any] = {
            "mq_timeout": 20.0 if copies or alone else PATIENCE,  # what is asked of a forgotten worker waits it out
            "heartbeat_interval": 3600.0,
            "vllm_block_size": BLOCK,
        }
        if hasattr(self.module, "ParallelStrategy"):
            fields = inspect.signature(self.module.ParallelStrategy).parameters
            ranks = {name: 0 if name.endswith(("_id", "_mla", "mla_only")) else 1 for name in fields}
            given["parallel_strategy"] = self.module.ParallelStrategy(**ranks)
        else:  # to 0.4.3
            given |= {"world_size": 1, "kv_rank": 0}
        fields = inspect.signature(self.module.LMCacheMPWorkerAdapter).parameters
        given = {name: value for name, value in given.items() if name in fields}  # to 0.4.1 no wait has a time
        model = f"model of {len(shapes)} layers"
        self.adapter = self.module.LMCacheMPWorkerAdapter(url, CONTEXTS[-2], model, **given)
        if not alone and self.adapter.instance_id == os.getpid():  # to 0.4.7, where two workers are two processes
            self.adapter.instance_id = os.getpid() * 100 + Worker.made
        scheduler = self.module.LMCacheMPSchedulerAdapter
        several = "server_urls" in inspect.signature(scheduler).parameters  # from 0.5.0
        self.scheduler = scheduler([url] if several else url, CONTEXTS[-1], model, **given)
        self.caches = {}
        for name, shape in shapes.items():
            file = f"cache-{Worker.made}-{name}"
            self.caches[name] = mapped(file, shape) if not DRIVEN else torch.zeros(shape)
            Handle.files[self.caches[name].data_ptr()] = os.path.abspath(file)
        os.environ["LMCACHE_MP_TRANSFER_MODE"] = MODES[copies]
        if not DRIVEN and hasattr(self.module, "create_transfer_context"):  # 0.4.6: as of a device, or not
            contexts: Any = importlib.import_module("lmcache.v1.multiprocess.transfer_context")
            kind = contexts.DataTransferContext if copies else contexts.HandleTransferContext
            self.module.create_transfer_context = lambda caches: kind()  # type: ignore[attr-defined]
        self.adapter.register_kv_caches(self.caches, *([self.infos()] if DRIVEN and self.groups > 1 else []))

    def infos(self) -> list[Any]:
        """What an engine says of its groups of layers."""
        kind = importlib.import_module("lmcache.v1.multiprocess.group_view").EngineGroupInfo
        layers = [tuple(range(LAYERS)), (LAYERS,)]
        return [kind(number, indices, BLOCK) for number, indices in enumerate(layers)]

    def operation(self, prompt: int, blocks: list[int]) -> Any:
        return operation(self.module, [prompt] * len(blocks) * BLOCK, blocks, self.groups)

    def event(self) -> Any:
        """That of the step which computed, or will use, the blocks: as vLLM's connector records it."""
        create = getattr(self.adapter, "create_recorded_event", None)
        return create() if create else (importlib.import_module("lmcache").torch_dev.Event if DRIVEN else Event)()

    def request(self) -> str:
        """The id of a request that there was not before."""
        self.requests += 1
        return f"request {self.number}-{self.requests}"

    def store(self, prompt: int, blocks: list[int] = FIRST, *, settle: bool = True) -> None:
        """Stores a prompt, of which the blocks hold its number. When this returns, the server has done with it."""
        self.begin(prompt, blocks)
        self.is_done(settle=settle)

    def begin(self, prompt: int, blocks: list[int] = FIRST) -> None:
        self.fill(prompt, blocks)
        self.adapter.submit_store_request(self.request(), self.operation(prompt, blocks), self.event())

    def is_done(self, *, settle: bool = True) -> None:
        """Waits until the server has done what this worker asked for: it does one after the other."""
        self.load(self.request(), 9999, SECOND)
        if settle:
            self.server.ask("settle")

    def load(self, name: str, prompt: int, blocks: list[int]) -> list[bool]:
        """Whether a load ended well, and whether what came is the prompt's."""
        self.fill(-1.0, blocks)
        self.adapter.submit_retrieve_request(name, self.operation(prompt, blocks), self.event())
        ended: set[str] = set()
        until(lambda: ended.update(self.adapter.get_finished(set())[1] or ()) or name in ended)
        failed = getattr(self.adapter, "get_block_ids_with_load_errors", set)()  # from 0.4.2 on
        return [not failed, self.holds(prompt, blocks)]

    def loaded(self, prompt: int, blocks: list[int] = SECOND) -> list[Any]:
        """How many tokens of a prompt are a hit; and where there are some, what their load came to."""
        name = self.request()
        found: list[int] = []
        self.scheduler.maybe_submit_lookup_request(name, packed([prompt] * (len(blocks) * BLOCK + 1)))

        def answered() -> bool:
            found.extend([one for one in [self.scheduler.check_lookup_result(name)] if one is not None])
            return bool(found)

        until(answered)
        (tokens,) = found
        return [tokens, *(self.load(name, prompt, blocks[: tokens // BLOCK]) if tokens else [])]


# The cases


def fails(
    worker: Worker, place: str, nth: int, prompt: int, *, evict: bool = True, also: str | None = None
) -> list[Any]:
    """A store fails. What others load of it at once, and when LMCache's time for a store is over; how many chunks the
    cache lacks then; and what they load when it was stored again. `also`: another fault, which stock need not reach.
    """
    server = worker.server
    if evict:
        server.ask("evict")
    free = server.ask("free")
    server.ask("short")
    server.ask("fail", place, nth)
    worker.store(prompt)
    if not set(server.ask("armed")) <= {also}:
        raise NotBuilt(f"no store passes where it is to fail: {place}")
    result = [worker.loaded(prompt)]
    server.ask("expire")
    result.append(worker.loaded(prompt))
    server.ask("long")
    result.append((free - server.ask("free")) / CHUNK_BYTES)
    worker.store(prompt)
    result.append(worker.loaded(prompt))
    return result


def shared(worker: Worker) -> list[Any]:
    """Another request has stored the prompt's first chunk. Its hit stays when the store of the others fails."""
    server = worker.server
    server.ask("evict")
    worker.store(70, FIRST[:2])
    result = fails(worker, "copy", 1, 70, evict=False)
    return [*result[:2], result[3]]


def beside(worker: Worker) -> list[Any]:
    """While a store is under way, another worker stores the same prompt, in vain, and a prompt of its own. Then the
    first store fails. What others load of the prompt, before, after, and when it was stored again; and of the other.
    """
    server, other = worker.server, Worker(worker.server)
    server.ask("evict")
    server.ask("hold", "buffer" if TOKENWISE else "copy", 2)  # where it has not locked out the other
    worker.begin(80)
    server.ask("held")
    result = []
    other.store(80, settle=False)
    other.store(81, settle=False)
    result.append(other.loaded(80))
    server.ask("go")
    worker.is_done()
    result.append(other.loaded(80))
    other.store(80)
    result += [other.loaded(80), other.loaded(81)]
    return result


def gone(worker: Worker) -> list[Any]:
    """The worker's registration ends amid its store, whose next copy is refused then."""
    server, other = worker.server, Worker(worker.server)
    server.ask("evict")
    free = server.ask("free")
    server.ask("short")
    server.ask("hold", "copy", 2)
    other.begin(90)
    server.ask("held")
    server.ask("forget", other.adapter.instance_id)
    server.ask("go")
    server.ask("expire")
    worker.is_done()
    server.ask("long")
    result = [worker.loaded(90), (free - server.ask("free")) / CHUNK_BYTES]
    worker.store(90)
    return [*result, worker.loaded(90)]


def unsynchronized(worker: Worker) -> list[Any]:
    """A store fails, and the device does not come to the end of what was launched: nobody knows whether it writes."""
    worker.server.ask("fail", "synchronize", 1)  # reached behind the other, where somebody synchronizes
    result = fails(worker, "record", 1, 100, also="synchronize")
    worker.server.ask("disarm")
    return result


def many(worker: Worker) -> list[Any]:
    """How many chunks the cache lacks after thirty stores that failed, and what more is remembered after these than
    after one of them.
    """
    server = worker.server
    server.ask("evict")
    free = server.ask("free")

    def one(prompt: int) -> None:
        server.ask("fail", "copy", 2)
        worker.store(prompt)

    one(110)
    remembered = server.ask("remembered")
    for prompt in range(111, 140):
        one(prompt)
    return [(free - server.ask("free")) / CHUNK_BYTES, server.ask("remembered") - remembered]


def traced(worker: Worker) -> list[str]:
    """What LMCache's recorder of calls can find of a store under way: the kinds of its keys."""
    server = worker.server
    server.ask("evict")
    server.ask("trace")
    server.ask("hold", "copy", 2)
    worker.begin(140)
    server.ask("held")
    kinds: list[str] = server.ask("traced")
    server.ask("go")
    worker.is_done()
    return kinds


CASES: dict[str, Callable[[Worker], Any]] = {
    "first copy": lambda worker: fails(worker, "copy", 1, 10),
    "amid": lambda worker: fails(worker, "copy", 2, 20),
    "last copy": lambda worker: fails(worker, "copy", 3, 30),
    "event": lambda worker: fails(worker, "record", 1, 50),
    "end": lambda worker: fails(worker, "submit", 1, 60),
    "groups": lambda worker: fails(Worker(worker.server, WITH_GROUPS), "move", 4, 40),
    "shared": shared,
    "beside": beside,
    "gone": gone,
    "many": many,
    "traced": traced,
    "unsynchronized": unsynchronized,
}
"""With a server that copies."""
SENT: dict[str, Callable[[Worker], Any]] = {
    "too few chunks": lambda worker: fails(worker, "short", 1, 10),
    "an odd chunk": lambda worker: fails(worker, "odd", 1, 20),
}
"""With a server that is sent chunks in messages."""


def words(*, copies: bool) -> list[str]:
    """A server's options."""
    if not DRIVEN:  # from 0.4.6 on
        return ["--transfer-mode", "non_gpu"] if copies else []
    served = {"handle": "gpu", "data": "non_gpu"}.get(MODES[copies], MODES[copies])
    return ["--supported-transfer-mode", served, "--shm-name", ""]


def played(transfer: str, *asked: str) -> dict[str, Any]:
    """What each of these cases came to; `transfer` is mp-block-transfer's file."""
    without_device(transfer)
    importlib.import_module("lmcache")
    importlib.import_module("lmcache.v1.multiprocess.server")
    importlib.import_module("lmcache.integration.vllm.vllm_multi_process_adapter")
    # What keys are made with imports vLLM: once, and not in each server.
    importlib.import_module("lmcache.v1.multiprocess.token_hasher").TokenHasher(CHUNK)
    # All servers first: a process that has used ZMQ cannot be forked.
    kinds = [
        (CASES, {"copies": False}),
        (SENT, {"copies": True}),
    ]
    wanted = [(cases, of, Server(*words(**of))) for cases, of in kinds if set(asked) & set(cases)]
    came: dict[str, Any] = {}
    for cases, of, server in wanted:
        server.start()
        worker = Worker(server, copies=of["copies"])
        came |= {name: attempted(functools.partial(cases[name], worker)) for name in cases if name in asked}
        server.kill()
    return came


def main() -> None:
    found = played(*sys.argv[1:])
    print_result({"cases": found}, sys.modules["lmcache"])
    leave()


if __name__ == "__main__":
    main()

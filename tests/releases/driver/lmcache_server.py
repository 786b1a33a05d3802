# mypy: disable-error-code="import-not-found"
"""One LMCache's real MP server in a process of its own, and real adapters of its worker and scheduler, on CPU memory.

The server is started by the release's own `run_cache_server`, with the options' defaults: a worker is forgotten 120 s after
its last ping, or 3600 s after its registration where it never pinged. A test does not wait for that: the server's clock is set
forward, and its own look for silent workers is called.

Nor does a case depend on how long this machine, or one of the processes, stalls: who waits for the server's answer waits until
it is there, unless the case keeps the server from answering (`Answer`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import inspect
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from lmcache_operations import operation, packed
from ports import free_port
from result import NotBuilt, trouble, until

CHUNK, BLOCK, BLOCKS, LAYERS = 32, 16, 16, 2
PATIENCE = 60.0
"""Longest time, in seconds, for what must come about."""
TICK = 0.02
"""In so many seconds a wait looks again."""
MODULES = "lmcache.v1.multiprocess.modules"
AFTER_A_PING, NEVER_PINGED = 121.0, 3601.0
"""Seconds of silence after which the server has forgotten a worker, by its options' defaults."""


def compiled() -> None:
    """The compiled modules, which pinned sources lack: those of the release that is installed, under all names."""
    for entry in sys.path:
        for file in Path(entry, "lmcache").glob("lmcache_native.*.so"):
            spec = importlib.util.spec_from_file_location("lmcache.lmcache_native", file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            for name in ("lmcache_native", "native_storage_ops"):
                sys.modules.setdefault(f"lmcache.{name}", module)


class Ended(str):
    """In the place of an answer: why a server, as it is started and asked here, has ended."""


def told_of(error: BaseException, pipe: Connection) -> None:
    """Tell who asks a server why it ends."""
    traceback.print_exc()
    with contextlib.suppress(OSError):
        pipe.send(Ended(trouble(error)))


def answer_of(pipe: Connection, question: object) -> Any:
    """A server's answer. Raises NotBuilt where it has ended by itself: nothing is known of it then."""
    assert pipe.poll(PATIENCE), f"the server does not answer to {question}"
    answer = pipe.recv()
    if isinstance(answer, Ended):
        raise NotBuilt(f"its server ended: {answer}")
    return answer


class Server:
    """A server in a child process, which also says how many workers it knows; `held`: it serves only once it starts.

    Without `shared` memory, what is stored and loaded goes through messages.
    """

    def __init__(self, port: int | None = None, *, held: bool = False, shared: bool = True) -> None:
        import multiprocessing

        self.port = port or free_port()
        self.serves = False
        self.stopped = False
        self.leaves_out = False  # it answers pings and registrations, and nothing that a step asks for
        self.pipe, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                theirs.recv()
                serve(self.port, theirs, f"lmcache-{self.port}" if shared else "")
            except BaseException as error:
                told_of(error, theirs)
            os._exit(1)
        theirs.close()
        if not held:
            self.start()

    def start(self) -> None:
        self.pipe.send("start")
        self.serves = self.ask("ready") == "ready"
        Answer.servers[self.port] = self

    def ask(self, question: str) -> Any:
        self.leaves_out = {"raise": True, "hold": True, "well": False}.get(question, self.leaves_out)
        self.pipe.send(question)
        return answer_of(self.pipe, question)

    def silence(self, seconds: float) -> int:
        """Let so many seconds pass for the server, in which this process is stopped; how many workers it then knows."""
        return int(self.ask(f"silence {seconds}"))

    def stop(self) -> None:
        """Stop it; when this returns it is stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)
        self.stopped = True

    def is_silent(self) -> bool:
        """Whether it is stopped, by a case and not by a stall, or has ended."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except OSError:
            return True
        self.stopped = self.stopped and state in "Tt"
        return self.stopped or state in "ZX"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        for left in Path("/dev/shm").glob(f"*lmcache-{self.port}"):  # what it would have removed itself
            left.unlink(missing_ok=True)


def serve(port: int, pipe: Connection, shm_name: str) -> None:
    parent = os.getppid()
    clock, ahead = time.monotonic, 0.0
    time.monotonic = lambda: clock() + ahead
    module = importlib.import_module("lmcache.v1.multiprocess.server")
    sys.argv = ["lmcache", "--host", "127.0.0.1", "--port", str(port), "--chunk-size", str(CHUNK)]
    driven_by_engine = importlib.util.find_spec(f"{MODULES}.engine_driven_transfer") is not None
    mode, kind = (
        ("engine_driven", "EngineDrivenTransferModule") if driven_by_engine else ("non_gpu", "NonGPUTransferModule")
    )
    sys.argv += ["--supported-transfer-mode", mode, "--l1-size-gb", "0.1", "--no-l1-use-lazy"]
    sys.argv += ["--eviction-policy", "LRU", "--disable-observability", "--shm-name", shm_name]
    given = module.parse_args()
    multiprocess = module.parse_args_to_mp_server_config(given)
    others = (module.parse_args_to_config(given), module.parse_args_to_observability_config(given))
    result = module.run_cache_server(multiprocess, *others, return_engine=True, start_prometheus_http_server=False)
    engine = result[1]

    def of(kind: str) -> Any:
        (found,) = [one for one in engine._modules if type(one).__name__ == kind]
        return found

    transfers = of(kind)
    resolve = getattr(transfers, "_resolve_for_transfer", None)  # from 0.5.0

    def known() -> int:
        return int(transfers.tracked_instance_count())

    def raising(*args: Any) -> Any:
        raise ValueError("as where it does not know the worker")

    held = threading.Event()

    def holding(*args: Any) -> Any:
        held.wait(PATIENCE)
        return resolve(*args)

    l1 = transfers._ctx.storage_manager._l1_manager
    reserved_for = l1._write_ttl_seconds
    lock = importlib.import_module("lmcache.v1.distributed.l1_manager").TTLLock(1)  # ends as what is reserved does

    def free() -> int:
        """How many chunks of a worker's there would be room for."""
        used, _ = l1.get_memory_usage()
        return -int(used) // (LAYERS * 2 * CHUNK * 2 * 8 * 4)

    def remembered() -> int:
        """Objects of the patches' classes, and what is in their containers."""
        gc.collect()
        ours = [one for one in gc.get_objects() if str(type(one).__module__).startswith("_vllm_livepatch.patches.")]
        kept = [kept for one in ours for kept in getattr(one, "__dict__", {}).values() if hasattr(kept, "__len__")]
        return len(ours) + sum(map(len, kept))

    tempers = {"raise": raising, "hold": holding, "well": resolve}

    while True:
        question, _, seconds = pipe.recv().partition(" ")
        if question == "silence":
            os.kill(parent, signal.SIGSTOP)
            try:
                ahead += float(seconds)
                of("ManagementModule")._reap_cycle()
            finally:
                os.kill(parent, signal.SIGCONT)
        l1._write_ttl_seconds = {"short": 1, "long": reserved_for}.get(question, l1._write_ttl_seconds)
        if question in tempers:
            transfers._resolve_for_transfer = tempers[question]
            (held.clear if question == "hold" else held.set)()
        if question == "reserve":
            lock.lock()
        if question == "evict":  # all that is not locked
            l1.delete(list(l1._objects))
        counted = {
            "silence": known,
            "known": known,
            "free": free,
            "reserved": lock.is_locked,
            "remembered": remembered,
            "salts": lambda: Counter(key.cache_salt for key in list(l1._objects)),
            "keys": lambda: sorted(key.chunk_hash.hex() for key in list(l1._objects)),
        }.get(question)
        pipe.send(counted() if counted else question)


class Clock:
    """The worker's clock, which a case sets forward."""

    def __init__(self) -> None:
        self.ahead = 0.0
        read = time.clock_gettime
        time.clock_gettime = lambda which: read(which) + self.ahead


CLOCK = Clock()


def silence(server: Server, seconds: float) -> int:
    """The worker is stopped for so long, with the machine that it is on; how many workers the server then knows."""
    known = server.silence(seconds)
    CLOCK.ahead += seconds
    return known


def ping_once(beat: Any) -> None:
    """In the place of a heartbeat's own thread, which pings when it starts: when it does again is the cases' to say."""

    def execute() -> None:
        beat._last_summary = beat._execute()
        beat._stop_event.wait()  # it lives until it is stopped: that of one that has ended does nothing, in some releases

    beat._running = True  # it can be stopped
    beat._thread = threading.Thread(target=execute, daemon=True)
    beat._thread.start()


class Answer(threading.Event):
    """What sets this is a server's answer. A wait for it runs out only while the server is kept from answering.

    That of the main thread, whose next act would let the server answer, is over at once; others wait by `TICK`s, one of which
    they have waited where the machine stalls for a second.
    """

    servers: ClassVar[dict[int, Server]] = {}
    port = 0
    """Which server is asked."""
    patience: ClassVar[float] = PATIENCE
    """Longest time for an answer of a server that nothing keeps from answering: some it never sends."""
    looked = passed = 0.0
    """When `clock` was last asked, and what it said."""

    @classmethod
    def clock(cls) -> float:
        """In place of time.monotonic() for lookups that are polled, from 0.5.5 on."""
        now = time.monotonic()
        if cls.servers[cls.port].is_silent():
            cls.passed += now - cls.looked
        cls.looked = now
        return cls.passed

    def wait(self, timeout: float | None = None) -> bool:
        left = PATIENCE if timeout is None else timeout
        deadline = time.monotonic() + self.patience
        while left > 0 and time.monotonic() < deadline:
            if super().wait(min(left, TICK)):
                return True
            server = self.servers[Answer.port]
            if server.is_silent() or (server.leaves_out and is_of_a_step()):
                left = 0.0 if threading.current_thread() is threading.main_thread() else left - TICK
        return self.is_set()


def is_of_a_step() -> bool:
    """Whether the caller waits for what a step asks for, and not for a ping or a registration under it."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_name
        if name in ("submit_store_request", "submit_retrieve_request"):
            return True
        if name in ("send_ping", "_send_register_kv_caches_request"):
            return False
        frame = frame.f_back
    return False


CONTEXTS: list[Any] = []
"""ZMQ's, one for each adapter: they know their sockets' monitors by numbers, of which the next socket may get one too soon."""


class Caches:
    """A worker's layers, in whose blocks a number stands for a request's KV."""

    caches: dict[str, Any]

    def fill(self, value: float, blocks: list[int]) -> None:
        for cache in self.caches.values():
            cache[:, blocks] = value

    def holds(self, value: float, blocks: list[int]) -> bool:
        return all(bool((cache[:, blocks] == value).all()) for cache in self.caches.values())


class Worker(Caches):
    """A worker's adapter with a cache in CPU memory, whose blocks have contents, and the scheduler's adapter.

    Their heartbeats ping when they are started, and then only by themselves where that is asked for.
    """

    def __init__(
        self,
        port: int,
        mq_timeout: float,
        interval: float = 30.0,
        *,
        pings_by_itself: bool = False,
        number: int | None = None,
    ) -> None:
        """`number`: that of another worker, as where two containers have a process of one id (to 0.4.7)."""
        import zmq

        Answer.port = port
        importlib.import_module("lmcache.v1.multiprocess.futures").threading = SimpleNamespace(
            **{**vars(threading), "Event": Answer}
        )
        CONTEXTS.extend([zmq.Context(), zmq.Context()])
        self.module = importlib.import_module("lmcache.integration.vllm.vllm_multi_process_adapter")
        self.module.time = SimpleNamespace(**{**vars(time), "monotonic": Answer.clock})
        beats = self.module.HeartbeatThread
        beats.start = beats.__mro__[1].start if pings_by_itself else ping_once
        takes = inspect.signature(self.module.ParallelStrategy).parameters  # five to 0.4.7
        strategy = self.module.ParallelStrategy(*(False, 1, 0, 1, 1, 1)[: len(takes)])
        url = f"tcp://127.0.0.1:{port}"
        given = {"mq_timeout": mq_timeout, "heartbeat_interval": interval}
        self.adapter = self.module.LMCacheMPWorkerAdapter(url, CONTEXTS[-2], "m", BLOCK, strategy, **given)
        kind = self.module.LMCacheMPSchedulerAdapter
        one = "server_url" in inspect.signature(kind).parameters  # to 0.4.7
        if one and number is not None:
            self.adapter.instance_id = number
        elif self.adapter.instance_id == os.getpid():  # to 0.4.7: several workers are several processes there
            self.adapter.instance_id = os.getpid() * 100 + len(CONTEXTS)
        self.scheduler = kind(url if one else [url], CONTEXTS[-1], "m", BLOCK, strategy, **given)
        self.caches = {f"layer{number}": torch.zeros(2, BLOCKS, 2, BLOCK, 8) for number in range(LAYERS)}
        self.adapter.register_kv_caches(self.caches)
        self.reported: list[tuple[set[str], set[str]]] = []

    def beat(self) -> None:
        """One heartbeat now, from which on the server expects more; the next comes after the interval."""
        self.adapter._ensure_heartbeat_started()
        self.rest()
        self.adapter._heartbeat._execute()

    def rest(self) -> None:
        """Wait until the heartbeats' own threads have pinged, where they were started: the next ping comes after the interval.

        A heartbeat that a step asked for, and did not wait for, has ended too.
        """
        beats = (self.adapter._heartbeat, *(getattr(self.scheduler, "_heartbeats", None) or {}).values())
        until(lambda: all(beat is None or beat.last_summary is not None for beat in beats))
        asking = getattr(getattr(self.adapter, "_livepatch_registration", None), "asking", None)
        until(lambda: asking is None or not asking.is_alive())

    def close(self) -> None:
        """Let both adapters say goodbye, so that the server knows the worker no more: no ping is under way any longer,
        after which it might register again."""
        self.rest()
        self.adapter.shutdown()
        if hasattr(self.scheduler, "shutdown"):  # from 0.5.0
            self.scheduler.shutdown()

    def operation(self, prompt: int, blocks: list[int]) -> Any:
        return operation(self.module, [prompt] * len(blocks) * BLOCK, blocks)

    def event(self) -> Any:
        """As the connector gets it; on CPU memory nothing is recorded."""
        create = getattr(self.adapter, "create_recorded_event", None)
        return create() if create else SimpleNamespace(wait=lambda *args: None)

    def store(self, name: str, prompt: int, blocks: list[int]) -> None:
        self.adapter.submit_store_request(name, self.operation(prompt, blocks), self.event())

    def load(self, name: str, prompt: int, blocks: list[int]) -> None:
        self.adapter.submit_retrieve_request(name, self.operation(prompt, blocks), self.event())

    def finished(self, *ids: str) -> tuple[list[str], list[str], list[int]]:
        """What is reported as stored and as loaded, and the blocks of failed loads."""
        stored, loaded = self.adapter.get_finished(set(ids))
        return sorted(stored or ()), sorted(loaded or ()), sorted(self.adapter.get_block_ids_with_load_errors())

    def hit(self, name: str, prompt: int, tokens: int) -> int:
        """How many tokens of a prompt the server has; they stay locked for a load by this name."""
        self.scheduler.maybe_submit_lookup_request(name, packed([prompt] * tokens))
        found: list[int] = []

        def answered() -> bool:
            result = self.scheduler.check_lookup_result(name)
            if result is not None:
                found.append(result)
            return result is not None

        until(answered)
        return found[0]

# mypy: disable-error-code="import-not-found"
"""One release's real MoRI-IO worker without its hardware, and a peer for it to write to and read from.

The worker is the release's own, on KV caches in host memory, over the stand-in for the `mori` package. Doubles are what
it is told of the machine: the groups of ranks (one rank), the attention backend's name, CUDA's events.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import mori
import msgpack
import torch
import zmq
from ports import free_port
from result import Expecting, NotBuilt, does_not_fit, trouble
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.moriio import moriio_common as common
from vllm.distributed.kv_transfer.kv_connector.v1.moriio import moriio_connector as connector

LAYERS = ("layer.0", "layer.1")
BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 8, 4, 2, 8
HOST = "127.0.0.1"
STEP = "a step of the model"
"""The name of the thread that `Running.runs` makes."""


class Event:
    """In place of CUDA's: on a CPU, what was recorded is done."""

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


def set_up() -> None:
    """Tell the release's modules of a machine with one rank and no GPU."""
    group = SimpleNamespace(rank=0, local_rank=0, world_size=1, rank_in_group=0)
    doubles: dict[str, Callable[..., Any]] = {
        "get_world_group": lambda: group,
        "get_tp_group": lambda: group,
        "get_tensor_model_parallel_rank": lambda: 0,
        "get_tensor_model_parallel_world_size": lambda: 1,
        "get_attn_backend": lambda *args, **kwargs: SimpleNamespace(get_name=lambda: "NONE"),
        "get_ip": lambda: HOST,
    }
    for module in (common, connector):
        for name, double in doubles.items():
            if hasattr(module, name):
                setattr(module, name, double)
    torch.cuda.Event = Event
    torch.cuda.current_stream = lambda: None


def until(true: Callable[[], Any], seconds: float) -> bool:
    """Wait until something is true, no longer than `seconds`; whether it is."""
    pause = threading.Event()
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        pause.wait(0.002)
    return True


def caches(value: float) -> dict[str, Any]:
    """KV caches, a tensor a layer, with other values in every layer and block."""
    shape = (2, BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE)
    size = torch.Size(shape).numel()
    return {name: value * (torch.arange(size) + 1000 * i).view(shape) for i, name in enumerate(LAYERS)}


class Running(Expecting):
    """A world that runs what may never return."""

    def runs(self, action: Callable[[], None], seconds: float) -> bool:
        """Run something in a thread of its own; whether it ended, in time and well."""
        ended = threading.Event()
        raised: list[BaseException] = []

        def run() -> None:
            try:
                action()
            except BaseException as error:
                raised.append(error)
            ended.set()

        threading.Thread(target=run, name=STEP, daemon=True).start()
        if not self.expect(ended.wait(seconds), "never returns"):
            return False
        for error in raised:
            print(f"raised: {error!r}", file=sys.stderr)
            if does_not_fit(error):
                raise NotBuilt(trouble(error)) from error
            self.expect(False, f"raises {type(error).__name__}")
        return not raised


class Worker:
    """A real MoRIIOConnectorWorker, told to listen on free ports."""

    def __init__(self, *, producer: bool = True, read: bool = False, backend: str = "rdma", port: int = 0) -> None:
        os.environ["VLLM_MORIIO_CONNECTOR_READ_MODE"] = str(int(read))
        self.notify_port = free_port()
        extra = {
            "proxy_ip": "",
            "proxy_ping_port": 0,
            "http_port": 0,
            "handshake_port": port or free_port(),
            "notify_port": self.notify_port,
            "read_mode": read,
            "backend": backend,
            # What the releases that bound their waits themselves call it.
            "transfer_timeout": os.environ.get("LIVEPATCH_MORIIO_TIMEOUTS_TRANSFER_SECONDS", 30),
            "defer_timeout": os.environ.get("LIVEPATCH_MORIIO_TIMEOUTS_DEFER_SECONDS", 60),
        }
        role = "kv_producer" if producer else "kv_consumer"
        config = SimpleNamespace(
            kv_transfer_config=KVTransferConfig(
                kv_connector="MoRIIOConnector", kv_role=role, kv_connector_extra_config=extra
            ),
            parallel_config=SimpleNamespace(data_parallel_rank=0, data_parallel_size=1),
            cache_config=SimpleNamespace(block_size=BLOCK_SIZE, cache_dtype="auto"),
            model_config=SimpleNamespace(
                use_mla=False,
                dtype=torch.float32,
                get_head_size=lambda: HEAD_SIZE,
                hf_config=SimpleNamespace(model_type="llama"),
            ),
        )
        self.real: Any = connector.MoRIIOConnectorWorker(config, f"{HOST}:{extra['handshake_port']}")
        self.caches = caches(1.0 if producer else 0.0)

    def register(self) -> None:
        self.real.register_kv_caches(self.caches)

    def close(self) -> None:
        self.real._handshake_initiation_executor.shutdown(wait=False)
        for path in list(self.real.moriio_wrapper.paths.values()):
            path.close(linger=0)
        self.real.moriio_wrapper.paths.clear()


class Peer:
    """The other side: it shakes hands by the release's own listener, has KV caches, and hears what it is notified of.

    `answers`: "yes", "no" (it is silent, until told to `answer`) or "garbage".
    """

    def __init__(self, answers: str = "yes", value: float = 0.0) -> None:
        self.handshake_port, self.notify_port = free_port(), free_port()
        self.caches = caches(value)
        self.notified: list[str] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(f"tcp://{HOST}:{self.notify_port}")
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()
        if answers == "yes":
            self.answer()
        elif answers == "garbage":
            threading.Thread(target=self._answer_garbage, daemon=True).start()

    @property
    def address(self) -> str:
        return f"{HOST}:{self.handshake_port}"

    def answer(self) -> None:
        """Shake hands from now on."""
        engine = mori.io.IOEngine(f"peer:{self.handshake_port}", mori.io.IOEngineConfig())
        memory = {name: [engine.register_torch_tensor(cache).pack()] for name, cache in self.caches.items()}
        metadata = common.MoRIIOAgentMetadata(
            engine_id=self.address,
            agent_metadata=engine.get_engine_desc().pack(),
            kv_caches_base_addr=[],
            num_blocks=BLOCKS,
            block_len=0,
            attn_backend_name="NONE",
        )
        ready = threading.Event()
        listener = connector.MoRIIOConnectorWorker._moriio_handshake_listener
        arguments = (metadata, ready, self.handshake_port, 0, 0, memory)
        threading.Thread(target=listener, args=arguments, daemon=True).start()
        ready.wait(10)

    def _answer_garbage(self) -> None:
        with zmq.Context().socket(zmq.ROUTER) as answering:
            answering.bind(f"tcp://{HOST}:{self.handshake_port}")
            while True:
                identity, *_ = answering.recv_multipart()
                answering.send_multipart([identity, b"", b"garbage"])

    def _listen(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            while True:
                _, message = self._socket.recv_multipart()
                self.notified.append(message.decode())

    def send(self, port: int, message: bytes) -> None:
        """As the peer's scheduler sends to a worker's notification port."""
        with self._context.socket(zmq.DEALER) as sending:
            sending.connect(f"tcp://{HOST}:{port}")
            sending.send(message)
            sending.close(linger=5000)


class Sent:
    """One request that a prefill worker is to write to a peer: `blocks` here become `remote_blocks` there."""

    _numbers = iter(range(1, 1_000_000))

    def __init__(self, peer: Peer, blocks: list[int], remote_blocks: list[int], request_id: str = "") -> None:
        self.number = next(self._numbers)
        self.peer, self.blocks, self.remote_blocks = peer, blocks, remote_blocks
        address = f"host:{HOST},handshake:{peer.handshake_port},notify:{peer.notify_port}"
        # From 0.20 on the peer's address is part of the id that the router gives.
        named = f"cmpl-___prefill_addr_{address}___decode_addr_{address}_{self.number:032x}"
        self.request_id = request_id or named
        self.transfer_id = f"tx-{self.number}"
        self.parameters = {
            "transfer_id": self.transfer_id,
            "remote_block_ids": remote_blocks,
            "remote_engine_id": peer.address,
            "remote_host": HOST,
            "remote_port": peer.handshake_port,
            "remote_handshake_port": peer.handshake_port,
            "remote_notify_port": peer.notify_port,
        }

    @property
    def key(self) -> str:
        """What the two sides call the request between them."""
        return self.transfer_id if hasattr(common, "TransferId") else self.request_id

    def allocate(self, worker: Worker) -> None:
        """The peer has blocks for the request, says which, and the worker has heard of it."""
        message: dict[str, Any] = {"req_id": self.request_id, "transfer_id": self.transfer_id, "type": "remote_blocks"}
        message |= {"block_notify_list": self.remote_blocks, "decode_rank": 0}
        self.peer.send(worker.notify_port, msgpack.dumps(message))
        heard = worker.real.moriio_wrapper.done_remote_allocate_req_dict
        if not until(lambda: self.key in heard, 60):
            raise TimeoutError(f"the worker never heard of {self.key}")

    def arrived(self, worker: Worker, layers: Sequence[str] = LAYERS) -> bool:
        """Whether both sides have the same in the request's blocks, in these layers."""
        for name in layers:
            here, there = worker.caches[name], self.peer.caches[name]
            if not torch.equal(here[:, self.blocks], there[:, self.remote_blocks]):
                return False
        return True


class Asked(UserDict[str, Any]):
    """Requests by id; calls `asked` when somebody has for the first time been through all of them."""

    def __init__(self, requests: dict[str, Any], asked: Callable[[], None]) -> None:
        super().__init__(requests)
        self._asked: list[Callable[[], None]] = [asked]

    def __iter__(self) -> Iterator[str]:
        yield from self.data
        while self._asked:
            self._asked.pop()()


def step(*requests: Sent, write: bool = True, asked: Callable[[], None] | None = None) -> Any:
    """What the scheduler tells a worker of one step; what to call when the worker has been through its requests."""
    metadata = common.MoRIIOConnectorMetadata()
    for request in requests:
        metadata.add_new_req(request.request_id, request.blocks, request.parameters, write_mode=write)
        if hasattr(metadata, "transfer_id_to_request_id"):
            metadata.transfer_id_to_request_id[request.transfer_id] = request.request_id
    if asked is not None:
        name = "reqs_to_save" if write else "reqs_to_recv"
        setattr(metadata, name, Asked(getattr(metadata, name), asked))
    return metadata


def save(worker: Worker, metadata: Any) -> None:
    """A step's forward pass, as far as the worker sees it."""
    worker.real.start_load_kv(metadata)
    for name in LAYERS:
        worker.real.save_kv_layer(metadata, name, worker.caches[name], None)


@contextlib.contextmanager
def spinning_ends(worker: Worker, peers: list[Peer]) -> Iterator[None]:
    """Afterwards, end what a stock worker still spins for, so that the next case has the processor."""
    try:
        yield
    finally:
        for flags in (worker.real.write_ready_flags, worker.real.load_ready_flag):
            flags.update(dict.fromkeys([None, *(peer.address for peer in peers)], True))

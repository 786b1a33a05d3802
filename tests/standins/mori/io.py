# mypy: disable-error-code="import-not-found"
"""The interface of `mori.io`, in one process: a transfer copies bytes between registered tensors, in host memory."""

from __future__ import annotations

import enum
import itertools
import pickle
import threading
from typing import Any

from . import orders


class BackendType(enum.Enum):
    Unknown = 0
    XGMI = 1
    RDMA = 2
    TCP = 3


class PollCqMode(enum.Enum):
    POLLING = 0
    EVENT = 1


class StatusCode(enum.Enum):
    SUCCESS = 0
    INIT = 1
    IN_PROGRESS = 2
    ERR_RDMA_OP = 102


class RdmaBackendConfig:
    def __init__(
        self,
        qp_per_transfer: int = 1,
        post_batch_size: int = -1,
        num_worker_threads: int = -1,
        poll_cq_mode: PollCqMode = PollCqMode.POLLING,
        enable_notification: bool = True,
    ) -> None:
        self.qp_per_transfer = qp_per_transfer


class XgmiBackendConfig:
    def __init__(self, num_streams: int = 64, num_events: int = 64) -> None:
        self.num_streams = num_streams


class IOEngineConfig:
    def __init__(self, host: str = "", port: int = 0) -> None:
        self.host, self.port = host, port


class _Packed:
    def pack(self) -> bytes:
        return pickle.dumps(vars(self))

    @classmethod
    def unpack(cls, packed: bytes) -> Any:
        made = cls.__new__(cls)
        vars(made).update(pickle.loads(packed))
        return made


class EngineDesc(_Packed):
    def __init__(self, key: str) -> None:
        self.key = key


class MemoryDesc(_Packed):
    def __init__(self, engine_key: str, number: int, size: int) -> None:
        self.engine_key, self.id, self.size = engine_key, number, size


class TransferStatus:
    """A status as mori's: `Wait` returns when the transfer is no longer in progress, and may do so never."""

    def __init__(self) -> None:
        self._code = StatusCode.IN_PROGRESS
        self._message = ""
        self._ended = threading.Event()
        self._in_wait: Any = None

    def Code(self) -> StatusCode:
        return self._code

    def Message(self) -> str:
        return self._message

    def InProgress(self) -> bool:
        return self._code is StatusCode.IN_PROGRESS

    def Succeeded(self) -> bool:
        return self._code is StatusCode.SUCCESS

    def Failed(self) -> bool:
        return self._code is StatusCode.ERR_RDMA_OP

    def Wait(self) -> None:
        if self._in_wait is not None:
            self._in_wait()
        self._ended.wait()

    def end(self, code: StatusCode, message: str = "") -> None:
        self._code, self._message = code, message
        self._ended.set()


_tensors: dict[int, Any] = {}
"""Registered memory by number: the test's process is all machines at once."""
_numbers = itertools.count(1)


class IOEngineSession:
    def __init__(self, local: MemoryDesc, remote: MemoryDesc) -> None:
        self._local, self._remote = local, remote

    def batch_write(self, local: list[int], remote: list[int], sizes: list[int], uid: int) -> TransferStatus:
        return self._begin(self._local, local, self._remote, remote, sizes)

    def batch_read(self, local: list[int], remote: list[int], sizes: list[int], uid: int) -> TransferStatus:
        return self._begin(self._remote, remote, self._local, local, sizes)

    def alive(self) -> bool:
        return True

    def _begin(
        self, source: MemoryDesc, source_at: list[int], target: MemoryDesc, target_at: list[int], sizes: list[int]
    ) -> TransferStatus:
        status = TransferStatus()

        def complete() -> None:
            copied, into = (_tensors[desc.id] for desc in (source, target))
            for begin, place, size in zip(source_at, target_at, sizes, strict=True):
                into[place : place + size] = copied[begin : begin + size]
            status.end(StatusCode.SUCCESS)

        end = orders.next_end(complete)
        if end == orders.REFUSED:
            raise RuntimeError("the stand-in was ordered to refuse this transfer")
        if end == orders.AT_ONCE:
            complete()
        elif end == orders.FAILED:
            status.end(StatusCode.ERR_RDMA_OP, "the stand-in was ordered to fail this transfer")
        elif end == orders.IN_WAIT:
            status._in_wait = complete
        return status


class IOEngine:
    def __init__(self, key: str, config: IOEngineConfig) -> None:
        self._desc = EngineDesc(key)
        self._uids = itertools.count()
        self.backends: list[BackendType] = []

    def get_engine_desc(self) -> EngineDesc:
        return self._desc

    def create_backend(self, backend: BackendType, config: Any = None) -> None:
        self.backends.append(backend)

    def register_remote_engine(self, desc: EngineDesc) -> None: ...

    def register_torch_tensor(self, tensor: Any) -> MemoryDesc:
        import torch

        number = next(_numbers)
        _tensors[number] = tensor.view(-1).view(torch.uint8)
        return MemoryDesc(self._desc.key, number, _tensors[number].numel())

    def allocate_transfer_uid(self) -> int:
        return next(self._uids)

    def create_session(self, local: MemoryDesc, remote: MemoryDesc) -> IOEngineSession:
        return IOEngineSession(local, remote)

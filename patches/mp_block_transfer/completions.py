"""What LMCache 0.4.6 also needs a compiled module for: a call when a device's stream has come to some point."""

from __future__ import annotations

import threading
from typing import Any


class Completions:
    """Calls recorded on streams, and those of them that the streams have come to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recorded: list[tuple[Any, str, bytes]] = []

    def record_completion_on_stream(self, stream: int, kind: str, payload: bytes) -> None:
        """`stream` is the address of a stream of the current device."""
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.ExternalStream(stream))
        with self._lock:
            self._recorded.append((event, kind, payload))

    def drain_recorded_completions(self) -> list[tuple[str, bytes]]:
        """Kind and payload of what the streams have come to since the last call, each stream's in its order."""
        with self._lock:
            reached = [entry[0].query() for entry in self._recorded]
            recorded, self._recorded = self._recorded, []
            drained = []
            for entry, done in zip(recorded, reached, strict=True):
                if done:
                    drained.append(entry[1:])
                else:
                    self._recorded.append(entry)
        return drained

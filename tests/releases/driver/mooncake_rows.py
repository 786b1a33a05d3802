"""The same as in mooncake_mla.py, of layers that share memory: a block's row has each of them, one behind the other.

From 0.32.0 on the release writes such a row as one region. `mooncake_rows.py PATIENCE CASE...`.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from typing import Any

import mooncake_layers as layers
import mooncake_mla as mla
import mooncake_sides as sides
import torch
from mooncake_mla import RANK, ROPE


class Rows(mla.Model):
    def cache(self, layer: str, heads: int) -> Any:
        """A layer's part of each row. With the first one of a side the memory of all is made."""
        number = sides.LAYERS.index(layer)
        if not number:
            self.rows = torch.zeros(sides.BLOCKS, len(sides.LAYERS), 32, RANK + ROPE)
        return self.rows[:, number]


def regions(pair: layers.Pair) -> int:
    """Of how many regions what is written for a block consists."""
    ((local, _, error),) = pair.prefill.worker._prepared_transfer_regions.values()
    assert error is None
    return len(local)


if __name__ == "__main__":
    mla.Model = Rows  # type: ignore[misc]
    layers.CASES += (regions,)
    mla.main()

"""The operation itself, on random layouts: every byte of memory against a plain reference in Python.

    block_transfer.py TRANSFER.PY CASES.JSON

A case's memory is one buffer of random bytes, in which the cache's tensors and the chunks lie where the case says.
"""

from __future__ import annotations

from result import print_result, take_stdout

take_stdout()

import enum
import importlib.util
import itertools
import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import torch

Direction = enum.Enum("Direction", [("H2D", 0), ("D2H", 1)])

# Where a block lies: the tensor (of the list of pointers) and its offset there. B is a block's bytes, P from one block
# to the next in a tensor that has nothing outside its blocks; k is 0 or 1, n the layer, b the block.
BLOCK: dict[str, Any] = {
    "NB_NL_TWO_BS_NH_HS": lambda c, k, n, b: (0, b * c.P + (n * 2 + k) * c.B),
    "NB_NL_TWO_NH_BS_HS": lambda c, k, n, b: (0, b * c.P + (n * 2 + k) * c.B),
    "NL_X_TWO_NB_BS_NH_HS": lambda c, k, n, b: (n, (k * c.nb + b) * c.B),
    "NL_X_TWO_NB_NH_BS_HS": lambda c, k, n, b: (n, (k * c.nb + b) * c.B),
    "NL_X_NB_TWO_BS_NH_HS": lambda c, k, n, b: (n, b * c.P + k * c.B),
    "NL_X_NB_TWO_NH_BS_HS": lambda c, k, n, b: (n, b * c.P + k * c.B),
    "NL_X_NB_BS_HS": lambda c, k, n, b: (n, b * c.P),
    "NL_X_NBBS_ONE_HS": lambda c, k, n, b: (n, b * c.B),
    "TWO_X_NL_X_NBBS_NH_HS": lambda c, k, n, b: (k * c.nl + n, b * c.B),
    "TWO_X_NL_X_NB_BS_NH_HS": lambda c, k, n, b: (k * c.nl + n, b * c.P),
}


class Case:
    """A case's memory and how it is laid out."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.__dict__.update(given)
        self.format: str
        self.nl: int
        self.nb: int
        self.bs: int
        self.nh: int
        self.hs: int
        self.kv = 2 if "TWO" in self.format else 1
        self.head = self.hs * given["element"]
        self.B = self.bs * self.nh * self.head
        in_one = self.B * (self.nl * 2 if self.format.startswith("NB_NL") else 2 if "NB_TWO" in self.format else 1)
        self.P = in_one + given["padding"] * given["element"]
        tensors = {"NB": 1, "NL": self.nl, "TW": 2 * self.nl}[self.format[:2]]
        size = 2 * self.nb * self.B if "TWO_NB" in self.format else self.nb * self.P
        self.objects = len(given["ids"]) // given["per"]
        self.slots = given["per"] * self.bs
        self.chunk = self.kv * self.nl * self.slots * self.nh * self.head
        rng = random.Random(given["seed"])
        parts = [size] * tensors + [self.chunk] * self.objects
        gaps = [rng.randrange(0, 5) * given["gap"] for _ in parts]
        order = list(range(len(parts)))
        if given["shuffled"]:
            rng.shuffle(order)
        places, at = [0] * len(parts), 32
        for part in order:
            places[part] = at
            at += parts[part] + gaps[part]
        self.memory = torch.frombuffer(bytearray(rng.randbytes(at + 48)), dtype=torch.uint8)
        # The buffer itself may begin anywhere: the case says how far off an address of full alignment.
        shift = (given["offset"] - self.memory.data_ptr()) % 16
        self.tensors = [place + shift for place in places[:tensors]]
        self.chunks = [place + shift for place in places[tensors:]]

    def where(self, kv: int, layer: int, block: int, slot: int, head: int) -> int:
        """Offset in the buffer of one head of the cache."""
        tensor, offset = BLOCK[self.format](self, kv, layer, block)
        in_block = head * self.bs + slot if self.format.endswith("NH_BS_HS") else slot * self.nh + head
        return self.tensors[tensor] + offset + in_block * self.head

    def heads(self, block: int) -> list[int]:
        every = itertools.product(range(self.kv), range(self.nl), [block], range(self.bs), range(self.nh))
        return [self.where(*one) for one in every]

    def in_chunk(self, kv: int, layer: int, position: int, slot: int, head: int) -> int:
        """Offset in the buffer of one head of the chunks, `position` counts blocks of all chunks."""
        chunk, block = divmod(position, self.per)
        token = (kv * self.nl + layer) * self.slots + block * self.bs + slot
        return self.chunks[chunk] + (token * self.nh + head) * self.head

    def expected(self, to_cache: bool) -> bytes:
        memory = bytearray(self.memory.numpy().tobytes())
        for position in range(self.skip, len(self.ids)):
            for kv in range(self.kv):
                for layer in range(self.nl):
                    for slot in range(self.bs):
                        for head in range(self.nh):
                            here = self.where(kv, layer, self.ids[position], slot, head)
                            there = self.in_chunk(kv, layer, position, slot, head)
                            to, of = (here, there) if to_cache else (there, here)
                            memory[to : to + self.head] = memory[of : of + self.head]
        return bytes(memory)

    def arguments(self, to: str, **other: Any) -> list[Any]:
        base = self.memory.data_ptr()
        desc = SimpleNamespace(
            kv_size=self.kv,
            nl=self.nl,
            nb=self.nb,
            bs=self.bs,
            nh=self.nh,
            hs=self.hs,
            element_size=self.element,
            block_stride_elems=self.P // self.element if self.padding else 0,
        )
        made = {
            "pointers": torch.tensor([base + offset for offset in self.tensors]),
            "chunks": [base + offset for offset in self.chunks],
            "ids": torch.tensor(self.ids),
            "device": torch.device("cpu"),
            "direction": Direction[to],
            "desc": SimpleNamespace(**{**vars(desc), **other.pop("desc", {})}),
            "slots": self.slots,
            "format": SimpleNamespace(name=self.format),
            "skip": self.skip,
        }
        return list({**made, **other}.values())


def differences(given: dict[str, Any], transfer: Any) -> list[str]:
    """What went wrong with a case."""
    wrong = []
    case = Case(given)
    arguments = None
    for direction in ("D2H", "H2D", "D2H", "H2D"):  # the later ones find what the first kept
        if arguments is not None and direction == "H2D":  # other addresses in the same tensor
            case.tensors.reverse()
            arguments[0].copy_(arguments[0].flip(0))
        elif arguments is not None:  # other chunks, and other blocks
            case.chunks.reverse()
            case.ids.reverse()
            arguments[1:3] = [arguments[1][::-1], arguments[2].flip(0)]
        expected = case.expected(direction == "H2D")
        arguments = arguments or case.arguments(direction)
        arguments[4] = Direction[direction]
        transfer(*arguments)
        if case.memory.numpy().tobytes() != expected:
            wrong.append(direction)
        case.memory.random_(0, 256)
    # There and back: what was in the blocks is in them again.
    arguments[8] = 0
    transfer(*arguments)
    held = case.memory.clone()
    for block in case.ids:
        for place in case.heads(block):
            case.memory[place : place + case.head].zero_()
    arguments[4] = Direction["H2D"]
    transfer(*arguments)
    if not torch.equal(case.memory, held):
        wrong.append("there and back")
    return wrong


def refused(given: dict[str, Any], transfer: Any) -> dict[str, str]:
    """What cannot be done, and that nothing is written for it."""
    case = Case(given)
    chunks = case.arguments("H2D")[1]
    attempts: dict[str, dict[str, Any]] = {
        "direction": {"direction": None},
        "format": {"format": SimpleNamespace(name="NL_X_NB_NH_BS_TWO_HS")},
        "kv_size": {"desc": {"kv_size": 3 - case.kv}},
        "empty": {"desc": {"hs": 0}},
        "stride": {"desc": {"block_stride_elems": case.P // case.element - 1}},
        "block too high": {"ids": torch.tensor([*case.ids[:-1], case.nb])},
        "block below 0": {"ids": torch.tensor([*case.ids[:-1], -1])},
        "too few blocks": {"ids": torch.tensor(case.ids[:-1])},
        "slots": {"slots": case.slots + 1},
        "no chunks": {"chunks": []},
        "chunk nowhere": {"chunks": [*chunks[:-1], 0]},
        "skip": {"skip": -1},
        "too few tensors": {"pointers": torch.tensor(case.arguments("H2D")[0].tolist()[:-1])},
        "tensor nowhere": {"pointers": torch.tensor([*case.arguments("H2D")[0].tolist()[:-1], 0])},
        "device": {"device": "meta"},
    }
    outcomes = {}
    before = case.memory.clone()
    for name, other in attempts.items():
        for direction in ("H2D", "D2H"):
            try:
                transfer(*case.arguments(direction, **other))
                outcomes[name] = "done"
            except ValueError as error:
                outcomes[name] = str(error)
        if not torch.equal(before, case.memory):
            outcomes[name] = "written"
    return outcomes


def main() -> None:
    """Run all cases of the file."""
    spec = importlib.util.spec_from_file_location("transfer", sys.argv[1])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with open(sys.argv[2], encoding="utf-8") as file:
        cases = json.load(file)
    result: dict[str, Any] = {"wrong": [differences(case, module.transfer) for case in cases]}
    if cases:
        result["refused"] = refused(cases[0], module.transfer)
    print_result(result)


if __name__ == "__main__":
    main()

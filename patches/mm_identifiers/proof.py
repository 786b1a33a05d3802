"""The names that two engines' API processes give images, by a release's own `_process_multimodal`."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from typing import Any

import mm_identifiers as driver
import numpy as np
from packaging.version import Version
from PIL import Image
from vllm.multimodal.media import MediaWithBytes

KEPT = "0.30.0"
"""From this vLLM on a user's name is taken, also with both caches off."""


api = driver.Api


class Broken(Image.Image):  # as a file whose fields are made up
    def getexif(self) -> Any:
        raise ValueError("no such field")

    @classmethod
    def new(cls, *made: Any) -> Any:
        image = Image.new(*made)
        image.__class__ = cls
        return image


def apart(first: list[Any], second: list[Any]) -> str | None:
    return f"both are {first[0]}" if first == second else None


def cases() -> dict[str, str | None]:
    """Whether images are named by what is on them where KV leaves the engine, and all else is as the release has it."""
    findings = {
        f"two engines with {connector} tell images apart": apart(
            *(api(connector=connector).names(one) for one in ("cat", "dog"))
        )
        for connector in ("kv_transfer_config", "ec_transfer_config")
    }
    # One file, of which two requests want other frames; one file that is read otherwise; one whose fields are made up.
    frames = (MediaWithBytes(np.full((2, 4, 4, 3), shade, np.uint8), b"a file" * 99) for shade in (0, 200))
    findings["two videos of one file"] = apart(*(api().names(one, kind="video") for one in frames))
    images = [MediaWithBytes(Image.new("RGB", (4, 4), color), b"a file") for color in ("red", "blue")]
    findings["two images of one file"] = apart(*(api().names(one) for one in images))
    broken = [Broken.new("RGB", (4, 4), color) for color in ("red", "blue")]
    findings["images whose fields cannot be read"] = apart(*(api().names(one) for one in broken))
    decode, cached, alone = api(), api(cached=True), api(connector="")
    names = [decode.names(one)[0] for one in ("dog", "cat")]
    same = [one for one in names if one == api().names("cat")[0]]
    findings["prefill and decode have one name for an image, in any order"] = None if same == names[1:] else str(names)
    given = ["a user's"]
    taken = Version(driver.vllm.__version__) >= Version(KEPT)
    findings["a user's name"] = None if (api().names("cat", given=given) == given) is taken else "is not as without"
    first, second = alone.names("cat"), alone.names("dog")
    findings["an engine without a connector counts"] = None if None not in first and first != second else "it does not"
    findings["with a cache an image is hashed"] = None if cached.names("cat") == [None] else "it has a name"
    findings["with a cache a user's name is taken"] = None if cached.names("cat", given=given) == given else "no"
    return findings

"""Which hashes a streaming session keeps when its next input comes, and where the images of a block begin; the proof has real
schedulers and contents.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.patches.session_block_hashes import wrappers as patch

BLOCK = 16


@pytest.mark.parametrize(
    ("computed", "hashes", "left"),
    [
        (31, 2, 1),  # the dropped token was the block's last
        (32, 2, 2),
        (30, 1, 1),
        (31, 0, 0),  # no prefix cache
    ],
)
@pytest.mark.parametrize("sends", [False, True])
def test_what_is_left(mocker: MockerFixture, computed: int, hashes: int, left: int, sends: bool) -> None:
    livepatch = mocker.Mock()
    session = SimpleNamespace(num_computed_tokens=computed, block_hashes=[*range(hashes)])
    update = object()
    scheduler: Any = SimpleNamespace(
        kv_cache_manager=SimpleNamespace(block_pool=SimpleNamespace(hash_block_size=BLOCK)),
        **({"aux_output_connector": object()} if sends else {}),
    )
    wrapper = patch.wrappers(livepatch)[patch.SESSION]
    seen = []
    wrapper(lambda *given: seen.append((given, list(session.block_hashes))), scheduler, session, update)
    expected = hashes if sends else left
    assert seen == [((session, update), [*range(expected)])]
    assert livepatch.count.called == (expected != hashes)


@pytest.mark.parametrize(
    ("start", "number"), [(0, 0), (9, 0), (10, 1), (11, 1), (29, 1), (30, 2), (39, 2), (40, 3), (1000, 3)]
)
def test_the_first_image_that_ends_behind_a_token(start: int, number: int) -> None:
    places = ((4, 6), (20, 10), (32, 8))
    images = [SimpleNamespace(mm_position=SimpleNamespace(offset=place, length=length)) for place, length in places]
    assert patch.first_behind(images, start) == number
    assert patch.first_behind([], start) == 0

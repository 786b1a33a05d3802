"""Which hashes a streaming session keeps when its next input comes; the release tests have real schedulers and contents."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.patches.session_block_hashes import wrappers as patch

BLOCK = 16


@pytest.mark.parametrize(
    ("computed", "hashes", "images", "new_images", "left"),
    [
        (31, 2, [], [], 1),  # the dropped token was the block's last
        (32, 2, [], [], 2),
        (30, 1, [], [], 1),
        (31, 2, ["an image"], [], 0),  # the release looks at the last image alone behind a hash
        (31, 2, [], ["an image"], 0),
        (32, 2, ["an image"], ["another"], 2),
        (31, 0, [], [], 0),  # no prefix cache
    ],
)
@pytest.mark.parametrize("sends", [False, True])
def test_what_is_left(
    mocker: MockerFixture, computed: int, hashes: int, images: list[str], new_images: list[str], left: int, sends: bool
) -> None:
    livepatch = mocker.Mock()
    session = SimpleNamespace(num_computed_tokens=computed, block_hashes=[*range(hashes)], mm_features=images)
    update = SimpleNamespace(mm_features=new_images)
    scheduler: Any = SimpleNamespace(
        kv_cache_manager=SimpleNamespace(block_pool=SimpleNamespace(hash_block_size=BLOCK)),
        **({"aux_output_connector": object()} if sends else {}),
    )
    (wrapper,) = patch.wrappers(livepatch).values()
    seen = []
    wrapper(lambda *given: seen.append((given, list(session.block_hashes))), scheduler, session, update)
    expected = hashes if sends else left
    assert seen == [((session, update), [*range(expected)])]
    assert livepatch.count.called == (expected != hashes)

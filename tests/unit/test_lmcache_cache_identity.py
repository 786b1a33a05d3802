"""Marks, adapters' identities, and what becomes of a request where the patch raises."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.patches.lmcache_cache_identity import adapters, wrappers
from vllm_livepatch.patches.lmcache_cache_identity.adapters import Adapter, Adapters
from vllm_livepatch.patches.lmcache_cache_identity.identities import Identities
from vllm_livepatch.patches.lmcache_cache_identity.in_process import TAG, InProcess
from vllm_livepatch.patches.lmcache_cache_identity.layers import Layers
from vllm_livepatch.patches.lmcache_cache_identity.marks import WORDS, Images, MarkedIds, Marks
from vllm_livepatch.sitecustomize.context import PatchContext

from tests.unit.support import until

CHUNK = 8
WAIT = 20.0
BASE = (("base",),)
OTHER = (("lora", "a", "digest", "False"),)
MARKS = [1637606731, 1285500256, 1875400377, 1953402653, 1378518888]
"""By version 9, of OTHER before the ids 1000 to 1004."""


def asked(ids: list[int], *, lora: Any = None, images: tuple[Any, ...] = ()) -> Any:
    features = [
        SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))
        for name, offset, length in images
    ]
    return SimpleNamespace(
        request_id="r", all_token_ids=ids, mm_features=features, lora_request=lora, sampling_params=None
    )


def marked(ids: list[int], identity: Any = BASE, **others: Any) -> list[int]:
    return list(MarkedIds(Marks(asked(ids, **others), identity, CHUNK)))


def lora_of(path: Path, number: int = 1, name: str = "org/a", **others: Any) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), **others)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "adapter_model.safetensors").write_text("weights", encoding="utf-8")
    return tmp_path


def context(mocker: MockerFixture, **options: str) -> PatchContext:
    return PatchContext(
        "lmcache-cache-identity", {"FINGERPRINT": "", "ON_RESET": "apart", **options}, {}, mocker.Mock()
    )


class TestMarks:
    def test_each_whole_chunk_begins_with_ids_that_no_tokenizer_has_and_that_fit_32_bits(self) -> None:
        ids = marked(list(range(20)))
        assert len(ids) == 20
        changed = [place for place, one in enumerate(ids) if one != place]
        assert changed == [*range(WORDS), *range(CHUNK, CHUNK + WORDS)]
        assert all(2**30 <= ids[place] < 2**31 for place in changed)

    def test_the_ids_that_they_stand_for_are_in_them(self) -> None:
        first, second = (marked([id_, *range(1, 16)]) for id_ in (100, 200))
        assert first[:WORDS] != second[:WORDS]

    def test_another_identity_has_others_in_each_chunk(self) -> None:
        first, second = marked(list(range(16))), marked(list(range(16)), OTHER)
        assert not set(first[:WORDS]) & set(second[:WORDS])
        assert not set(first[CHUNK:][:WORDS]) & set(second[CHUNK:][:WORDS])

    def test_marking_twice_is_marking_once(self) -> None:
        marks = Marks(asked(list(range(24))), BASE, CHUNK)
        once = list(MarkedIds(marks))
        twice = list(once)
        marks.put(twice)
        assert twice == once

    def test_a_long_requests_marks_are_made_once(self, mocker: MockerFixture) -> None:
        """LMCache asks for all of a request's ids in each step in which it waits, or gets a block."""
        ids = MarkedIds(Marks(asked(list(range(64 * CHUNK))), BASE, CHUNK))
        once = list(ids)
        made = mocker.spy(Marks, "_at")
        assert list(ids) == once
        made.assert_not_called()

    def test_marks_are_those_of_the_versions_before(self) -> None:
        """What engines have stored is found after an upgrade."""
        assert marked(list(range(1000, 1016)), OTHER)[:WORDS] == MARKS

    def test_of_a_long_prompt_each_mark_is_made_by_one_call(self, mocker: MockerFixture) -> None:
        """32 prompts of 16,384 tokens, asked for at once, took three times as long as on stock."""
        made = mocker.spy(Marks, "_at")
        list(MarkedIds(Marks(asked(list(range(64 * CHUNK))), BASE, CHUNK)))
        made.assert_not_called()

    @pytest.mark.parametrize("part", [slice(3, 11), slice(None, 5), slice(-3, None), slice(0, 24, 2), slice(9, 9)])
    def test_a_part_is_that_of_the_whole(self, part: slice) -> None:
        ids = MarkedIds(Marks(asked(list(range(24))), BASE, CHUNK))
        assert ids[part] == list(ids)[part]
        assert ids[9] == list(ids)[9]

    def test_an_answers_ids_follow(self) -> None:
        request = asked(list(range(7)))
        ids = MarkedIds(Marks(request, BASE, CHUNK))
        short = list(ids)
        request.all_token_ids.extend(range(7, 12))
        assert (list(ids)[:7], len(ids)) == (short, 12)

    def test_an_image_marks_the_chunks_that_it_lies_in_and_no_other(self) -> None:
        ids = list(range(32))
        image = marked(ids, (), images=(("cat", 15, 2),))
        assert image[:CHUNK] == ids[:CHUNK]
        assert image[CHUNK] != ids[CHUNK]
        assert image[2 * CHUNK] != ids[2 * CHUNK]
        assert image[3 * CHUNK :] == ids[3 * CHUNK :]
        assert marked(ids, (), images=(("dog", 15, 2),))[CHUNK] != image[CHUNK]
        assert marked(ids, (), images=(("cat", 14, 2),))[CHUNK] != image[CHUNK]

    def test_images_that_lie_over_each_other_are_those_that_a_look_at_each_finds(self) -> None:
        """As audio and video that are interleaved; nor need they come in the order of their places."""
        placed = [
            ("video", 3, 40),
            ("audio", 9, 5),
            ("cat", 33, 1),
            ("dog", 20, 4),
            ("cat", 20, 1),
            ("at the end", 60, 9),
        ]
        images = Images(asked([], images=tuple(placed)).mm_features)
        for first in range(0, 72, CHUNK):
            for end in (first + CHUNK, float("inf")):
                expected = [("mm", name, at) for name, at, length in placed if at < end and at + length > first]
                assert images.within(first, end) == expected

    def test_a_chunk_looks_at_no_image_that_lies_elsewhere(self) -> None:
        """A video may have thousands of frames, and as many chunks."""
        looked_at: list[int] = []

        class Placed(SimpleNamespace):
            @property
            def mm_position(self) -> Any:
                looked_at.append(self.number)
                return SimpleNamespace(offset=CHUNK * self.number, length=2)

        request = asked(list(range(100 * CHUNK)))
        request.mm_features = [Placed(identifier="frame", number=number) for number in range(100)]
        list(MarkedIds(Marks(request, (), CHUNK)))
        assert len(looked_at) <= 4 * 100

    def test_a_streaming_session_gets_an_image_in_a_chunk_that_was_whole_before(self) -> None:
        """Its next prompt takes the place of the last id that was sampled."""
        request = asked(list(range(16)))
        ids = MarkedIds(Marks(request, BASE, CHUNK))
        before = ids[CHUNK : CHUNK + WORDS]
        image = SimpleNamespace(identifier="cat", mm_position=SimpleNamespace(offset=15, length=2))
        request.all_token_ids[15:] = [2, 2]
        request.mm_features.append(image)
        assert ids[CHUNK : CHUNK + WORDS] != before


class TestAdapters:
    def test_the_same_files_under_another_path_have_one_digest(self, files: Path, tmp_path_factory: Any) -> None:
        other = tmp_path_factory.mktemp("pod")
        for file in files.iterdir():
            (other / file.name).write_bytes(file.read_bytes())
        digests = {adapters.digest_of(str(path), adapters.listed(str(path))) for path in (files, other)}
        assert len(digests) == 1
        (other / "adapter_config.json").write_text('{"r": 8}', encoding="utf-8")
        assert adapters.digest_of(str(other), adapters.listed(str(other))) not in digests

    def test_it_is_unknown_until_it_is_hashed(self, files: Path) -> None:
        one = Adapter(lora_of(files))
        assert (one.digest, one.lost) == (None, "")
        one.look()
        assert one.digest is not None

    def test_files_that_change_before_they_are_hashed_may_be_what_was_loaded_or_not(self, files: Path) -> None:
        one = Adapter(lora_of(files))
        (files / "adapter_model.safetensors").write_text("others", encoding="utf-8")
        one.look()
        assert one.lost

    def test_files_that_change_later_end_it_and_the_same_files_again_do_not(self, files: Path) -> None:
        one = Adapter(lora_of(files))
        one.look()
        os.utime(files / "adapter_model.safetensors")
        one.look()
        assert not one.lost
        (files / "adapter_model.safetensors").write_text("others!", encoding="utf-8")
        one.look()
        assert one.lost

    def test_files_that_are_gone_are_not_looked_at_any_more(self, files: Path, mocker: MockerFixture) -> None:
        one = Adapter(lora_of(files))
        one.look()
        looked = one.looked
        for file in files.iterdir():
            file.unlink()
        one.look()
        assert (one.lost, one.looked) == ("", looked)

    @pytest.mark.parametrize("others", [{"load_inplace": True}, {"name": "b"}, {"is_3d_lora_weight": True}])
    def test_another_adapter_by_its_id_ends_it(
        self, files: Path, others: dict[str, Any], mocker: MockerFixture
    ) -> None:
        mocker.patch("threading.Thread")
        said: list[str] = []
        known = Adapters(said.append)
        known.met(lora_of(files))
        known.met(lora_of(files, **others))
        assert known.identity(lora_of(files)) is None
        assert "other weights were loaded in its place" in said[0]

    def test_what_was_not_looked_at_for_long_is_unknown(self, files: Path, mocker: MockerFixture) -> None:
        mocker.patch("threading.Thread")  # it hangs, as on a file system that does
        known = Adapters(mocker.Mock())
        one = known.met(lora_of(files))
        one.look()
        assert known.identity(lora_of(files)) == ("lora", "org/a", one.digest, "False")
        one.looked -= adapters.FRESH_SECONDS + 1
        assert known.identity(lora_of(files)) is None

    def test_one_that_was_removed_is_read_anew_and_is_remembered_by_its_name(
        self, files: Path, mocker: MockerFixture
    ) -> None:
        mocker.patch("threading.Thread")
        known = Adapters(lambda sentence: None)
        known.met(lora_of(files)).look()
        known.removed(1)
        (files / "adapter_model.safetensors").write_text("others", encoding="utf-8")
        known.met(lora_of(files)).look()
        assert known.identity(lora_of(files)) is not None
        assert known.shares_a_name(lora_of(files))

    def test_what_was_removed_under_a_request_is_met_again(self, files: Path, mocker: MockerFixture) -> None:
        mocker.patch("threading.Thread")
        known = Adapters(mocker.Mock())
        known.met(lora_of(files)).look()
        known.removed(1)
        assert known.shares_a_name(lora_of(files))  # it is not hashed yet: it may be another

    def test_one_that_the_workers_could_not_read_is_not_remembered(self, files: Path, mocker: MockerFixture) -> None:
        """Its name would be suspect for good: nothing is loaded or stored behind vLLM's own prefix cache then."""
        mocker.patch("threading.Thread")
        add = wrappers.wrappers(context(mocker))[f"{wrappers.CORE}.add_lora"]
        known = Adapters(mocker.Mock())
        core = mocker.Mock(**{"scheduler.connector._livepatch_adapters": known})
        read = mocker.Mock(side_effect=ValueError("rank 64 is greater than max_lora_rank 16"))
        with pytest.raises(ValueError, match="rank 64"):
            add(read, core, lora_of(files))
        other = lora_of(files, 2)
        (files / "adapter_config.json").write_text('{"r": 16}', encoding="utf-8")
        assert add(mocker.Mock(return_value=True), core, other)
        known.met(other).look()
        assert not known.shares_a_name(other)
        # One that is known may be other weights on some workers.
        with pytest.raises(ValueError, match="rank 64"):
            add(read, core, lora_of(files, 2, load_inplace=True))
        assert known.identity(other) is None

    def test_two_engines_of_a_process_have_adapters_of_their_own(self, files: Path, mocker: MockerFixture) -> None:
        mocker.patch("threading.Thread")
        wrap = wrappers.wrappers(context(mocker))
        config, scheduler = mocker.Mock(), SimpleNamespace(name="SCHEDULER")
        cores = []
        for name in ("org/a", "org/b"):
            made = wrap[wrappers.CREATE](mocker.Mock(return_value=connector()), None, config, scheduler)
            cores.append(SimpleNamespace(scheduler=SimpleNamespace(connector=made)))
            wrap[f"{wrappers.CORE}.add_lora"](mocker.Mock(), cores[-1], lora_of(files, 1, name))
        known = [core.scheduler.connector._livepatch_adapters for core in cores]
        assert [[one.name, one.lost] for each in known for one in each._known.values()] == [
            ["org/a", ""],
            ["org/b", ""],
        ]
        wrap[f"{wrappers.CORE}.remove_lora"].look(True, cores[0], 1)
        assert [len(each._known) for each in known] == [0, 1]

    def test_an_engine_without_lmcache_hashes_nothing(self, files: Path, mocker: MockerFixture) -> None:
        wrap = wrappers.wrappers(context(mocker))
        other = mocker.Mock(spec=["get_num_new_matched_tokens"])
        made = wrap[wrappers.CREATE](
            mocker.Mock(return_value=other), None, mocker.Mock(), SimpleNamespace(name="SCHEDULER")
        )
        for found in (made, None):
            core = SimpleNamespace(scheduler=SimpleNamespace(connector=found))
            assert wrap[f"{wrappers.CORE}.add_lora"](mocker.Mock(return_value=True), core, lora_of(files))
            wrap[f"{wrappers.CORE}.remove_lora"].look(True, core, 1)

    def test_threads_end_with_the_engine(self, files: Path, mocker: MockerFixture) -> None:
        mocker.patch.object(adapters, "LOOK_SECONDS", 0.001)
        known = Adapters(mocker.Mock())
        one = known.met(lora_of(files))
        until(lambda: one.digest is not None)
        threads = known._threads
        assert all(thread.is_alive() for thread in threads)
        del known
        for thread in threads:
            thread.join(WAIT)
            assert not thread.is_alive()

    def test_requests_that_run_while_their_adapter_is_removed_have_it_read_again(
        self, files: Path, mocker: MockerFixture
    ) -> None:
        mocker.patch("threading.Thread")
        known = Adapters(mocker.Mock())
        replaced: list[int] = []
        known.on_replaced.append(replaced.append)
        known.met(lora_of(files))
        known.removed(1)
        known.removed(1)
        assert replaced == [1]

    @pytest.mark.parametrize("name", ["README.md", "optimizer.pt", os.fsdecode(b"caf\xe9.txt")])
    def test_what_vllm_does_not_read_is_in_no_digest_and_may_change(self, name: str, files: Path) -> None:
        one, other = Adapter(lora_of(files)), Adapter(lora_of(files))
        one.look()
        (files / name).write_text("written since", encoding="utf-8")
        one.look()
        assert not one.lost
        other.look()
        assert other.digest == one.digest is not None

    def test_an_error_ends_one_adapter_and_not_the_thread(self, files: Path, mocker: MockerFixture) -> None:
        said = Event()
        known = Adapters(lambda sentence: said.set())
        mocker.patch.object(adapters, "digest_of", side_effect=[KeyError("ours"), "digest"])
        one = known.met(lora_of(files))
        assert said.wait(WAIT)
        assert "KeyError" in one.lost
        other = known.met(lora_of(files, 2, "b"))
        until(lambda: other.digest == "digest")

    def test_one_that_is_long_to_hash_does_not_make_the_others_unknown(
        self, files: Path, mocker: MockerFixture
    ) -> None:
        mocker.patch.object(adapters, "LOOK_SECONDS", 0.001)
        known = Adapters(mocker.Mock())
        one = known.met(lora_of(files))
        until(lambda: one.digest is not None)
        hashing, goes_on = Event(), Event()

        def hashed(path: str, files: Any) -> str:
            hashing.set()
            goes_on.wait(WAIT)
            return "digest"

        mocker.patch.object(adapters, "digest_of", hashed)
        known.met(lora_of(files, 2, "big"))
        assert hashing.wait(WAIT)
        looked = one.looked
        until(lambda: one.looked > looked)
        goes_on.set()

    @pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.bin"])
    def test_what_may_never_end_is_not_read(self, name: str, files: Path) -> None:
        """The thread would wait for its writer, and all later adapters for the thread."""
        (files / name).unlink(missing_ok=True)
        os.mkfifo(files / name)
        assert Adapter(lora_of(files)).lost

    def test_a_path_that_no_file_can_have_is_an_adapters_and_not_the_patchs_end(self) -> None:
        assert Adapter(SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="a\0b")).lost

    def test_a_request_looks_at_no_adapter_of_another_name(self, files: Path, mocker: MockerFixture) -> None:
        """There may be thousands, and each request that waits asks in each step."""
        mocker.patch("threading.Thread")
        known = Adapters(mocker.Mock())
        names = ("a", "b", "a")
        for number, name in enumerate(names):
            known.met(lora_of(files, number, name)).look()
        looked_at: list[int] = []

        def noted(one: Adapter) -> str:
            looked_at.append(one.request[0])
            return names[one.request[0]]

        class Looked(Adapter):
            __slots__ = ()
            name = property(noted, lambda self, name: None)

        for one in known._known.values():
            one.__class__ = Looked
        assert not known.shares_a_name(lora_of(files, 0, "a"))
        assert 0 in looked_at
        assert 1 not in looked_at

    def test_of_thousands_by_its_name_a_request_looks_at_the_first_that_differs(
        self, files: Path, mocker: MockerFixture
    ) -> None:
        """A training loop loads each step's weights by one name, under an id of their own, and removes none."""
        mocker.patch("threading.Thread")
        known = Adapters(mocker.Mock())
        looked_at: list[int] = []

        def noted(one: Adapter) -> str:
            looked_at.append(one.request[0])
            return str(one.request[0])

        class Looked(Adapter):
            __slots__ = ()
            digest = property(noted)

        for number in range(1000):
            known.met(lora_of(files, number)).__class__ = Looked
        assert known.shares_a_name(lora_of(files, 999))
        assert set(looked_at) == {0, 999}

    def test_a_repository_is_not_a_folder(self, mocker: MockerFixture) -> None:
        mocker.patch("threading.Thread")
        said = mocker.Mock()
        Adapters(said).met(SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="org/not-here"))
        assert "give a local folder" in said.call_args.args[0]


class Tracker:
    loads = False

    def __init__(self, request: Any) -> None:
        self.all_token_ids = request.all_token_ids

    def is_ready_for_retrieving(self) -> bool:
        return self.loads


def connector() -> Any:
    """A connector and its scheduler's adapter, as far as they are wrapped."""
    adapter = SimpleNamespace(
        num_blocks_per_chunk=lambda: 1,
        lmcache_tokens_per_chunk=CHUNK,
        maybe_submit_lookup_request=lambda name, token_ids: "submitted",
        check_lookup_result=lambda name: 8,
        _create_key=lambda token_ids, request_id: list(token_ids),
    )
    trackers: dict[str, Any] = {}
    return SimpleNamespace(
        request_trackers=trackers,
        scheduler_adapter=adapter,
        _get_or_create_request_tracker=lambda request: trackers.setdefault(request.request_id, Tracker(request)),
        get_num_new_matched_tokens=lambda request, computed: (8, True),
        build_connector_meta=lambda scheduled: "metadata",
        reset_cache=lambda: None,
    )


def met(files: Path, mocker: MockerFixture) -> tuple[Adapters, Any, Any]:
    """Adapters of which one was hashed, a connector that asks them, and a request for that one."""
    mocker.patch("threading.Thread")
    known = Adapters(mocker.Mock())
    known.met(lora_of(files)).look()
    made = connector()
    wrappers.Multiprocess(made, Identities(known, True, ""), context(mocker))
    return known, made, asked(list(range(16)), lora=lora_of(files))


class TestReplaced:
    def test_a_request_that_waits_does_not_load_what_the_old_weights_have_left(
        self, files: Path, mocker: MockerFixture
    ) -> None:
        known, made, request = met(files, mocker)
        made.get_num_new_matched_tokens(request, 0)
        tracker = made._get_or_create_request_tracker(request)
        assert len(tracker.all_token_ids) == 16
        known.met(lora_of(files, load_inplace=True))
        made.get_num_new_matched_tokens(request, 0)
        assert tracker.all_token_ids == ()

    def test_the_locks_of_what_it_was_looked_up_by_are_given_back(self, files: Path, mocker: MockerFixture) -> None:
        known, made, request = met(files, mocker)
        tracker = made._get_or_create_request_tracker(request)
        looked_up_by = made.scheduler_adapter._create_key(list(tracker.all_token_ids), request_id="r")
        known.met(lora_of(files, load_inplace=True))
        made.get_num_new_matched_tokens(request, 0)
        assert made.scheduler_adapter._create_key(list(tracker.all_token_ids), request_id="r") == looked_up_by

    def test_a_request_that_runs_stores_no_more_when_its_load_was_sent_out(
        self, files: Path, mocker: MockerFixture
    ) -> None:
        known, made, request = met(files, mocker)
        tracker = made._get_or_create_request_tracker(request)
        tracker.loads = True
        known.met(lora_of(files, load_inplace=True))
        assert made.build_connector_meta(None) == "metadata"
        assert len(tracker.all_token_ids) == 16
        tracker.loads = False
        made.build_connector_meta(None)
        assert tracker.all_token_ids == ()

    def test_a_request_that_was_preempted_gets_no_other_identity_than_it_had(
        self, files: Path, mocker: MockerFixture
    ) -> None:
        """The server keeps a request's hashes by its id."""
        known, made, request = met(files, mocker)
        assert len(made._get_or_create_request_tracker(request).all_token_ids) == 16
        known.removed(1)
        (files / "adapter_model.safetensors").write_text("others", encoding="utf-8")
        known.met(lora_of(files)).look()
        made.request_trackers.clear()
        assert made._get_or_create_request_tracker(request).all_token_ids == ()

    def test_in_the_engines_process_it_stores_no_more(self, files: Path, mocker: MockerFixture) -> None:
        mocker.patch("threading.Thread")
        known = Adapters(mocker.Mock())
        known.met(lora_of(files)).look()
        impl, _ = in_process(mocker, known=known)
        request = asked(list(range(16)), lora=lora_of(files))
        request.sampling_params = SimpleNamespace(extra_args=None)
        assert impl.get_num_new_matched_tokens(request, 0) == 8
        impl._unfinished_requests["r"] = request
        known.met(lora_of(files, load_inplace=True))
        save = SimpleNamespace(can_save=True, skip_leading_tokens=0)
        one = SimpleNamespace(req_id="r", save_spec=save, token_ids=[1] * 16, disagg_spec=None)
        impl.build_connector_meta(SimpleNamespace(requests=[one]))
        assert not save.can_save


class TestLazyOffload:
    def test_ids_that_are_appended_to_a_requests_first_have_all_marks_of_their_chunk(
        self, files: Path, mocker: MockerFixture
    ) -> None:
        """Of a chunk's first three ids nothing is marked yet; of its next, the last two were, and the first three not."""
        mocker.patch("threading.Thread")
        known = Adapters(mocker.Mock())
        known.met(lora_of(files)).look()
        made = connector()
        ledger: list[int] = []

        def rebind(metadata: Any) -> Any:
            ledger.extend(metadata.op.token_ids[len(ledger) :])
            return SimpleNamespace(op=SimpleNamespace(token_ids=ledger))

        made._lazy_offload_manager = SimpleNamespace(_rebind_tokens=rebind)
        wrappers.Multiprocess(made, Identities(known, True, ""), context(mocker))
        request = asked(list(range(CHUNK + 3)), lora=lora_of(files))
        tracker = made._get_or_create_request_tracker(request)
        for _ in range(2):
            operation = SimpleNamespace(request_id="r", op=SimpleNamespace(token_ids=list(tracker.all_token_ids)))
            made._lazy_offload_manager._rebind_tokens(operation)
            assert ledger == list(tracker.all_token_ids)
            request.all_token_ids.extend(range(CHUNK + 3, 2 * CHUNK))


class TestErrors:
    def test_a_request_that_raises_and_those_after_it_neither_load_nor_store(self, mocker: MockerFixture) -> None:
        livepatch = context(mocker)
        identities = Identities(Adapters(mocker.Mock()), True, "")
        made = connector()
        wrappers.Multiprocess(made, identities, livepatch)
        mocker.patch.object(identities, "of", side_effect=KeyError("ours"))
        request = asked(list(range(16)))
        assert made._get_or_create_request_tracker(request).all_token_ids == ()
        assert livepatch.aside
        assert made.scheduler_adapter.maybe_submit_lookup_request("r", [1]) is None
        assert made.scheduler_adapter.check_lookup_result("r") == 0
        mocker.stopall()
        made.request_trackers.clear()
        assert made._get_or_create_request_tracker(request).all_token_ids == ()

    def test_a_key_of_the_requests_own_ids_is_marked_too(self, mocker: MockerFixture) -> None:
        made = connector()
        wrappers.Multiprocess(made, Identities(Adapters(mocker.Mock()), True, ""), context(mocker))
        request = asked(list(range(16)))
        tracker = made._get_or_create_request_tracker(request)
        key = made.scheduler_adapter._create_key
        assert (
            key(list(range(16)), request_id="r")
            == list(tracker.all_token_ids)
            == key(token_ids=tracker.all_token_ids, request_id="r")
        )

    def test_without_adapters_images_and_fingerprint_nothing_changes(self, mocker: MockerFixture) -> None:
        made = connector()
        wrappers.Multiprocess(made, Identities(Adapters(mocker.Mock()), False, ""), context(mocker))
        request = asked(list(range(16)))
        assert made._get_or_create_request_tracker(request).all_token_ids is request.all_token_ids

    def test_a_fingerprint_is_in_every_key(self, mocker: MockerFixture) -> None:
        keys = set()
        for fingerprint in ("", "v1", "v2"):
            made = connector()
            wrappers.Multiprocess(made, Identities(Adapters(mocker.Mock()), False, fingerprint), context(mocker))
            keys.add(tuple(made._get_or_create_request_tracker(asked(list(range(16)))).all_token_ids))
        assert len(keys) == 3


def made_by(mocker: MockerFixture, connector: Any, **options: str) -> PatchContext:
    """What serves a connector that is made for a scheduler of an engine without LoRA."""
    livepatch = context(mocker, **options)
    create = wrappers.wrappers(livepatch)[wrappers.CREATE]
    config = SimpleNamespace(lora_config=None)
    create(mocker.Mock(return_value=connector), None, config, SimpleNamespace(name="SCHEDULER"))
    return livepatch


class TestReset:
    def test_later_requests_have_keys_that_nobody_has(self, mocker: MockerFixture) -> None:
        keys = set()
        for _ in range(2):
            made = connector()
            livepatch = made_by(mocker, made)
            say = mocker.patch.object(livepatch, "say")
            for number in range(3):
                request = asked(list(range(16)))
                keys.add(tuple(made._get_or_create_request_tracker(request).all_token_ids))
                made.request_trackers.clear()
                if number < 2:
                    assert made.reset_cache() is None
            assert livepatch.counters == {"resets": 2, "marked": 2}
            assert say.call_count == 1
        assert len(keys) == 1 + 2 * 2  # those of before the first reset are stock's, and the same of both engines

    def test_what_runs_or_waits_loads_and_stores_nothing(self, mocker: MockerFixture) -> None:
        made = connector()
        made_by(mocker, made)
        request, ids = asked(list(range(16))), list(range(16))
        tracker = made._get_or_create_request_tracker(request)
        assert list(tracker.all_token_ids) == ids
        made.reset_cache()
        adapter = made.scheduler_adapter
        assert tracker.all_token_ids == ()
        assert adapter.maybe_submit_lookup_request("r", ids) is None
        assert adapter.check_lookup_result("r") == 0
        assert adapter._create_key([], request_id="r") == ids  # the locks that its lookup has taken
        made.request_trackers.clear()  # preempted
        assert made._get_or_create_request_tracker(request).all_token_ids == ()

    def test_a_load_that_was_promised_is_told_of_by_the_ids_that_it_was_looked_up_by(
        self, mocker: MockerFixture
    ) -> None:
        made = connector()
        made_by(mocker, made)
        tracker = made._get_or_create_request_tracker(asked(list(range(16))))
        tracker.loads = True
        made.reset_cache()
        made.build_connector_meta(None)
        assert len(tracker.all_token_ids) == 16
        tracker.loads = False
        made.build_connector_meta(None)
        assert tracker.all_token_ids == ()

    def test_an_operator_may_have_it_ignored(self, mocker: MockerFixture) -> None:
        made = connector()
        reset = made.reset_cache
        livepatch = made_by(mocker, made, ON_RESET="ignored")
        assert made.reset_cache is reset
        assert livepatch.counters == {}


class Impl(SimpleNamespace):
    """Beside it lies LoadSpec, as in LMCache's module."""


class LoadSpec(NamedTuple):
    vllm_cached_tokens: int
    lmcache_cached_tokens: int
    can_load: bool


def in_process(
    mocker: MockerFixture,
    lora: bool = True,
    known: Adapters | None = None,
    identities: Identities | None = None,
    **config: Any,
) -> tuple[Any, PatchContext]:
    impl = Impl(
        load_specs={},
        _unfinished_requests={},
        config=SimpleNamespace(**config),
        get_num_new_matched_tokens=lambda request, computed: 8,
        build_connector_meta=lambda metadata: metadata,
    )
    livepatch = context(mocker)
    InProcess(impl, identities or Identities(known or Adapters(mocker.Mock()), lora, ""), livepatch)
    return impl, livepatch


class TestInProcess:
    def request(self, **given: Any) -> Any:
        request = asked(list(range(16)))
        request.sampling_params = SimpleNamespace(extra_args={"kv_transfer_params": given} if given else None)
        return request

    def test_a_tag_is_put_beside_the_users_in_parameters_of_its_own(self, mocker: MockerFixture) -> None:
        impl, _ = in_process(mocker)
        request = self.request(**{"lmcache.tag.user": "u1", TAG: "forged"})
        params = request.sampling_params
        assert impl.get_num_new_matched_tokens(request, 0) == 8
        tags = request.sampling_params.extra_args["kv_transfer_params"]
        assert (tags["lmcache.tag.user"], tags[TAG] != "forged") == ("u1", True)
        assert params.extra_args["kv_transfer_params"][TAG] == "forged"

    def test_a_request_that_waits_while_its_adapter_is_replaced_neither_loads_nor_stores(
        self, files: Path, mocker: MockerFixture
    ) -> None:
        mocker.patch("threading.Thread")
        known = Adapters(mocker.Mock())
        known.met(lora_of(files)).look()
        impl, _ = in_process(mocker, known=known)
        request = asked(list(range(16)), lora=lora_of(files))
        request.sampling_params = SimpleNamespace(extra_args=None)
        assert impl.get_num_new_matched_tokens(request, 0) == 8
        known.met(lora_of(files, load_inplace=True))
        assert impl.get_num_new_matched_tokens(request, 0) == 0

    def test_what_runs_or_waits_at_a_reset_neither_loads_nor_stores(self, mocker: MockerFixture) -> None:
        identities = Identities(Adapters(mocker.Mock()), False, "")
        impl, livepatch = in_process(mocker, identities=identities)
        requests = [self.request() for _ in range(2)]
        impl.get_num_new_matched_tokens(requests[0], 0)
        impl._unfinished_requests["r"] = requests[0]
        identities.renew()
        save = SimpleNamespace(can_save=True, skip_leading_tokens=0)
        one = SimpleNamespace(req_id="r", save_spec=save, token_ids=[1] * 16, disagg_spec=None)
        impl.build_connector_meta(SimpleNamespace(requests=[one]))
        assert not save.can_save
        assert [impl.get_num_new_matched_tokens(request, 0) for request in requests] == [0, 8]
        assert [bool(request.sampling_params.extra_args) for request in requests] == [False, True]
        assert livepatch.counters == {"unidentified": 1, "marked": 1}

    @pytest.mark.parametrize(("lora", "stored"), [(True, False), (False, True)])
    def test_a_session_that_got_other_parameters_stores_nothing_without_its_tag(
        self, lora: bool, stored: bool, mocker: MockerFixture
    ) -> None:
        impl, _ = in_process(mocker, lora=lora)
        request = self.request()
        impl.get_num_new_matched_tokens(request, 0)
        impl._unfinished_requests["r"] = request
        request.sampling_params = SimpleNamespace(extra_args=None)  # as vLLM gives a streaming session, with its update
        save = SimpleNamespace(can_save=True, skip_leading_tokens=0)
        one = SimpleNamespace(req_id="r", save_spec=save, token_ids=[1] * 16, disagg_spec=None)
        impl.build_connector_meta(SimpleNamespace(requests=[one]))
        assert save.can_save == stored
        impl.get_num_new_matched_tokens(request, 0)  # preempted: it is looked up by its own key again
        assert (TAG in (request.sampling_params.extra_args or {}).get("kv_transfer_params", {})) == lora

    def test_lmcache_gets_a_load_spec_of_nothing_for_what_is_not_looked_up(self, mocker: MockerFixture) -> None:
        """It asserts that there is one where a request goes on that was preempted."""
        impl, _ = in_process(mocker, enable_blending=True)
        assert impl.get_num_new_matched_tokens(self.request(), 48) == 0
        assert impl.load_specs == {"r": LoadSpec(48, 0, False)}

    def test_a_clients_forged_tag_goes_where_none_is_needed(self, mocker: MockerFixture) -> None:
        impl, _ = in_process(mocker, lora=False)
        request = self.request(**{"lmcache.tag.user": "u1", TAG: "forged"})
        impl.get_num_new_matched_tokens(request, 0)
        assert request.sampling_params.extra_args["kv_transfer_params"] == {"lmcache.tag.user": "u1"}

    @pytest.mark.parametrize("lora", [True, False])
    @pytest.mark.parametrize("given", [5, "text", ["one"]])
    def test_what_a_client_sends_in_the_place_of_an_object_is_no_error(
        self, given: object, lora: bool, mocker: MockerFixture
    ) -> None:
        """Anything comes by way of `vllm_xargs`."""
        impl, livepatch = in_process(mocker, lora=lora)
        request = self.request()
        request.sampling_params.extra_args = {"kv_transfer_params": given}
        assert impl.get_num_new_matched_tokens(request, 0) == 8
        tagged = request.sampling_params.extra_args["kv_transfer_params"]
        assert {*tagged} == {TAG} if lora else tagged == given
        assert not livepatch.aside

    @pytest.mark.parametrize("why", ["blends", "pools", "raises"])
    def test_what_cannot_be_tagged_neither_loads_nor_stores(self, why: str, mocker: MockerFixture) -> None:
        impl, livepatch = in_process(mocker, enable_blending=why == "blends")
        request = self.request()
        if why == "pools":
            request.sampling_params = None
        raising: Callable[..., Any] = mocker.Mock(side_effect=KeyError("ours"))
        if why == "raises":
            mocker.patch.object(Identities, "of", raising)
        assert impl.get_num_new_matched_tokens(request, 0) == 0
        impl._unfinished_requests["r"] = request
        save = SimpleNamespace(can_save=True, skip_leading_tokens=0)
        one = SimpleNamespace(req_id="r", save_spec=save, token_ids=[1] * 16, disagg_spec="to decode")
        impl.build_connector_meta(SimpleNamespace(requests=[one]))
        assert (save.can_save, save.skip_leading_tokens, one.disagg_spec) == (False, 16, None)
        assert livepatch.aside == (why == "raises")


class TestLayers:
    """A worker that stores and loads each layer by itself: LMCache leaves its requests' tags out."""

    def worker(self, *requests: Any) -> tuple[Any, list[tuple[str, Any]]]:
        """The worker's connector in a step with these requests, and what its engine is asked for, with which tags."""
        asked_for: list[tuple[str, Any]] = []

        def of(kind: str) -> Callable[..., Any]:
            def ask(tokens: Any, mask: Any, **named: Any) -> Any:
                asked_for.append((kind, named.get("request_configs")))
                return iter("ab")

            return ask

        engine = SimpleNamespace(retrieve_layer=of("load"), store_layer=of("store"))
        metadata = SimpleNamespace(requests=requests)
        impl = SimpleNamespace(lmcache_engine=engine, _parent=SimpleNamespace(_get_connector_metadata=lambda: metadata))

        def start_load_kv() -> None:
            for one in requests:
                if one.load_spec is not None and one.load_spec.can_load:
                    engine.retrieve_layer(one.token_ids[:8], None, sync=True)

        impl.start_load_kv = start_load_kv
        return impl, asked_for

    def request(self, tag: str | None, *, loads: bool = True, stores: bool = True) -> Any:
        ids = list(range(12))
        spec = SimpleNamespace(can_save=stores, skip_leading_tokens=0 if stores else len(ids))
        configs = None if tag is None else {TAG: tag, "lmcache.tag.user": "u"}
        load_spec = SimpleNamespace(can_load=loads)
        return SimpleNamespace(token_ids=ids, load_spec=load_spec, save_spec=spec, request_configs=configs)

    def test_each_of_several_with_the_same_ids_gets_its_own(self, mocker: MockerFixture) -> None:
        several = [self.request("a"), self.request("not loaded", loads=False), self.request("b"), self.request(None)]
        impl, asked_for = self.worker(*several)
        Layers(impl, context(mocker))
        for _ in range(2):
            asked_for.clear()
            impl.start_load_kv()
            for one in several:
                impl.lmcache_engine.store_layer(one.token_ids, None, offset=0)
            loaded = [several[0], several[2], several[3]]
            assert asked_for == [
                *(("load", one.request_configs) for one in loaded),
                *(("store", one.request_configs) for one in several),
            ]

    def test_a_producer_stores_nothing_of_what_was_taken_out(self, mocker: MockerFixture) -> None:
        out = self.request("a", stores=False)
        impl, asked_for = self.worker(out)
        Layers(impl, context(mocker))
        storer = impl.lmcache_engine.store_layer(out.token_ids, None, offset=0)
        assert [next(storer) for _ in range(100)] == [None] * 100
        assert asked_for == []

    def test_without_a_tag_of_ours_lmcache_is_called_as_on_stock(self, mocker: MockerFixture) -> None:
        one = self.request(None)
        one.request_configs = {"lmcache.tag.user": "u"}
        impl, asked_for = self.worker(one)
        Layers(impl, context(mocker))
        impl.start_load_kv()
        assert asked_for == [("load", None)]

"""The environment's words: every variable of the contract, the names from the field, and what is no value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from vllm_livepatch.sitecustomize import settings
from vllm_livepatch.sitecustomize.decision import Environment, Installed, Patch, decide, variable
from vllm_livepatch.sitecustomize.facts import to_patch
from vllm_livepatch.tools.bundles import catalogue

BASE: dict[str, Any] = {
    "title": "for the tests",
    "package": "engine",
    "targets": ["engine.a:f"],
    "variant": [{"releases": ["1"], "code": {"engine.a:f": "0"}}],
}


def a_patch(name: str, *options: dict[str, Any], aliases: tuple[str, ...] = ()) -> Patch:
    return to_patch(name, {**BASE, "option": list(options), "aliases": list(aliases)})


# Declared as the contract has them.
STALE = a_patch("stale-finished-recving")
REAPER = a_patch("kv-block-reaper", {"name": "idle_seconds", "default": 600.0, "minimum": 1.0})
CHUNKED = a_patch(
    "chunked-lmcache-load",
    {
        "name": "max_tokens",
        "default": 8192,
        "minimum": 1,
        "aliases": ["CHUNKED_LMCACHE_MAX_TOKENS_PER_LOAD"],
        "off": 0,
    },
)
ALLOCATOR = a_patch(
    "rocm-pinned-allocator",
    {"name": "step_gb", "default": 2.0, "minimum": 0.25, "aliases": ["LMCACHE_ROCM_DEMAND_PINNED_STEP_GB"]},
    aliases=("LMCACHE_ROCM_DEMAND_PINNED_ALLOCATOR",),
)
BLOCKS = a_patch(
    "mp-block-transfer",
    {
        "name": "dtype",
        "default": "auto",
        "choices": ["auto", "float16", "bfloat16"],
        "aliases": ["LMCACHE_ROCM_MP_BLOCK_FALLBACK_DTYPE"],
    },
    aliases=("LMCACHE_ROCM_MP_BLOCK_FALLBACK",),
)
MORIIO = a_patch(
    "moriio-timeouts",
    {"name": "handshake_seconds", "default": 30.0, "minimum": 0.1, "aliases": ["VLLM_MORIIO_HANDSHAKE_TIMEOUT"]},
    {"name": "transfer_seconds", "default": 30.0, "minimum": 0.1, "aliases": ["VLLM_MORIIO_TRANSFER_TIMEOUT"]},
    {"name": "defer_seconds", "default": 60.0, "minimum": 0.1, "aliases": ["VLLM_MORIIO_DEFER_TIMEOUT"]},
)
FREE = a_patch(
    "free-words",
    {"name": "mode", "default": "none"},
    {"name": "verbose", "default": False},
    {"name": "n", "default": -1},
)
BOUNDED = a_patch(
    "bounded",
    {"name": "share", "default": 0.05, "minimum": 0, "maximum": 1, "off": 7},
    {"name": "most", "default": 3, "maximum": 5},
)
ALL = [STALE, REAPER, CHUNKED, ALLOCATOR, BLOCKS, MORIIO, FREE, BOUNDED]


def read(environ: Mapping[str, str]) -> Environment:
    return settings.read(ALL, environ)


def test_defaults() -> None:
    environment = read({"PATH": "/bin", "VLLM_SOMETHING": "1", "LIVEPATCHES": "other"})
    assert environment.mode == "auto"
    assert environment.toggles == {patch.name: "auto" for patch in ALL}
    assert environment.options["chunked-lmcache-load"] == {"max_tokens": 8192}
    assert environment.options["moriio-timeouts"]["defer_seconds"] == 60.0
    assert environment.options["stale-finished-recving"] == {}
    assert (environment.errors, environment.notes, environment.keep) == ((), (), False)


ON = ["1", "true", "Yes", "on", "ENABLED", " on "]
OFF = ["0", "false", "No", "OFF", "Disabled", "off\n"]


@pytest.mark.parametrize(
    ("value", "mode"),
    [("auto", "auto"), ("AUTO ", "auto"), ("off", "off"), ("Strict", "strict")]
    + [(word, "auto") for word in ON]
    + [(word, "off") for word in OFF],
)
def test_the_mode(value: str, mode: str) -> None:
    environment = read({"LIVEPATCH": value})
    assert (environment.mode, environment.errors) == (mode, ())


@pytest.mark.parametrize("value", ["2", "force", "stritc", "none", "of"])
def test_what_is_no_mode_is_named_with_the_values_and_counts_as_off(value: str) -> None:
    """What turns everything off must not fail open."""
    environment = read({"LIVEPATCH": value})
    assert environment.mode == "off"
    assert environment.errors == (f"LIVEPATCH={value!r} is none of auto, off, strict; it counts as off",)


@pytest.mark.parametrize("value", ["auto", "on", "force", "off"])
@pytest.mark.parametrize("patch", ALL, ids=lambda patch: patch.name)
def test_every_patch_has_its_toggle(patch: Patch, value: str) -> None:
    environment = read({"LIVEPATCH_" + patch.name.upper().replace("-", "_"): value})
    assert environment.toggles == {**{other.name: "auto" for other in ALL}, patch.name: value}
    assert environment.errors == ()


@pytest.mark.parametrize(
    ("value", "toggle"), [("Force", "force"), ("AUTO", "auto")] + [(x, "on") for x in ON] + [(x, "off") for x in OFF]
)
def test_a_toggle_in_any_case(value: str, toggle: str) -> None:
    environment = read({"LIVEPATCH_KV_BLOCK_REAPER": value})
    assert (environment.toggles["kv-block-reaper"], environment.errors) == (toggle, ())


@pytest.mark.parametrize("value", ["strict", "2", "perhaps"])
def test_what_is_no_toggle_is_named_with_the_values_and_counts_as_auto(value: str) -> None:
    environment = read({"LIVEPATCH_KV_BLOCK_REAPER": value})
    assert environment.toggles["kv-block-reaper"] == "auto"
    (error,) = environment.errors
    assert error.startswith(f"LIVEPATCH_KV_BLOCK_REAPER={value!r}")
    assert all(word in error for word in ("auto", "on", "force", "off"))


SWITCHES = [(word, "on") for word in ("1", "true", "True", "YES", "on", " 1 ")]
SWITCHES += [(word, "off") for word in ("0", "false", "no", "OFF", "0\n")]


@pytest.mark.parametrize(("word", "toggle"), SWITCHES)
@pytest.mark.parametrize(
    ("name", "patch"),
    [("LMCACHE_ROCM_DEMAND_PINNED_ALLOCATOR", ALLOCATOR), ("LMCACHE_ROCM_MP_BLOCK_FALLBACK", BLOCKS)],
)
def test_switches_from_the_field(name: str, patch: Patch, word: str, toggle: str) -> None:
    environment = read({name: word})
    assert environment.toggles[patch.name] == toggle
    assert environment.errors == ()


def test_a_switch_from_the_field_that_is_neither() -> None:
    environment = read({"LMCACHE_ROCM_MP_BLOCK_FALLBACK": "maybe"})
    assert environment.toggles["mp-block-transfer"] == "auto"
    (error,) = environment.errors
    assert error.startswith("LMCACHE_ROCM_MP_BLOCK_FALLBACK='maybe'")
    assert "1" in error
    assert "0" in error


def test_our_own_toggle_is_stronger_than_the_switch_from_the_field() -> None:
    environment = read({"LMCACHE_ROCM_MP_BLOCK_FALLBACK": "0", "LIVEPATCH_MP_BLOCK_TRANSFER": "on"})
    assert environment.toggles["mp-block-transfer"] == "on"


@pytest.mark.parametrize("name", ["CHUNKED_LMCACHE_MAX_TOKENS_PER_LOAD", "LIVEPATCH_CHUNKED_LMCACHE_LOAD_MAX_TOKENS"])
def test_the_load_cap_and_its_zero(name: str) -> None:
    on, off = read({name: "4096"}), read({name: "0"})
    assert (on.toggles["chunked-lmcache-load"], on.options["chunked-lmcache-load"]) == ("auto", {"max_tokens": 4096})
    assert off.toggles["chunked-lmcache-load"] == "off"
    assert (on.errors, off.errors) == ((), ())
    both = read({name: "0", "LIVEPATCH_CHUNKED_LMCACHE_LOAD": "on"})
    assert both.toggles["chunked-lmcache-load"] == "on"


@pytest.mark.parametrize(("environ", "toggle"), [({}, "auto"), ({"LIVEPATCH_SPARE_N": "0"}, "off")])
def test_a_value_that_turns_a_patch_off_does_so_only_where_it_is_given(environ: dict[str, str], toggle: str) -> None:
    spare = a_patch("spare", {"name": "n", "default": 0, "off": 0})
    environment = settings.read([spare], environ)
    assert (environment.toggles, environment.options) == ({"spare": toggle}, {"spare": {"n": 0}})


@pytest.mark.parametrize("value", ["-1", "4k", "1.5", "nan", "0x10", "8192 tokens"])
def test_what_is_no_load_cap(value: str) -> None:
    environment = read({"CHUNKED_LMCACHE_MAX_TOKENS_PER_LOAD": value})
    assert environment.options["chunked-lmcache-load"] == {"max_tokens": 8192}
    assert environment.toggles["chunked-lmcache-load"] == "auto"
    (error,) = environment.errors
    assert error.startswith(f"CHUNKED_LMCACHE_MAX_TOKENS_PER_LOAD={value!r}")
    assert "a whole number of at least 1" in error


@pytest.mark.parametrize(
    ("name", "patch", "option"),
    [
        ("LIVEPATCH_KV_BLOCK_REAPER_IDLE_SECONDS", "kv-block-reaper", "idle_seconds"),
        ("LIVEPATCH_ROCM_PINNED_ALLOCATOR_STEP_GB", "rocm-pinned-allocator", "step_gb"),
        ("LMCACHE_ROCM_DEMAND_PINNED_STEP_GB", "rocm-pinned-allocator", "step_gb"),
        ("LIVEPATCH_MORIIO_TIMEOUTS_HANDSHAKE_SECONDS", "moriio-timeouts", "handshake_seconds"),
        ("LIVEPATCH_MORIIO_TIMEOUTS_TRANSFER_SECONDS", "moriio-timeouts", "transfer_seconds"),
        ("LIVEPATCH_MORIIO_TIMEOUTS_DEFER_SECONDS", "moriio-timeouts", "defer_seconds"),
        ("VLLM_MORIIO_HANDSHAKE_TIMEOUT", "moriio-timeouts", "handshake_seconds"),
        ("VLLM_MORIIO_TRANSFER_TIMEOUT", "moriio-timeouts", "transfer_seconds"),
        ("VLLM_MORIIO_DEFER_TIMEOUT", "moriio-timeouts", "defer_seconds"),
    ],
)
def test_options_in_seconds_and_sizes(name: str, patch: str, option: str) -> None:
    for text, value in (("12", 12.0), ("2.5", 2.5), (" 7 ", 7.0), ("1e2", 100.0)):
        environment = read({name: text})
        assert environment.options[patch][option] == value
        assert environment.toggles[patch] == "auto"
        assert environment.errors == ()
    default = read({}).options[patch][option]
    for text in ("-3", "0", "nan", "inf", "-inf", "Infinity", "1e400", "soon", "1,5", "10s"):
        environment = read({name: text})
        assert environment.options[patch][option] == default
        (error,) = environment.errors
        assert error.startswith(f"{name}={text!r} is not a number of at least ")


@pytest.mark.parametrize("name", ["LIVEPATCH_MP_BLOCK_TRANSFER_DTYPE", "LMCACHE_ROCM_MP_BLOCK_FALLBACK_DTYPE"])
def test_an_option_with_choices(name: str) -> None:
    for choice in ("auto", "float16", "bfloat16"):
        assert read({name: choice}).options["mp-block-transfer"] == {"dtype": choice}
    environment = read({name: "int3"})
    assert environment.options["mp-block-transfer"] == {"dtype": "auto"}
    (error,) = environment.errors
    assert error.startswith(f"{name}='int3'")
    assert "auto, float16, bfloat16" in error


def test_options_of_other_kinds() -> None:
    environment = read(
        {"LIVEPATCH_FREE_WORDS_MODE": "peer", "LIVEPATCH_FREE_WORDS_VERBOSE": "yes", "LIVEPATCH_FREE_WORDS_N": "-7"}
    )
    assert environment.options["free-words"] == {"mode": "peer", "verbose": True, "n": -7}
    (error,) = read({"LIVEPATCH_FREE_WORDS_VERBOSE": "2"}).errors
    assert "1 or 0" in error
    (error,) = read({"LIVEPATCH_FREE_WORDS_N": "two"}).errors
    assert "a whole number;" in error


def test_our_own_option_is_stronger_than_the_name_from_the_field() -> None:
    environment = read({"VLLM_MORIIO_DEFER_TIMEOUT": "5", "LIVEPATCH_MORIIO_TIMEOUTS_DEFER_SECONDS": "6"})
    assert environment.options["moriio-timeouts"]["defer_seconds"] == 6.0


def test_every_bad_value_is_reported() -> None:
    environment = read({"LIVEPATCH": "x", "LIVEPATCH_KV_BLOCK_REAPER": "y", "VLLM_MORIIO_DEFER_TIMEOUT": "z"})
    assert [error.partition("=")[0] for error in environment.errors] == [
        "LIVEPATCH",
        "LIVEPATCH_KV_BLOCK_REAPER",
        "VLLM_MORIIO_DEFER_TIMEOUT",
    ]


def test_a_name_of_ours_that_means_nothing_is_noted() -> None:
    known = {"LIVEPATCH_STALE_FINISHED_RECVING": "off", "LIVEPATCH_KV_BLOCK_REAPER_IDLE_SECONDS": "60"}
    environment = read({"LIVEPATCH_STALE_FINISHED_RECEIVING": "off", "LIVEPATCH_STATE_DIR": "/tmp", **known})
    assert environment.errors == ()
    (note,) = environment.notes
    assert note.startswith("LIVEPATCH_STALE_FINISHED_RECEIVING ")


@pytest.mark.parametrize("value", ["text", "JSON", "json "])
def test_how_lines_are_written(value: str) -> None:
    assert read({"LIVEPATCH_LOG": value}) == read({})


def test_lines_are_written_as_text_or_json() -> None:
    (error,) = read({"LIVEPATCH_LOG": "xml"}).errors
    assert error == "LIVEPATCH_LOG='xml' is none of text, json; it counts as text"


@pytest.mark.parametrize(("given", "keep"), [("1", True), ("On", True), ("off", False), ("", False), ("banana", False)])
def test_whether_ended_processes_leave_their_reports(given: str, keep: bool) -> None:
    environment = read({"LIVEPATCH_STATE_KEEP": given})
    assert (environment.keep, environment.notes) == (keep, ())
    assert bool(environment.errors) == (given == "banana")


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("SHARE", "1.01", "a number of at least 0 and at most 1"),
        ("SHARE", "-0.01", "a number of at least 0 and at most 1"),
        ("SHARE", "inf", "a number of at least 0 and at most 1"),
        ("SHARE", "nan", "a number of at least 0 and at most 1"),
        ("MOST", "6", "a whole number of at most 5"),
    ],
)
def test_a_number_beyond_its_bounds(name: str, text: str, wanted: str) -> None:
    environment = read({f"LIVEPATCH_BOUNDED_{name}": text})
    default = {"SHARE": 0.05, "MOST": 3}[name]
    assert environment.options["bounded"][name.lower()] == default
    assert environment.errors == (f"LIVEPATCH_BOUNDED_{name}={text!r} is not {wanted}; it counts as {default}",)


@pytest.mark.parametrize(("name", "value"), [("SHARE", 0.0), ("SHARE", 1.0), ("SHARE", 7.0), ("MOST", 5), ("MOST", -9)])
def test_a_number_at_its_bounds(name: str, value: float) -> None:
    environment = read({f"LIVEPATCH_BOUNDED_{name}": str(value)})
    assert (environment.options["bounded"][name.lower()], environment.errors) == (value, ())


def test_what_differs_from_the_defaults_is_shown() -> None:
    def shown(environ: Mapping[str, str]) -> dict[str, Any]:
        return settings.changed_settings(ALL, read(environ))

    assert shown({}) == {"mode": "auto", "toggles": {}, "options": {}}
    assert shown({"LIVEPATCH_KV_BLOCK_REAPER_IDLE_SECONDS": "600"})["options"] == {}
    assert shown({"LIVEPATCH_KV_BLOCK_REAPER_IDLE_SECONDS": "7", "LIVEPATCH_KV_BLOCK_REAPER": "on"}) == {
        "mode": "auto",
        "toggles": {"kv-block-reaper": "on"},
        "options": {"kv-block-reaper": {"idle_seconds": 7.0}},
    }


@pytest.mark.parametrize("empty", ["", " ", "\t"])
def test_an_empty_value_counts_as_unset_everywhere(empty: str) -> None:
    """As a chart leaves a variable whose value nobody gave."""
    names = ["LIVEPATCH", "LIVEPATCH_LOG", "LIVEPATCH_STATE_KEEP", "LIVEPATCH_STATE_DIR", "LIVEPATCH_OF_OLD"]
    for patch in ALL:
        names += [variable(patch.name), *patch.aliases]
        for option in patch.options:
            names += [variable(patch.name, option.name), *option.aliases]
    assert read(dict.fromkeys(names, empty)) == read({})
    given = {"CHUNKED_LMCACHE_MAX_TOKENS_PER_LOAD": "16"}
    name = variable("chunked-lmcache-load", "max_tokens")
    assert read({name: empty, **given}) == read(given), "the next name that means it"
    off = {"CHUNKED_LMCACHE_MAX_TOKENS_PER_LOAD": "0"}
    assert read({"LIVEPATCH_CHUNKED_LMCACHE_LOAD": empty, **off}) == read(off)


GROUPED = [
    to_patch("of-nixl", {**BASE, "group": "nixl", "aliases": ["OLD_SWITCH"]}),
    to_patch("of-mine", {**BASE, "group": "mine"}),
    to_patch("of-none", BASE),
]


@pytest.mark.parametrize(
    ("environ", "toggles"),
    [
        ({"LIVEPATCH_GROUP_NIXL": "off"}, ["off", "auto", "auto"]),
        ({"LIVEPATCH_GROUP_NIXL": "ON", "LIVEPATCH_GROUP_MINE": "0"}, ["on", "off", "auto"]),
        ({"LIVEPATCH_GROUP_NIXL": "off", "LIVEPATCH_OF_NIXL": "on"}, ["on", "auto", "auto"]),
        ({"LIVEPATCH_GROUP_NIXL": "off", "LIVEPATCH_OF_NIXL": "auto"}, ["auto", "auto", "auto"]),
        ({"LIVEPATCH_GROUP_NIXL": "off", "OLD_SWITCH": "1"}, ["on", "auto", "auto"]),
        ({"LIVEPATCH_GROUP_NIXL": "auto", "LIVEPATCH_GROUP_MINE": " "}, ["auto", "auto", "auto"]),
        ({"LIVEPATCH_GROUP_ROCM": "off"}, ["auto", "auto", "auto"]),  # a bundle without its patches
    ],
)
def test_a_group_is_switched_by_one_variable(environ: dict[str, str], toggles: list[str]) -> None:
    found = settings.read(GROUPED, environ)
    assert [found.toggles[patch.name] for patch in GROUPED] == toggles
    assert (found.errors, found.notes) == ((), ())


def test_which_variable_turned_a_patch_off_is_said() -> None:
    environment = settings.read(GROUPED, {"LIVEPATCH_GROUP_NIXL": "off"})
    there = Installed("1", dict.fromkeys(GROUPED[0].targets))
    assert decide(GROUPED[0], there, environment).detail.startswith("LIVEPATCH_GROUP_NIXL is off; ")


@pytest.mark.parametrize("value", ["force", "yess"])
def test_what_is_no_toggle_of_a_group(value: str) -> None:
    found = settings.read(GROUPED, {"LIVEPATCH_GROUP_NIXL": value})
    assert found.errors == (f"LIVEPATCH_GROUP_NIXL={value!r} is none of auto, on, off; it counts as auto",)
    assert found.toggles["of-nixl"] == "auto"


def test_each_patch_of_ours_has_a_group() -> None:
    groups = {entry.patch.group for entry in catalogue.load().values()}
    assert groups == set(settings.GROUPS)

"""Every attribute that a patch's code asks something of upstream for is in the patch's facts, or is said here to be none.

Told by name alone, from the syntax: an attribute of ours or of the standard library that has the name of one of
upstream's hides that one, and what is asked for by a computed name is not seen.
"""

from __future__ import annotations

import ast
import builtins
import collections
import dataclasses
import threading
from collections.abc import Iterator

import pytest
from vllm_livepatch.sitecustomize.context import PatchContext
from vllm_livepatch.sitecustomize.guard import Wrapped
from vllm_livepatch.tools.bundles import catalogue, patch_files

ENTRIES = {name: entry for name, entry in catalogue.load().items() if not entry.patch.diff}
TYPES: tuple[type, ...] = (
    dict,
    list,
    set,
    frozenset,
    str,
    bytes,
    int,
    float,
    tuple,
    type,
    object,
    BaseException,
    collections.deque,
)
TYPES += (collections.OrderedDict, collections.Counter, threading.Event, threading.Thread, type(threading.Lock()))
STANDARD = {name for kind in TYPES for name in dir(kind)} | set(dir(PatchContext)) | {"__name__", "__mro__"}
STANDARD |= {"aside", "asked", "facts", "options", "patch_set"}  # of a patch's context
STANDARD |= set(dir(Wrapped))

TORCH = "torch's, and checked by what the release tests move"
ALLOWED = {
    "chunked-lmcache-load": {"parameters": "of an inspect.Signature", "callback": "of a contextlib.ExitStack"},
    "failed-loads": {
        "error_block_ids": "of LMCache's adapter; one that has no such set is left alone",
        **dict.fromkeys(
            ("_lmcache_engine", "load_specs", "vllm_cached_tokens", "lmcache_cached_tokens"),
            "of LMCache's connector; one that keeps no such notes is left alone",
        ),
        "_connectors": "of a MultiConnector",
        **dict.fromkeys(("co_name", "f_back", "f_code", "f_locals"), "of a frame"),
        "kv_transfer_config": "of vLLM's configuration; one without it counts as not set",
    },
    "idle-stepping": dict.fromkeys(("not_empty", "queue", "wait_for"), "of a queue.Queue, which input_queue is"),
    "lmcache-bounded-waits": {
        "CLOCK_BOOTTIME": "of the module time",
        "__self__": "of a bound method",
        "_fd": "of a multiprocessing.shared_memory.SharedMemory, which LMCache maps a server's pool with",
        **dict.fromkeys(("st_dev", "st_ino"), "of os.fstat's answer"),
        "copy_": TORCH,
    },
    "lmcache-cache-identity": {
        **dict.fromkeys(("expanduser", "read", "hexdigest", "indices"), "of the standard library"),
        **dict.fromkeys(("st_ctime_ns", "st_dev", "st_ino", "st_mtime_ns", "st_size"), "of os.stat's answer"),
        **dict.fromkeys(("contiguous", "cpu", "detach", "dtype", "numpy", "shape", "uint8", "view"), TORCH),
        **dict.fromkeys(
            ("load_specs", "mm_adjusted_prompt_ids", "request_id", "vllm_block_size"),
            "assigned by __init__ of LMCache's tracker and connector; those that have none are left alone",
        ),
        "enable_blending": "of LMCache's configuration; one that has no such field blends nothing",
    },
    "kv-block-reaper": dict.fromkeys(("held", "parked", "receive"), "of the ledger of stale-finished-recving, ours"),
    "stable-request-ids": {"empty": "of a queue.Queue"},
    "stale-finished-recving": {
        "_pause_state": "read by Scheduler.get_num_unfinished_requests, whose whole fingerprint is in the facts",
        "resumable": "read by Scheduler.add_request, whose whole fingerprint is in the facts",
    },
    "lmcache-failed-loads": {"livepatch_blocks": "what the patch itself sets"},
    "lmcache-in-process": {
        **dict.fromkeys(
            ("load_specs", "async_loading", "_requests_priority"), "set in _init_connector_state, whose code is a fact"
        ),
        **dict.fromkeys(("parallel_config", "pipeline_parallel_size"), "vLLM's configuration"),
        **dict.fromkeys(("_output_token_ids", "extra_args", "request_id", "sampling_params"), "vLLM's, of a request"),
        "_connector_metadata": "of vLLM's base class of connectors",
        "actual_lookup_client": "asked for with hasattr",
        **dict.fromkeys(("DONE", "LOADING"), "of LMCache's enumerations, whose whole fingerprints are in the facts"),
        "exception": "of asyncio.Future",
    },
    "lmcache-reregister": {"CLOCK_BOOTTIME": "of the module time", "__self__": "of a bound method"},
    "lmcache-unordered-copies": {
        **dict.fromkeys(("copy_", "current_stream", "device", "is_cuda", "nbytes", "synchronize", "view"), TORCH),
        **dict.fromkeys(
            ("address", "get_size", "meta", "parent", "raw_tensor"),
            "of LMCache's MemoryObj, which the targets ask as well, whose whole fingerprints are in the facts",
        ),
    },
    "lmcache-failed-copies": {"reset": "of a contextvars.ContextVar", "synchronize": TORCH},
    "lmcache-disk": {
        "_is_owned": "of a threading.RLock",
        "cast": "of a memoryview",
        "reset": "of a contextvars.ContextVar",
        **dict.fromkeys(("fileno", "readinto"), "of a file"),
        "st_size": "of os.fstat's answer",
        "dirname": "of os.path",
        **dict.fromkeys(("cancelled", "exception", "result"), "of asyncio.Future"),
        **dict.fromkeys(("_allocator", "address_manager"), "of an allocator; one that has none frees at once"),
    },
    "lmcache-server-threads": {
        **dict.fromkeys(("objects", "request", "until"), "of what the patch itself has"),
        "gather": "of LMCache's compiled Bitmap, which its own code calls as well",
    },
    "lmcache-unfilled-stores": dict.fromkeys(("entry", "key", "l1"), "of what the patch itself has"),
    "lmcache-unloaded-stores": {
        **dict.fromkeys(
            ("_block_size", "_invalid_block_ids", "_vllm_config"),
            "assigned by __init__ or _init_connector_state, whose whole fingerprints are in the facts",
        ),
        **dict.fromkeys(("_get_connector_metadata",), "of vLLM's base class of connectors, which LMCache asks as well"),
        **dict.fromkeys(
            ("block_ids", "new_block_ids", "num_computed_tokens", "req_ids", "resumed_req_ids"),
            "of vLLM's scheduler output, which LMCache's build_connector_meta reads as well",
        ),
        **dict.fromkeys(("scheduled_cached_reqs", "scheduled_new_reqs"), "of vLLM's scheduler output, as well"),
        **dict.fromkeys(
            ("parallel_config", "pipeline_parallel_size", "world_size"), "of vLLM's configuration, 0.14.1 to 0.33.0"
        ),
        **dict.fromkeys(("_get_default_store", "check", "delete_key", "distributed_c10d", "tolist"), TORCH),
    },
    "mp-block-transfer": {
        **dict.fromkeys(("Event", "ExternalStream", "Tensor_out", "aten", "query", "record"), TORCH),
        **dict.fromkeys(("_construct_storage_from_data_pointer", "index_put_", "set_", "is_inference"), TORCH),
        **dict.fromkeys(("is_contiguous", "reshape", "shape", "tolist", "view"), TORCH),
        **dict.fromkeys(("current_stream", "synchronize"), TORCH),
        "_replace": "of a named tuple of ours",
    },
    "moriio-preemption": {
        "fullmatch": "of re",
        **dict.fromkeys(
            ("add_new_req", "reqs_to_recv", "reqs_to_save", "remote_dp_size", "remote_dp_rank", "remote_host"),
            "of MoRIIOConnectorMetadata and ReqMeta, whose whole fingerprints are in the facts",
        ),
        **dict.fromkeys(
            ("new_block_ids", "req_ids", "scheduled_cached_reqs", "scheduled_new_reqs"),
            "of SchedulerOutput and CachedRequestData, whose whole fingerprints are in the facts",
        ),
    },
    "moriio-timeouts": {
        "livepatch_kind": "what the patch itself sets",
        **dict.fromkeys(
            ("backend", "dst_engine_id", "enqueue_time", "local_block_ids", "remote_handshake_port", "remote_host"),
            "fields of WriteTask, ReqMeta and MoRIIOConfig, whose whole fingerprints are in the facts",
        ),
        **dict.fromkeys(("Code", "Failed", "Message", "Succeeded", "Wait"), "mori's, of which no release is pinned"),
        **dict.fromkeys(("Again", "RCVTIMEO", "setsockopt"), "pyzmq's"),
        **dict.fromkeys(
            ("__closure__", "__code__", "__defaults__", "__func__", "__globals__", "__kwdefaults__"), "of a function"
        ),
        **dict.fromkeys(("exception", "logger"), "the module's logger"),
    },
    "mooncake-failed-loads": {
        **dict.fromkeys(("add_done_callback", "cancel", "cancelled", "done", "exception"), "of an asyncio.Future"),
        "call_soon": "of an asyncio event loop",
        **dict.fromkeys(("close", "hostname", "port", "wait_closed"), "of a parsed address and of asyncio's streams"),
        **dict.fromkeys(("empty", "put"), "of a queue.SimpleQueue"),
        **dict.fromkeys(("_answer", "_close", "_made", "_opened", "_overdue", "_own"), "of what the patch itself has"),
        **dict.fromkeys(("_receive", "_send", "refuses"), "of what the patch itself has"),
        **dict.fromkeys(("Again", "ContextTerminated", "EVENTS", "POLLOUT"), "pyzmq's"),
        **dict.fromkeys(("rcvtimeo", "recv", "send", "setsockopt", "sndtimeo"), "pyzmq's"),
    },
    "mooncake-layerwise": {
        **dict.fromkeys(("_ask", "_settled", "_socket", "_write", "_written"), "the patch's own"),
        **dict.fromkeys(("asleep", "drained", "end", "given_up"), "the patch's own"),
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "the release's record_send_reqs, which is in the facts, asks for it",
        **dict.fromkeys(("call_soon", "call_soon_threadsafe", "run_in_executor"), "of an asyncio event loop"),
        **dict.fromkeys(("Event", "cuda", "device", "record", "synchronize"), "torch's"),
        **dict.fromkeys(("data_ptr", "element_size", "shape", "stride"), "of a torch.Tensor"),
        **dict.fromkeys(("result",), "of a concurrent.futures.Future"),
        "send_multipart": "of a zmq.asyncio.Socket, for which the patch's own stands in",
        **dict.fromkeys(
            ("compress_ratio", "tokens_per_state"), "of a cache's spec; a release has one of them, or none"
        ),
    },
    "mooncake-lost-asks": {
        **dict.fromkeys(("_failed", "_identity", "_socket"), "of what the patch itself has"),
        "add_done_callback": "of an asyncio.Task",
        "recv_multipart": "of a zmq.asyncio.Socket",
        "send_multipart": "of a zmq.asyncio.Socket, for which the patch's own stands in",
    },
    "nixl-lease-guard": {
        **dict.fromkeys(
            ("nixl_agent", "get_xfer_descs", "initialize_xfer", "register_memory", "send_notif", "transfer"),
            "NIXL's, of which no release is pinned; the release tests drive the one that is installed",
        ),
        **dict.fromkeys(("digest", "from_buffer", "search"), "of hashlib, ctypes and re"),
        "put": "of a queue.Queue",
    },
    "nixl-push-failures": {
        **dict.fromkeys(("empty", "get_nowait", "put"), "of a queue.Queue"),
        **dict.fromkeys(("add_done_callback", "cancelled", "exception"), "of a future"),
        **dict.fromkeys(
            (
                "add_remote_agent",
                "get_new_notifs",
                "get_partial_agent_metadata",
                "get_reg_descs",
                "remove_remote_agent",
                "send_notif",
                "transfer",
            ),
            "NIXL's, of which no release is pinned; the release tests drive the one that is installed",
        ),
    },
    "nixl-request-params": {
        "put": "of a queue.Queue",
        "hostname": "of urllib.parse.urlsplit's answer",
    },
    "nixl-ucx-error-handling": {
        **dict.fromkeys(
            ("nixl_agent", "get_backend_params", "get_plugin_params"),
            "NIXL's, of which no release is pinned; the release tests drive the one that is installed",
        ),
        "livepatch": "the mark on our own create_backend",
    },
    "rocm-pinned-allocator": {
        "itemsize": TORCH,
        **dict.fromkeys(
            ("_cudart", "_curr_size", "_expand_thread", "_final_size", "_pin_record", "_stop_expand"),
            "assigned by LazyMemoryAllocator.__init__, whose whole fingerprint is in the facts",
        ),
    },
}
"""What the facts need not have, and why."""


def modules(name: str) -> Iterator[ast.Module]:
    for file in patch_files.code(ENTRIES[name].folder):
        yield ast.parse(file.read_text("utf-8"))


def asked_for(tree: ast.Module) -> Iterator[str]:
    """Attributes by name: of `x.name`, and of getattr, hasattr and setattr with a constant."""
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in imported):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            if node.func.id in ("getattr", "hasattr", "setattr") and isinstance(node.args[1], ast.Constant):
                yield str(node.args[1].value)


def own(tree: ast.Module) -> Iterator[str]:
    """What the patch's own classes and functions are called and have."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                targets = [inner.target] if isinstance(inner, ast.AnnAssign) else getattr(inner, "targets", [])
                stored = [target for target in targets if ast.unparse(target).partition(".")[0] in ("self", "cls")]
                yield from (ast.unparse(target).partition(".")[2] for target in stored)
            yield from (name for child in node.body for name in declared(child))


def declared(child: ast.stmt) -> Iterator[str]:
    """Fields, constants and slots in a class body."""
    if isinstance(child, ast.AnnAssign):
        yield ast.unparse(child.target)
    elif isinstance(child, ast.Assign):
        yield from map(ast.unparse, child.targets)
        if ast.unparse(child.targets[0]) == "__slots__":
            yield from ast.literal_eval(child.value)


def uncovered(name: str) -> set[str]:
    known = {part for path in ENTRIES[name].patch.names for part in path.partition(":")[2].split(".")}
    trees = list(modules(name))
    ours = {one for tree in trees for one in own(tree)}
    return {one for tree in trees for one in asked_for(tree)} - known - ours - STANDARD - set(dir(builtins))


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_what_a_patch_touches_is_in_its_facts(name: str) -> None:
    assert uncovered(name) == set(ALLOWED.get(name, {}))


def test_a_name_taken_out_of_the_facts_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ENTRIES["kv-block-reaper"]
    (path,) = [call for call in entry.patch.calls if call.endswith(":MultiConnector._connectors")]
    less = dataclasses.replace(entry.patch, calls=tuple(call for call in entry.patch.calls if call != path))
    monkeypatch.setitem(ENTRIES, "kv-block-reaper", dataclasses.replace(entry, patch=less))
    assert uncovered("kv-block-reaper") == {"_connectors", *ALLOWED["kv-block-reaper"]}

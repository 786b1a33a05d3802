"""Finds a target as it would be found anyway, with a loader that notifies the runtime before and after it has run.

Python holds its global import lock while it looks for a module, and another thread may need that to end an import of
its own. So nothing is imported, read or waited for in here: all that is done when the module is executed, and then only
that module's own lock is held. For the same reason this is no module: the entry has its text, and compiles it when the
first target is looked for.
"""

import os
import sys
from _thread import get_ident
from _weakref import ref
from time import sleep

TYPE_CHECKING = False  # neither typing nor __future__ is imported here
if TYPE_CHECKING:
    from typing import Any
else:
    Any = object

TARGETS: dict[str, str] = {}
"""The entry's: modules, and what is done to them; the bundle's own package is among them, and those of the targets."""
PLACE = ""
"""The entry's: the folder that holds the bundle's own package, as it was when this process started."""
HOOK = "_vllm_livepatch.sitecustomize.hook"
CALLED = ("added", "after", "armed_late", "before", "changed", "ended", "finds", "imported_before", "program")  # of it
FORK_WAITS = 5000  # milliseconds, at most
FRAMES = 500  # that a decision and its imports take, at most
finding: set[tuple[str, int]] = set()  # (module, thread): who looks for what right now
inside: set[int] = set()  # threads that import or run code of ours
forking: set[int] = set()  # threads that are about to fork
watched: dict[int, Any] = {}  # by thread: a reference to the lock of its outermost import
sizes: dict[int, int] = {}  # by thread: of sys.modules when that import began; none where code of ours ran in it
damages: list[Exception] = []  # why there is no runtime
fork_hooks: list[bool] = []


def find_spec(name: str, path: Any, target: Any) -> Any:
    if name not in TARGETS:
        watch()
        return None
    if TARGETS[name] == "own":
        return own_spec(name)
    search = name, get_ident()
    if search in finding:  # a finder behind us may ask all finders again
        return None
    finding.add(search)
    try:
        spec = next_spec(name, path, target)
    finally:
        finding.discard(search)
    if TARGETS[name] == "package" and has_targets(name, spec):  # each of which is noticed by itself
        watch()
        return spec
    if not fork_hooks:
        fork_hooks.append(True)
        os.register_at_fork(before=before_fork, after_in_parent=after_fork, after_in_child=after_fork_in_child)
    if spec is not None and spec.loader is not None:
        spec.loader = notifying(name, spec.loader)
    elif spec is None and TARGETS[name].startswith("added"):
        kind: Any = type(sys.__spec__)
        spec = kind(name, Added(name), is_package=TARGETS[name] == "added package")
        hook: Any = sys.modules.get(HOOK)
        if hasattr(hook, "is_gone") and hook.is_gone(name):
            return None
    return spec


def has_targets(name: str, spec: Any) -> bool:
    """Whether a package has a file of any target: of one that has none, no import would tell that all are gone."""
    places = [str(place) for place in getattr(spec, "submodule_search_locations", None) or ()]
    tails = [target.split(".")[1:] for target, kind in TARGETS.items() if target.startswith(name + ".")]
    files = [os.path.join(place, *tail) for place in places for tail in tails]
    return spec is None or any(os.path.isdir(file) or os.path.isfile(file + ".py") for file in files)


def own_spec(name: str) -> Any:
    """Of the bundle that this process started with, whichever the entry beside it names by now."""
    archive: Any = sys.path_importer_cache.get(os.path.dirname(PLACE))
    if hasattr(archive, "archive"):  # replaced, its parts lie elsewhere than they did when it was looked at
        archive.invalidate_caches()
    spec = sys.modules["_frozen_importlib_external"].PathFinder.find_spec(name, [PLACE])
    if spec is None:  # another one must not be found in its place
        raise ModuleNotFoundError(f"{PLACE} is not there: was it replaced since this process started?", name=name)
    return spec


def next_spec(name: str, path: Any, target: Any) -> Any:
    finders = list(sys.meta_path)
    own = [place for place, finder in enumerate(finders) if is_ours(finder)]
    # Where somebody put something around every finder, all are asked: around ours, too, which passes while it asks.
    for finder in finders[own[0] + 1 if own else 0 :]:
        find = getattr(finder, "find_spec", None)
        spec = None if find is None else find(name, path, target)
        if spec is not None:
            return spec
    return None


def is_ours(finder: Any) -> bool:
    return type(finder) is type and finder.__name__ == "LivepatchFinder"


def notifying(name: str, loader: Any) -> Any:
    """A loader as `loader` is, which notifies the runtime. A copy, since a zip file's loader serves many modules."""
    lazy: Any = getattr(sys.modules.get("importlib.util"), "LazyLoader", None)
    if lazy is not None and type(loader) is lazy:  # it runs nothing: what it has does, later
        made = object.__new__(lazy)
        vars(made).update(vars(loader), loader=notifying(name, loader.loader))
        return made
    try:
        if any({"__slots__", "__copy__"} & set(vars(kind)) for kind in type(loader).__mro__):
            raise TypeError("its attributes alone do not make a copy")
        made = object.__new__(type(loader))
        vars(made).update(vars(loader))
    except TypeError:
        made = StandIn(loader)

    @part_of_import
    def exec_module(module: Any) -> None:
        alone = None if watch() else Alone()
        try:
            real = call_hook("before", name, loader, module) or loader
            real.exec_module(module)
            call_hook("after", module)
        finally:
            if alone is not None:
                ended(alone)

    @part_of_import
    def load_module(fullname: str) -> Any:  # a loader of a kind that Python has given up
        watch()
        call_hook("before", name, loader, None)
        module = loader.load_module(fullname)
        call_hook("after", module)
        return module

    def get_code(fullname: Any = None) -> Any:
        asker = sys._getframe(1).f_back  # runpy has a function that asks for it
        if asker is not None and asker.f_code.co_name == "_run_module_as_main":
            call_hook("program", name)
        asked = TARGETS.get(name) == "changed" and call_hook("changed", name, loader)
        return (asked or loader).get_code(name)

    made.livepatch_loader = loader
    if hasattr(loader, "exec_module"):
        made.exec_module = exec_module
    else:
        made.load_module = load_module
    if TARGETS.get(name) == "changed":  # asked for what it would run, before it runs
        made.get_source = lambda fullname=None: (call_hook("changed", name, loader) or loader).get_source(name)
    if hasattr(made, "get_code"):
        made.get_code = get_code
    return made


def watch() -> bool:
    """Have the hook called when this thread's outermost import has ended; False where this is no part of any.

    The import holds the module's lock, and so do those that wait for it: when nobody does, it has ended, with whatever
    a loader around ours did to the module.
    """
    me = get_ident()
    locks = getattr(sys.modules["_frozen_importlib"], "_module_locks", {})
    known = watched.get(me)
    if getattr(known and known(), "owner", None) == me:
        return True
    for found in list(locks.values()):  # in the order in which their imports began
        lock = found()
        if getattr(lock, "owner", None) == me:
            watched[me] = ref(lock, ended)
            sizes[me] = len(sys.modules)
            return True
    return False


class Alone:
    """In the place of such a reference while a module is executed that no import executes, as a lazy one is."""

    def __init__(self) -> None:
        self.owner = get_ident()
        watched[self.owner] = self

    def __call__(self) -> Any:
        return self


def ended(reference: Any) -> None:
    """An outermost import has ended. Without a target in it, as where only the finder in front of ours was watched, the
    runtime stays unloaded. One that failed, and left no module, is none to look at: code may try it in each call."""
    threads = [thread for thread, of in list(watched.items()) if of is reference]
    grown = any(sizes.get(thread) != len(sys.modules) for thread in threads)
    if grown and (
        HOOK in sys.modules or any(kind != "package" and name in sys.modules for name, kind in TARGETS.items())
    ):
        call_hook("ended")
    for thread in threads:
        if watched.get(thread) is reference:
            del watched[thread]


def part_of_import(function: Any) -> Any:
    """The interpreter cuts its import machinery out of tracebacks by these two names: ours is part of it."""
    code = function.__code__.replace(co_filename="<frozen importlib._bootstrap>", co_name="_call_with_frames_removed")
    function.__code__ = code
    return function


class StandIn:
    """In the place of a loader that cannot be copied, until it runs."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["loader"], name)


class Added:
    """The loader of a module that only a diff has. It is decided when it is asked for more than a spec."""

    def __init__(self, name: str) -> None:
        self.name = name

    @part_of_import
    def create_module(self, spec: Any) -> None:
        found = self.found()
        spec.loader, spec.origin, spec.has_location = notifying(self.name, found.loader), found.origin, True

    @part_of_import
    def exec_module(self, module: Any) -> None:
        if module.__spec__.loader is self:  # a reload makes no module
            self.create_module(module.__spec__)
        module.__spec__.loader.exec_module(module)

    def get_source(self, fullname: str | None = None) -> Any:
        return self.found().loader.get_source(self.name)

    def get_code(self, fullname: str | None = None) -> Any:
        return self.found().loader.get_code(self.name)

    @part_of_import
    def found(self) -> Any:
        spec = call_hook("added", self.name)
        if not spec:
            raise ModuleNotFoundError(f"No module named {self.name!r}", name=self.name)
        return spec


def call_hook(what: str, *arguments: Any) -> Any:
    """The runtime's answer, None where there is no runtime. A fork waits meanwhile.

    Its child would inherit the locks of what is being imported here, and nobody who gives them back.
    """
    me = get_ident()
    sizes.pop(me, None)
    nested = me in inside
    for _ in range(FORK_WAITS):
        inside.add(me)
        if nested or not forking - {me}:
            break
        inside.discard(me)
        sleep(0.001)
    raised = more_frames()
    try:
        hook = load_hook()
        return hook and getattr(hook, what)(*arguments)
    finally:
        if sys.getrecursionlimit() == raised:
            sys.setrecursionlimit(raised - FRAMES)
        if not nested:
            inside.discard(me)


def more_frames() -> int:
    """The recursion limit that leaves us our frames, where the program's own are near it: what is imported there has
    room for itself without us. 0 where there is room enough.
    """
    limit = sys.getrecursionlimit()
    try:
        sys._getframe(max(0, limit - FRAMES))
        sys.setrecursionlimit(limit + FRAMES)
    except ValueError:  # the stack is not that deep
        return 0
    return limit + FRAMES


def before_fork() -> None:
    forking.add(get_ident())
    for _ in range(FORK_WAITS):
        if not inside - {get_ident()}:
            break
        sleep(0.001)


def after_fork() -> None:
    forking.discard(get_ident())


def after_fork_in_child() -> None:
    me = get_ident()
    forking.clear()
    inside.intersection_update({me})
    finding.intersection_update({search for search in finding if search[1] == me})
    for thread in watched.keys() - {me}:
        del watched[thread]
    # What another thread was importing nobody ends in here. What we may have to import is imported anew: our modules,
    # targets, and the standard library. The modules of others stay as they do without us: whoever holds a class of one
    # looks for its names in `sys.modules`.
    locks = getattr(sys.modules["_frozen_importlib"], "_module_locks", {})
    for name, lock in [(name, found()) for name, found in list(locks.items())]:
        top = name.partition(".")[0]
        touched = name in TARGETS or TARGETS.get(top) == "own" or top in sys.stdlib_module_names
        if touched and getattr(lock, "owner", None) not in (None, me):
            locks.pop(name, None)
            sys.modules.pop(name, None)


def load_hook() -> Any:
    """The runtime's hook. A bundle that is damaged, or half replaced, says so once and breaks no import."""
    if damages:
        return None
    try:
        from _vllm_livepatch.sitecustomize import hook  # type: ignore[import-not-found]

        if not all(hasattr(hook, name) for name in CALLED):
            raise ImportError("hook.py is not whole")  # emptied, say, which is no error of Python's
        hook.finds(watched)
        return hook
    except RecursionError:  # the program's stack is full, which says nothing of the bundle: the next import tries again
        return None
    except Exception as error:
        TARGETS.clear()
        damages.append(error)
        if damages[0] is not error:  # another thread writes the line
            return None
        try:
            import select

            line = f"vllm-livepatch: the bundle is damaged, nothing is patched: {error}\n"
            poll = select.poll()
            poll.register(sys.stderr.fileno(), select.POLLOUT)
            if poll.poll(1000):  # a pipe that is full, and that nobody reads, is not waited for
                os.write(sys.stderr.fileno(), line.encode("utf-8", "backslashreplace")[: select.PIPE_BUF])
        except (AttributeError, ImportError, OSError, ValueError):  # no stderr, or a closed one
            pass
        if os.environ.get("LIVEPATCH", "").strip().lower() == "strict":
            os._exit(78)
        return None

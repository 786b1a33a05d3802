# The entry of a vllm-livepatch bundle: `generate` writes it as the bundle's `sitecustomize.py`.
#
# It runs in every Python process that has the bundle on PYTHONPATH, so it imports only what `site` has imported
# already, does nothing but put one finder first on `sys.meta_path`, and parses on Python 2.7. An interpreter that the
# bundle does not serve, or LIVEPATCH=off, sees no trace of it.
import os
import sys

TARGETS = {}  # generate: the modules that the bundle's patches name, and what is done to them
FORK_WAITS = 5000  # milliseconds, at most
finding = set()  # (module, thread): who looks for what right now
inside = set()  # threads that import or run code of ours
forking = set()  # threads that are about to fork
damages = []  # why there is no runtime


class LivepatchFinder(object):
    """Finds a target as it would be found anyway, with a loader that tells the runtime before and after it has run.

    Python holds its global import lock while it looks for a module, and another thread may need that to end an import
    of its own. So nothing is imported, read or waited for in here: all that is done when the module is executed, and
    then only that module's own lock is held.
    """

    fork_waits = False

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        asked = name, get_ident()
        if name not in TARGETS or asked in finding:  # a finder behind us may ask all finders again
            return None
        finding.add(asked)
        try:
            spec = next_spec(name, path, target)
        finally:
            finding.discard(asked)
        if not cls.fork_waits:
            cls.fork_waits = True
            os.register_at_fork(before=before_fork, after_in_parent=after_fork, after_in_child=after_fork_in_child)
        if spec is not None and spec.loader is not None:
            spec.loader = telling(name, spec.loader)
        elif spec is None and TARGETS[name].startswith("added"):
            spec = type(sys.__spec__)(name, Added(name), is_package=TARGETS[name] == "added package")
            hook = sys.modules.get("_vllm_livepatch.sitecustomize.hook")
            if hasattr(hook, "is_gone") and hook.is_gone(name):
                return None
        return spec


def next_spec(name, path, target):
    finders = list(sys.meta_path)
    own = [place for place, finder in enumerate(finders) if is_ours(finder)]
    # Where somebody put something around every finder, all are asked: around ours, too, which passes while it asks.
    for finder in finders[own[0] + 1 if own else 0 :]:
        find = getattr(finder, "find_spec", None)
        spec = None if find is None else find(name, path, target)
        if spec is not None:
            return spec
    return None


def is_ours(finder):
    return type(finder) is type and finder.__name__ == "LivepatchFinder"


def telling(name, loader):
    """A loader as `loader` is, which tells the runtime. A copy, since a zip file's loader serves many modules."""
    try:
        if any({"__slots__", "__copy__"} & set(vars(kind)) for kind in type(loader).__mro__):
            raise TypeError("its attributes alone do not make a copy")
        made = object.__new__(type(loader))
        vars(made).update(vars(loader))
    except TypeError:
        made = StandIn(loader)

    @part_of_import
    def exec_module(module):
        real = call_hook("before", name, loader, module) or loader
        real.exec_module(module)
        call_hook("after", module)

    @part_of_import
    def load_module(fullname):  # a loader of a kind that Python has given up
        call_hook("before", name, loader, None)
        module = loader.load_module(fullname)
        call_hook("after", module)
        return module

    if hasattr(loader, "exec_module"):
        made.exec_module = exec_module
    else:
        made.load_module = load_module
    if TARGETS.get(name) == "changed":  # asked for what it would run, before it runs
        made.get_source = lambda fullname=None: (call_hook("changed", name, loader) or loader).get_source(name)
        made.get_code = lambda fullname=None: (call_hook("changed", name, loader) or loader).get_code(name)
    return made


def part_of_import(function):
    """The interpreter cuts its import machinery out of tracebacks by these two names: ours is part of it."""
    code = function.__code__
    if hasattr(code, "replace"):  # not where the bundle does nothing
        names = {"co_filename": "<frozen importlib._bootstrap>", "co_name": "_call_with_frames_removed"}
        function.__code__ = code.replace(**names)
    return function


class StandIn(object):
    """In the place of a loader that cannot be copied, until it runs."""

    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        return getattr(vars(self)["loader"], name)


class Added(object):
    """The loader of a module that only a diff has. It is decided when it is asked for more than a spec."""

    def __init__(self, name):
        self.name = name

    @part_of_import
    def create_module(self, spec):
        found = self.found()
        spec.loader, spec.origin, spec.has_location = telling(self.name, found.loader), found.origin, True

    @part_of_import
    def exec_module(self, module):
        if module.__spec__.loader is self:  # a reload makes no module
            self.create_module(module.__spec__)
        module.__spec__.loader.exec_module(module)

    def get_source(self, fullname=None):
        return self.found().loader.get_source(self.name)

    def get_code(self, fullname=None):
        return self.found().loader.get_code(self.name)

    @part_of_import
    def found(self):
        spec = call_hook("added", self.name)
        if not spec:
            raise ModuleNotFoundError("No module named %r" % (self.name,), name=self.name)
        return spec


def call_hook(what, *arguments):
    """The runtime's answer, None where there is no runtime. A fork waits meanwhile.

    Its child would inherit the locks of what is being imported here, and nobody who gives them back.
    """
    me = get_ident()
    nested = me in inside
    for _ in range(FORK_WAITS):
        inside.add(me)
        if nested or not forking - {me}:
            break
        inside.discard(me)
        sleep(0.001)
    try:
        hook = load_hook()
        return hook and getattr(hook, what)(*arguments)
    finally:
        if not nested:
            inside.discard(me)


def before_fork():
    forking.add(get_ident())
    for _ in range(FORK_WAITS):
        if not inside - {get_ident()}:
            break
        sleep(0.001)


def after_fork():
    forking.discard(get_ident())


def after_fork_in_child():
    me = get_ident()
    forking.clear()
    inside.intersection_update({me})
    finding.intersection_update({asked for asked in finding if asked[1] == me})
    # What another thread was importing nobody ends in here, and the runtime may need it: it is imported anew.
    locks = getattr(sys.modules["_frozen_importlib"], "_module_locks", {})
    for name, lock in [(name, found()) for name, found in list(locks.items())]:
        if getattr(lock, "owner", None) not in (None, me):
            locks.pop(name, None)
            sys.modules.pop(name, None)


def load_hook():
    """The runtime's hook. A bundle that is damaged, or half replaced, says so once and breaks no import."""
    if damages:
        return None
    try:
        from _vllm_livepatch.sitecustomize import hook

        return hook
    except Exception as error:
        TARGETS.clear()
        damages.append(error)
        if damages[0] is not error:  # said by another thread
            return None
        try:
            said = "vllm-livepatch: the bundle is damaged, nothing is patched: %s\n" % (error,)
            os.write(sys.stderr.fileno(), said.encode("utf-8", "backslashreplace"))
        except (AttributeError, OSError, ValueError):  # no stderr, or a closed one
            pass
        if os.environ.get("LIVEPATCH") == "strict":
            os._exit(78)


def arm():
    global get_ident, sleep
    if os.environ.get("LIVEPATCH") == "off" or not (3, 10) <= sys.version_info[:2] <= (3, 14):
        return False
    for finder in sys.meta_path:
        if getattr(finder, "__name__", "") == "LivepatchFinder":  # another bundle, earlier on the path, serves
            return False
    from _thread import get_ident
    from time import sleep

    sys.meta_path.insert(0, LivepatchFinder)
    for name in list(TARGETS):
        if name in sys.modules:  # a .pth file was faster than we are
            call_hook("imported_before", name)
    return True


def run_next():
    """Run the `sitecustomize` that this one hides, as if this one were not there: it gets the name in `sys.modules`."""
    here = os.path.dirname(os.path.abspath(__file__))
    rest = sys.path[sys.path.index(here) + 1 :] if here in sys.path else []
    if sys.version_info[0] == 2:
        import imp

        found = imp.find_module("sitecustomize", rest)
        imp.load_module("sitecustomize", *found)
        return True
    import _frozen_importlib
    import _frozen_importlib_external

    spec = _frozen_importlib_external.PathFinder.find_spec("sitecustomize", rest)
    if spec is None:
        return False
    module = _frozen_importlib.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    if spec.loader is not None:  # a folder without __init__ has none
        spec.loader.exec_module(module)
    return True


ARMED = arm()
if not run_next() and not ARMED:
    # `site` takes exactly this error to mean that there is no sitecustomize, which leaves sys.modules as it was.
    error = ImportError("no sitecustomize beside the vllm-livepatch bundle, which is not in use here")
    error.name = "sitecustomize"
    raise error

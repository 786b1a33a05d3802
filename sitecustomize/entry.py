# The entry of a vllm-livepatch bundle: `generate` writes it as the bundle's `sitecustomize.py`.
#
# It runs in every Python process that has the bundle on PYTHONPATH, so it imports only what `site` has imported
# already, does nothing but put one finder first on `sys.meta_path`, and parses on Python 2.7. An interpreter that the
# bundle does not serve, or LIVEPATCH=off, sees no trace of it. (Of any other word the runtime says that it is off.)
import os
import sys

TARGETS = {}  # generate: the modules that the bundle's patches name, and what is done to them
GENERATION = ""  # generate: the folder beside this file that holds the rest; an upgrade puts another one beside it
FINDING = ""  # generate: the text of sitecustomize/finding.py; only a process that looks for a target compiles it
HERE = os.path.dirname(os.path.abspath(__file__))
OFF = ("off", "0", "false", "no", "disabled")
LATE = __name__ == "_vllm_livepatch_late"  # the guard runs it, in a process that began without it
compiled = {}


class LivepatchFinder(object):
    """Finds a target as it would be found anyway, with a loader that calls the runtime before and after it has run."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        # What stands in front of us may load a target past us: the end of the import is watched for.
        watched = name in TARGETS or next(iter(sys.meta_path), None) is not LivepatchFinder
        return finding()["find_spec"](name, path, target) if watched else None


def finding():
    """What is in `finding.py`. Compiled from here, since a finder may neither import nor read: its text says why."""
    if not compiled:
        names = {"__name__": "_vllm_livepatch.sitecustomize.finding"}
        exec(compile(FINDING, "<vllm-livepatch: finding.py>", "exec", 0, True), names)
        names["TARGETS"], names["PLACE"] = TARGETS, os.path.join(HERE, GENERATION)
        compiled.setdefault("names", names)  # of two threads the first one's counts
    return compiled["names"]


def arm():
    if os.environ.get("LIVEPATCH", "").strip().lower() in OFF or not (3, 10) <= sys.version_info[:2] <= (3, 14):
        return False
    for finder in sys.meta_path:
        if getattr(finder, "__name__", "") == "LivepatchFinder":  # another bundle, earlier on the path, serves
            return False
    sys.meta_path.insert(0, LivepatchFinder)
    early = [name for name in list(TARGETS) if name in sys.modules and TARGETS[name] != "package"]
    if early:  # before the guard, or a .pth file was faster than we are, and nobody else has run
        finding()["call_hook"]("armed_late" if LATE else "imported_before", early)
    return True


def run_next():
    """Run the `sitecustomize` that this one hides, as if this one were not there: it gets the name in `sys.modules`."""
    after = sys.path.index(HERE) + 1 if HERE in sys.path else len(sys.path)
    if sys.version_info < (3, 10):  # by its own import: loaders of then, as a zip file's, may have no exec_module
        run_next.own = own = sys.modules.pop("sitecustomize", None)  # Python 2 empties a module that nobody holds
        before, sys.path[:after] = sys.path[:after], []
        try:
            __import__("sitecustomize")
        finally:
            sys.path[:0] = before
            sys.modules.setdefault("sitecustomize", own)  # where there is no other, as who loads this one expects it
        return True
    import _frozen_importlib
    import _frozen_importlib_external

    spec = _frozen_importlib_external.PathFinder.find_spec("sitecustomize", sys.path[after:])
    if spec is None:
        return False
    module = _frozen_importlib.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    if spec.loader is not None:  # a folder without __init__ has none
        spec.loader.exec_module(module)
    return True


def stay_first(before):
    """Have what this process starts look here as early as it did: OpenTelemetry's `sitecustomize` puts itself in front
    for it, and runs no other, so that an engine core that is spawned would be stock.
    """
    before = before.split(os.pathsep)
    now = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = next((place for place in before if place and os.path.abspath(place) == HERE), None)
    if own in now:
        earlier = before[: before.index(own)]
        now.remove(own)
        now.insert(next((number for number, place in enumerate(now) if place not in earlier), len(now)), own)
        os.environ["PYTHONPATH"] = os.pathsep.join(now)


ARMED = arm()
BEFORE = os.environ.get("PYTHONPATH", "")
RAN = not LATE and run_next()
if RAN and ARMED:
    stay_first(BEFORE)
elif not (LATE or RAN or ARMED):
    # `site` takes exactly this error to mean that there is no sitecustomize, which leaves sys.modules as it was.
    error = ImportError("no sitecustomize beside the vllm-livepatch bundle, which is not in use here")
    error.name = "sitecustomize"
    raise error

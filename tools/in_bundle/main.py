try:  # to the end of this file: of one that was cut off anywhere, Python says so, and nothing passes for an answer
    # `generate` writes this as the bundle's `__main__.py`: `python BUNDLE doctor|status|verify|check`.
    #
    # It parses on Python 2.7, so that an interpreter that the bundle does not serve gets a line that says so.
    import os
    import sys

    GENERATION = ""  # generate: the folder beside this file that holds the rest
    HERE = os.path.dirname(os.path.abspath(__file__))
    PACKAGE = "_vllm_livepatch"

    def own_package():
        """Have this bundle's own package imported, also where another bundle serves this process, and finds its own."""
        from importlib import util
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(PACKAGE, [os.path.join(HERE, GENERATION) if GENERATION else HERE])
        if spec is None:
            message = "vllm-livepatch: the bundle %s is damaged: it has no %s/%s; "
            message += "if another one lay there before, remove its __pycache__\n"
            sys.stderr.write(message % (HERE, GENERATION, PACKAGE))
            sys.exit(1)
        there = sys.modules.get(PACKAGE)
        if there is not None and os.path.realpath(there.__file__) == os.path.realpath(spec.origin):
            return
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
        sys.modules[PACKAGE] = util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[PACKAGE])

    def damage(error):
        """Which files are not as the manifest has them, '' where all are. What `verify` has may be one of them."""
        import hashlib
        import json

        def read(name):
            return __loader__.get_data(os.path.join(HERE, *name.split("/")))  # from a zip file as well

        found = []
        try:
            for name, sha256 in sorted(json.loads(read("manifest.json").decode())["files"].items()):
                try:
                    if hashlib.sha256(read(name)).hexdigest() != sha256:
                        found.append("%s was changed" % name)
                except Exception as unread:
                    found.append("%s: %s" % (name, getattr(unread, "strerror", None) or unread))
        except Exception as unread:
            return "%s (manifest.json: %s)" % (error, unread)
        more = " and %d more" % (len(found) - 3) if len(found) > 3 else ""
        return ", ".join(found[:3]) + more + " (%s)" % error if found else ""

    if not (3, 10) <= sys.version_info[:2] <= (3, 14):
        message = "vllm-livepatch: this bundle does not serve Python %d.%d: nothing is patched\n"
        sys.stderr.write(message % sys.version_info[:2])
        sys.exit(1)
    try:
        own_package()
        from _vllm_livepatch.tools.in_bundle import command  # a tenth of a second, in which somebody may press Ctrl-C

        command.main(HERE)
    except Exception as error:  # as a file of ours that is missing, empty or cut off has it
        damaged = damage(error)
        if not damaged:
            raise
        sys.stderr.write("vllm-livepatch: the bundle %s is damaged: %s\n" % (HERE, damaged))
        sys.exit(1)
except KeyboardInterrupt:
    os._exit(130)

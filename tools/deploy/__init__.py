"""`deploy`: what to paste so that an engine starts with the bundle. The texts are beside this module, as they read."""

from __future__ import annotations

import json
import re
import shlex
from importlib import resources

from vllm_livepatch.tools.bundles.bundle import version
from vllm_livepatch.tools.errors import UserError

FORMS = {
    "docker": "docker.sh",
    "kubernetes": "kubernetes.yaml",
    "ray": "ray.yaml",
    "slurm": "slurm.sh",
    "systemd": "systemd.service",
}
_INIT = re.compile(r"^      initContainers:\n(?:        .*\n)+", re.MULTILINE)
_COPIED = "        - {name: livepatch, emptyDir: {}}\n"
_BELOW = r"FROM busybox\nCOPY --chmod=a+rX bundle /livepatch"
_MOUNTED = """\
        # From Kubernetes 1.36 on without a feature gate. The restricted standard's list of volumes has none of images:
        # where a namespace enforces it, use the init container.
        - name: livepatch
          image: {reference: @BUNDLE_IMAGE@, pullPolicy: IfNotPresent}
"""


def text(form: str, image: str, model: str, bundle_image: str = "", image_volume: bool = False) -> str:
    """What to paste. Raises UserError."""
    if form not in FORMS:
        raise UserError(f"there is no {form}; there are {', '.join(FORMS)}")
    if image_volume and form != "kubernetes":
        raise UserError("--image-volume is for kubernetes")
    if bundle_image and form != "kubernetes":
        raise UserError("--bundle-image is for kubernetes: elsewhere the bundle is a directory of the host")
    for name in (image, model, bundle_image):
        if not name.isprintable():
            raise UserError(f"{name!r} cannot be pasted: it has more than a line, or characters that cannot be seen")
    text = (resources.files(__name__) / FORMS[form]).read_text("utf-8")
    if image_volume:
        text = _as_image_volume(text)
    quoted = {"docker": shlex.quote, "slurm": shlex.quote, "systemd": _systemd}.get(form, _yaml)
    bundle_image = bundle_image or f"registry.example.com/livepatch:{version()}"
    values = {"IMAGE": image, "MODEL": model, "BUNDLE_IMAGE": bundle_image}
    return re.sub("@([A-Z_]+)@", lambda found: quoted(values[found[1]]), text)


def _as_image_volume(text: str) -> str:
    """The bundle's image mounted as it is, in place of the container that copies it."""
    text = _INIT.sub("", text).replace(_COPIED, _MOUNTED)
    return text.replace(
        r"FROM busybox\nCOPY --chmod=a+rX bundle /livepatch", r"FROM scratch\nCOPY --chmod=a+rX bundle /"
    )


def _yaml(value: str) -> str:
    """A name with a slash as it is; anything else in quotes, since a plain `yes` or `1.5` is no text."""
    plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*[A-Za-z0-9]", value) is not None and "/" in value
    return value if plain else json.dumps(value, ensure_ascii=False)


def _systemd(value: str) -> str:
    """A word of ExecStart=, where quotes are as in C, and % and $ stand for something: systemd.service(5)."""
    value = value.replace("%", "%%").replace("$", "$$")
    return value if re.fullmatch(r"[\w./:@%$+,=-]+", value) else json.dumps(value, ensure_ascii=False)

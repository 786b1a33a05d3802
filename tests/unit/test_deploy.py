"""What `deploy` prints: shells and schemas take it, and nothing of the image's own is lost."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from vllm_livepatch.sitecustomize.decision import variable
from vllm_livepatch.tools import deploy
from vllm_livepatch.tools.bundles import catalogue

from tests.unit.support import PYTHON, Cli, Done, Sandbox, finish

IMAGE, MODEL = "registry.example.com/vllm:1.0", "org/model"
KUBERNETES = ("1.31", "1.36")
"""The first with image volumes, and one in which they need no feature gate."""
RESTRICTED_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret")
}


def printed(cli: Cli, form: str, *words: str) -> str:
    done = cli("deploy", form, "--image", IMAGE, "--model", MODEL, *words)
    assert (done.code, done.err) == (0, "")
    assert not re.search("@[A-Z_]+@", done.out)
    assert IMAGE in done.out or form == "systemd"
    assert MODEL in done.out
    return done.out


def stand_in(place: Path, name: str, code: str) -> None:
    """A program that this machine lacks. What it is called with goes to `calls`, a line a call, words in brackets."""
    place.mkdir(exist_ok=True)
    file = place / name
    file.write_text(f"#!/bin/sh\n{{ printf %s {name}; printf ' [%s]' \"$@\"; echo; }} >>{place}/calls\n{code}\n")
    file.chmod(0o755)


def calls(place: Path) -> list[str]:
    return (place / "calls").read_text().splitlines()


def a_bundle(place: Path) -> Path:
    """As much of one as the printed lines look at themselves."""
    file = place / "bundle/__main__.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text("the stand-in for python does not read it")
    return file.parent


def shell(text: str, place: Path, **variables: str) -> Done:
    environ = {"PATH": f"{place}:{os.environ['PATH']}", "HOME": "/home/me", **variables}
    return finish(["bash", "-euc", text], environ, cwd=place)


@pytest.mark.parametrize("own", ["", "/opt/theirs:/opt/more"])
def test_docker_keeps_what_the_image_has(cli: Cli, tmp_path: Path, own: str) -> None:
    says = f'if [ "$1" = image ]; then printf "PATH=/bin\\n{f"PYTHONPATH={own}" if own else "X=1"}\\nY=2\\n"; fi'
    stand_in(tmp_path, "docker", says)
    assert shell(printed(cli, "docker"), tmp_path).code == 0
    _, doctor, run = calls(tmp_path)
    path = f"[PYTHONPATH=/livepatch{f':{own}' if own else ''}]"
    assert path in doctor
    assert path in run
    assert f"[-v] [{tmp_path}/bundle:/livepatch:ro]" in run
    assert doctor.endswith(f"[{IMAGE}] [-c] [test -s /livepatch/__main__.py && python3 /livepatch doctor]")
    assert "[--entrypoint] [sh]" in doctor
    # The image's ENTRYPOINT is what runs: its arguments, and not a command, follow the image.
    assert run.endswith(f"[-e] [LIVEPATCH=strict] [{IMAGE}] [{MODEL}]")
    assert "--entrypoint" not in run


def test_docker_stops_where_doctor_says_no(cli: Cli, tmp_path: Path) -> None:
    stand_in(tmp_path, "docker", 'case "$*" in *doctor) exit 1;; esac')
    assert shell(printed(cli, "docker"), tmp_path).code == 1
    assert len(calls(tmp_path)) == 2


def test_slurm(cli: Cli, tmp_path: Path) -> None:
    stand_in(tmp_path, "srun", "echo $PYTHONPATH $LIVEPATCH >>calls")
    text = printed(cli, "slurm")
    variables = {"SLURM_JOB_ID": "7", "PYTHONPATH": "/theirs"}
    assert shell(text, tmp_path, **variables).code == 0
    assert calls(tmp_path) == [
        "srun [test] [-s] [/home/me/livepatch/__main__.py]",
        "/home/me/livepatch:/theirs strict",
        "srun [python3] [/home/me/livepatch] [doctor]",
        "/home/me/livepatch:/theirs strict",
        f"srun [vllm] [serve] [{MODEL}]",
        "/home/me/livepatch:/theirs strict",
    ]
    (tmp_path / "calls").unlink()
    assert shell(text, tmp_path, IMAGE=IMAGE, **variables).code == 0
    there, _, doctor, seen, serve, _ = calls(tmp_path)
    assert seen == "/livepatch strict"
    assert there.endswith("[test] [-s] [/livepatch/__main__.py]")
    assert doctor.endswith("[python3] [/livepatch] [doctor]")
    for call in (there, doctor, serve):
        assert f"[--container-image={IMAGE}]" in call
        assert "[--container-mounts=/home/me/livepatch:/livepatch:ro]" in call
        assert "[--container-env=PYTHONPATH,LIVEPATCH,LIVEPATCH_STATE_DIR]" in call
    stand_in(tmp_path, "srun", "exit 1")  # a node that would not be patched
    (tmp_path / "calls").unlink()
    assert shell(text, tmp_path, **variables).code == 1
    assert len(calls(tmp_path)) == 1
    stand_in(tmp_path, "srun", "echo $LIVEPATCH >>calls")
    (tmp_path / "calls").unlink()
    assert shell(text, tmp_path, LIVEPATCH="off", **variables).code == 0  # which doctor would take for a fault
    assert calls(tmp_path) == [f"srun [vllm] [serve] [{MODEL}]", "off"]


def test_systemd(cli: Cli, tmp_path: Path) -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    text = printed(cli, "systemd")
    unit.read_string(text)
    assert "Environment=PYTHONPATH=/opt/livepatch\n" in text
    assert unit["Service"]["ExecStart"].endswith(f"serve {MODEL}")
    asks = unit["Service"]["ExecStartPre"]
    assert asks.startswith("/bin/sh -c '")
    stand_in(tmp_path, "python", "exit 1")
    for word, code in (("strict", 1), ("off", 0)):
        here = asks.replace("$$", "$").replace("/opt/vllm/bin/python", f"{tmp_path}/python")
        asked = shlex.split(here.replace("/opt/livepatch", str(a_bundle(tmp_path))))
        assert finish(asked, {"LIVEPATCH": word, "PATH": os.environ["PATH"]}).code == code
    assert calls(tmp_path) == [f"python [{tmp_path}/bundle] [doctor]"]
    assert unit["Service"]["RestartPreventExitStatus"] == "78"
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:  # all else is held by what is above
        file = tmp_path / "vllm.service"
        file.write_text(text.replace("/opt/vllm/bin/python", "/bin/true").replace("/opt/vllm/bin/vllm", "/bin/true"))
        done = subprocess.run([analyze, "verify", "--man=no", str(file)], capture_output=True, text=True)
        assert "vllm.service" not in done.stderr, done.stderr


# Kubernetes


def problems(spec: dict[str, Any], image_volumes: bool = False) -> list[str]:
    """Where a pod does not meet the restricted pod security standard, field by field as the standard lists them."""
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    pod = spec.get("securityContext", {})
    for container in [*spec["containers"], *spec.get("initContainers", ())]:
        own = container.get("securityContext", {})
        name = container["name"]
        if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
            found.append(f"{name}: privileges")
        if own.get("capabilities", {}).get("drop") != ["ALL"] or own["capabilities"].get("add"):
            found.append(f"{name}: capabilities")
        if {**pod, **own}.get("runAsNonRoot") is not True or {**pod, **own}.get("runAsUser") == 0:
            found.append(f"{name}: root")
        if {**pod, **own}.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            found.append(f"{name}: seccomp")
        if any("hostPort" in port for port in container.get("ports", ())):
            found.append(f"{name}: host port")
    kinds = {kind for volume in spec["volumes"] for kind in volume.keys() - {"name"}}
    found += sorted(kinds - RESTRICTED_VOLUMES - ({"image"} if image_volumes else set()))
    return found


def engine(spec: dict[str, Any]) -> dict[str, Any]:
    (container,) = spec["containers"]
    return dict(container)


@pytest.mark.parametrize("words", [[], ["--image-volume"]])
def test_kubernetes(cli: Cli, words: list[str]) -> None:
    deployment, service = yaml.safe_load_all(printed(cli, "kubernetes", *words, "--bundle-image", "reg/bundle:1"))
    for release in KUBERNETES:
        for document in (deployment, service):
            kubernetes_validate.validate(document, release, strict=True)
    spec = deployment["spec"]["template"]["spec"]
    assert problems(spec, image_volumes=bool(words)) == []
    container = engine(spec)
    assert (container["image"], container["args"]) == (IMAGE, [MODEL])
    assert "command" not in container  # it would be in the place of the image's ENTRYPOINT
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    assert (env["PYTHONPATH"], env["LIVEPATCH"]) == ("/livepatch", "strict")
    assert "python3 /livepatch doctor" in container["startupProbe"]["exec"]["command"][-1]
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert mounts["livepatch"] == {"name": "livepatch", "mountPath": "/livepatch", "readOnly": True}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes.keys() == mounts.keys()
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    if words:
        assert "initContainers" not in spec
        assert volumes["livepatch"]["image"]["reference"] == "reg/bundle:1"
    else:
        (copying,) = spec["initContainers"]
        assert copying["image"] == "reg/bundle:1"
        assert copying["volumeMounts"] == [{"name": "livepatch", "mountPath": "/bundle"}]


def test_what_the_probe_runs_is_a_shell_s_and_python_s(cli: Cli, tmp_path: Path) -> None:
    """`python3` stands for the container's: the probe asks doctor, and then the server, which is not there."""
    deployment, _ = yaml.safe_load_all(printed(cli, "kubernetes"))
    probe = engine(deployment["spec"]["template"]["spec"])["startupProbe"]["exec"]["command"]
    probe = [word.replace("/livepatch", str(a_bundle(tmp_path))) for word in probe]
    stand_in(
        tmp_path,
        "python3",
        "case \"$1\" in -c) exec /usr/bin/env -i \"$REAL\" -c \"compile($(printf \"%s\" \"'''$2'''\"), 'probe', 'exec')\";; esac",
    )
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REAL": shutil.which("python3") or ""}
    assert finish(probe, environ, cwd=tmp_path).code == 0
    assert calls(tmp_path)[0] == f"python3 [{tmp_path}/bundle] [doctor]"
    stand_in(tmp_path, "python3", "exit 1")
    (tmp_path / "calls").unlink()
    assert finish(probe, environ, cwd=tmp_path).code == 1
    assert len(calls(tmp_path)) == 1
    (tmp_path / "calls").unlink()
    finish(probe, {**environ, "LIVEPATCH": "off"}, cwd=tmp_path)  # which doctor would take for a fault
    assert [call.split()[1] for call in calls(tmp_path)] == ["[-c]"]


@pytest.mark.parametrize("form", ["docker", "kubernetes", "slurm", "systemd"])
def test_what_asks_doctor_notices_that_the_bundle_was_emptied(patched: Sandbox, form: str, tmp_path: Path) -> None:
    """With a real bundle, and Python: what is printed fails, where `python BUNDLE doctor` itself exits 0."""
    asks, bundle = deploy.text(form, "image", "model"), str(patched.bundle)
    if form == "kubernetes":
        pod = next(yaml.safe_load_all(asks))["spec"]["template"]["spec"]
        asks = engine(pod)["startupProbe"]["exec"]["command"][-1].rpartition("&& python3 -c")[0]
    elif form == "systemd":
        asks = re.findall("^ExecStartPre=/bin/sh -c '(.*)'$", asks, re.MULTILINE)[0].replace("$$", "$")
    elif form == "docker":
        asks = re.findall("-c '(.*)'$", asks, re.MULTILINE)[0]
    stand_in(tmp_path, "srun", 'test "$1" = vllm || exec "$@"')
    asks = re.sub("/opt/vllm/bin/python|python3", PYTHON, re.sub("(?<![/a-z])(/opt)?/livepatch", bundle, asks))
    environ = {**patched.environ(), "BUNDLE": bundle, "SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environ |= {"PYTHONPATH": f"{bundle}:{patched.site}", "LIVEPATCH": "strict"}
    assert finish(["bash", "-euc", asks], environ).code == 0
    (patched.bundle / "__main__.py").write_text("")
    assert finish([PYTHON, bundle, "doctor"], environ) == Done(0, "", "")  # Python's answer, not ours
    assert finish(["bash", "-euc", asks], environ).code != 0


def test_ray(cli: Cli) -> None:
    """KubeRay's own schema is not at hand; the pods of its head and workers are checked as pods."""
    cluster = yaml.safe_load(printed(cli, "ray"))
    assert cluster["kind"] == "RayCluster"
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    for group in (cluster["spec"]["headGroupSpec"], workers):
        spec = group["template"]["spec"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec}
        for release in KUBERNETES:
            kubernetes_validate.validate(pod, release, strict=True)
        assert problems(spec) == []
        env = {variable["name"]: variable["value"] for variable in engine(spec)["env"]}
        assert (env["PYTHONPATH"], env["LIVEPATCH"]) == ("/livepatch", "strict")


def test_a_form_that_there_is_not(cli: Cli) -> None:
    done = cli("deploy", "nomad")
    assert (done.code, done.out) == (2, "")
    assert "there is no nomad; there are docker, kubernetes, ray, slurm, systemd" in done.err
    assert cli("deploy", "docker", "--image-volume").code == 2


def test_what_is_not_a_plain_word_is_quoted(cli: Cli, tmp_path: Path) -> None:
    text = cli("deploy", "kubernetes", "--model", "a b: c", "--image", IMAGE).out
    deployment, _ = yaml.safe_load_all(text)
    assert engine(deployment["spec"]["template"]["spec"])["args"] == ["a b: c"]
    stand_in(tmp_path, "docker", "")
    assert shell(cli("deploy", "docker", "--model", "a b; exit 3").out, tmp_path).code == 0
    assert calls(tmp_path)[-1].endswith("[a b; exit 3]")


@pytest.mark.parametrize("name", ["yes", "1.5", "null", "0x1f/", 'a"b', "a\\b", "a/b,c", "2026-01-01", "~", "a:"])
def test_a_name_stays_a_text(cli: Cli, name: str) -> None:
    for form in ("kubernetes", "ray"):
        first, *_ = yaml.safe_load_all(cli("deploy", form, "--image", name, "--model", name).out)
        spec = first["spec"]
        pod = spec["template"] if form == "kubernetes" else spec["headGroupSpec"]["template"]
        assert engine(pod["spec"])["image"] == name


@pytest.mark.parametrize(
    "name", ["org/model", "@MODEL@", "$HOME", "$(id)", "`id`", "'", '"', "%h", "😀/x", "模型", "-x", "a#b"]
)
@pytest.mark.parametrize("form", ["docker", "slurm", "kubernetes", "systemd"])
def test_a_name_reaches_the_engine_as_it_is(form: str, name: str, tmp_path: Path) -> None:
    script = deploy.text(form, name, name, name if form == "kubernetes" else "")
    if form == "kubernetes":
        deployment, _ = yaml.safe_load_all(script)
        (given,) = engine(deployment["spec"]["template"]["spec"])["args"]
    elif form == "systemd":  # as systemd.service(5) has it
        (line,) = (line for line in script.splitlines() if line.startswith("ExecStart="))
        word = line.partition("vllm serve ")[2].replace("%%", "%").replace("$$", "$")
        given = json.loads(word) if word.startswith('"') else word
        assert re.fullmatch(r"[^\s'\"\\\\]+", word) or word.startswith('"')
        assert not re.search(r"(?<![%$])[%$](?![%$])", line.partition("vllm serve ")[2])
    else:
        for program in ("docker", "srun"):
            stand_in(tmp_path, program, "")
        assert shell(script, tmp_path, SLURM_JOB_ID="7").code == 0
        given = calls(tmp_path)[-1].rpartition(" [")[2][:-1]
    assert given == name


@pytest.mark.parametrize("form", deploy.FORMS)
@pytest.mark.parametrize("name", ["a\nb", "a\tb", "a\u2028b", "a\0b"])
def test_a_name_of_more_than_a_line_is_refused(cli: Cli, form: str, name: str) -> None:
    for option in ("--image", "--model", "--bundle-image"):
        done = cli("deploy", form, option, name)
        assert (done.code, done.out, len(done.lines)) == (2, "", 1)


@pytest.mark.parametrize("form", sorted(set(deploy.FORMS) - {"kubernetes"}))
def test_an_image_of_the_bundle_s_own_is_for_kubernetes(cli: Cli, form: str) -> None:
    done = cli("deploy", form, "--bundle-image", "registry.example.com/x:1")
    assert (done.code, done.out, len(done.lines)) == (2, "", 1)
    assert "--bundle-image is for kubernetes" in done.err


def test_what_is_printed_of_lmcache_s_server_and_of_turning_off(cli: Cli) -> None:
    for form in ("docker", "kubernetes", "systemd"):
        assert "LMCache's own server" in printed(cli, form)
    text = printed(cli, "kubernetes")
    named = {document["metadata"]["name"] for document in yaml.safe_load_all(text) if document["kind"] == "Deployment"}
    lines = re.findall(r"^#   kubectl set env deployment/(\S+) (.+)$", text, re.MULTILINE)
    assert {name for name, _ in lines} == named
    known = {variable(name) for name in catalogue.load()} | {"LIVEPATCH"}
    assert {word.rstrip("-").partition("=")[0] for _, words in lines for word in words.split()} <= known
    assert lines[1][1] == "LIVEPATCH=off"


def test_every_form_is_a_file_of_the_package() -> None:
    place = Path(deploy.__file__).parent
    assert sorted(deploy.FORMS.values()) == sorted(
        file.name for file in place.iterdir() if file.suffix in (".sh", ".yaml", ".service")
    )

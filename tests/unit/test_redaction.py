"""Secrets of a command line never reach a report; what is none stays readable."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_livepatch.sitecustomize.redaction import HIDDEN, is_secret, sentence, without_secrets

from tests.unit.support import PATCHED, USE_STEP, Sandbox, finish

SECRET = "s3cr3tValue"
URL = f"postgres://user:{SECRET}@db:5432/name"

# The command line, and what is to be read of it.
LINES: dict[str, tuple[list[str], list[str]]] = {
    "the next word": (["--api-key", SECRET, "--port", "80"], ["--api-key", HIDDEN, "--port", "80"]),
    "after =": ([f"--api-key={SECRET}", "--port=80"], [f"--api-key={HIDDEN}", "--port=80"]),
    "with underscores": (["--api_key", SECRET], ["--api_key", HIDDEN]),
    "of the hub": (["serve", "model", "--hf-token", SECRET], ["serve", "model", "--hf-token", HIDDEN]),
    "several": (["--api-key", SECRET, SECRET + "2", "--port", "80"], ["--api-key", HIDDEN, HIDDEN, "--port", "80"]),
    "several in a text": ([f"vllm serve --api-key {SECRET} {SECRET}2 --port 80"], [f"vllm serve --api-key {HIDDEN} {HIDDEN} --port 80"]),
    "a command in JSON": ([json.dumps(["vllm", "--api-key", SECRET])], [json.dumps(["vllm", "--api-key", HIDDEN])]),
    "a login": (["curl", "-u", f"me:{SECRET} x", "-u", "1000:1000"], ["curl", "-u", f"me:{HIDDEN}", "-u", "1000:1000"]),
    "a login among other letters": (["curl", "-sSu", f"me:{SECRET}"], ["curl", "-sSu", f"me:{HIDDEN}"]),
    "a login at its flag": (["curl", f"-ume:{SECRET}", f"--proxy-user=me:{SECRET}"], ["curl", f"-ume:{HIDDEN}", f"--proxy-user=me:{HIDDEN}"]),
    "a login in a text": ([f"curl -U 'me:{SECRET}' --user=me:{SECRET} http://h"], [f"curl -U 'me:{HIDDEN}' --user=me:{HIDDEN} http://h"]),
    "one that begins with a dash": (["--password", f"-{SECRET}"], ["--password", HIDDEN]),
    "one that begins with two": (["--token", f"--{SECRET}", "-v"], ["--token", HIDDEN, "-v"]),
    "a flag without one": (["--api-key", "--port", "80"], ["--api-key", "--port", "80"]),
    "one dash": (["-api-key", SECRET], ["-api-key", HIDDEN]),
    "a dotted flag": (["--config.extra.secretKey", SECRET], ["--config.extra.secretKey", HIDDEN]),
    "a variable": (["env", f"FOO_TOKEN={SECRET}", "A=b"], ["env", f"FOO_TOKEN={HIDDEN}", "A=b"]),
    "a variable of a flag": ([f"--env=FOO_TOKEN={SECRET}"], [f"--env=FOO_TOKEN={HIDDEN}"]),
    "a value with spaces": ([f"DB_PASSWORD=correct {SECRET}"], [f"DB_PASSWORD={HIDDEN}"]),
    "a header": (["-H", f"Authorization: Bearer {SECRET}"], ["-H", f"Authorization: {HIDDEN}"]),
    "a header in a text": ([f"curl -H 'A: Bearer {SECRET}'"], [f"curl -H 'A: Bearer {HIDDEN}'"]),
    "a URL": (["--db", URL], ["--db", f"postgres://{HIDDEN}@db:5432/name"]),
    "a URL after =": ([f"--db={URL}"], [f"--db=postgres://{HIDDEN}@db:5432/name"]),
    "a query": ([f"http://h/p?a=1&sig={SECRET}&b=2"], [f"http://h/p?a=1&sig={HIDDEN}&b=2"]),
    "a pair in a pair": ([f"x a:b=token={SECRET}"], [f"x a:b=token={HIDDEN}"]),
    "JSON": (
        ["--kv-transfer-config", json.dumps({"kv_role": "both", "extra": {"hub_token": SECRET, "n": 1}})],
        ["--kv-transfer-config", json.dumps({"kv_role": "both", "extra": {"hub_token": HIDDEN, "n": 1}})],
    ),
    "JSON after =": ([f'--kv-transfer-config={{"key": "{SECRET}"}}'], [f'--kv-transfer-config={{"key": "{HIDDEN}"}}']),
    "JSON with a list": ([json.dumps({"keys": [SECRET, {"a": SECRET}]})], [json.dumps({"keys": [HIDDEN, {"a": HIDDEN}]})]),
    "JSON with a number": (['{"password": 1234}'], [f'{{"password": "{HIDDEN}"}}']),
    "JSON with a URL": ([json.dumps({"where": URL})], [json.dumps({"where": f"postgres://{HIDDEN}@db:5432/name"})]),
    "not quite JSON": ([f"{{'api_key': '{SECRET}', 'n': 1}}"], [f"{{'api_key': {HIDDEN}, 'n': 1}}"]),
    "a program": (["-c", f"import x; x.token = '{SECRET}'; y()"], ["-c", f"import x; x.token = {HIDDEN}; y()"]),
    "a command in a text": (["-c", f"exec vllm serve m --quiet --api-key '{SECRET}' --port 80"], ["-c", f"exec vllm serve m --quiet --api-key {HIDDEN} --port 80"]),
    "a secret flag behind another": ([f"x --token --api-key {SECRET}"], [f"x --token --api-key {HIDDEN}"]),
    "quotes in quotes": ([f'sh -c "curl -d {{\\"token\\": \\"{SECRET}\\"}}"'], [f'sh -c "curl -d {{\\"token\\": {HIDDEN}}}"']),
    "a name within a value": ([f"x token='a key={SECRET}' b"], [f"x token={HIDDEN} b"]),
    "a flag within a value": ([f"x --token 'a --key {SECRET} b' --port 1"], [f"x --token {HIDDEN} --port 1"]),
    "a URL with two": ([f"http://user:p@{SECRET}@host/a@b"], [f"http://{HIDDEN}@host/a@b"]),
    "deeper than it is looked into": (["=".join(["a"] * 9) + f"=token={SECRET}"], ["=".join(["a"] * 9) + f"=token={HIDDEN}"]),
    "of Google": ([f"AIza{SECRET * 2}"], [f"AIza{HIDDEN}"]),
    "of AWS for a while": (["ASIA" + SECRET * 2], [f"ASIA{HIDDEN}"]),
    "of GitHub": ([f"ghr_{SECRET * 2}"], [f"ghr_{HIDDEN}"]),
    "a web token": (["--jwt", SECRET], ["--jwt", HIDDEN]),
    "a proxy without a scheme": (["--proxy", f"user:{SECRET}@host:80"], ["--proxy", f"user:{HIDDEN}@host:80"]),
    "a proxy after =": ([f"--proxy=:{SECRET}@[::1]:80"], [f"--proxy=:{HIDDEN}@[::1]:80"]),
    "a proxy whose password has signs in it": ([f"curl -x 'me:p@:,={SECRET}@host:80'"], [f"curl -x 'me:{HIDDEN}@host:80'"]),
    "a second variable": ([f"TOKEN2={SECRET}"], [f"TOKEN2={HIDDEN}"]),
    "a second flag": (["--key2", SECRET, "--secretkey1", SECRET, "-v"], ["--key2", HIDDEN, "--secretkey1", HIDDEN, "-v"]),
    "a header in words": (
        ["--header", "Authorization:", "Bearer", SECRET, "--port", "80"],
        ["--header", "Authorization:", HIDDEN, HIDDEN, "--port", "80"],
    ),
    "a header at its flag": (["--header=Authorization:", "Basic", SECRET], ["--header=Authorization:", HIDDEN, HIDDEN]),
    "a header with its scheme": (["-H", "Authorization:Basic", SECRET], ["-H", f"Authorization:{HIDDEN}", HIDDEN]),
    "a scheme in words": (["-H", "X:", "Bearer", SECRET], ["-H", "X:", "Bearer", HIDDEN]),
    "headers": (["--otlp-headers", f"a=1,x-b={SECRET}", "-v"], ["--otlp-headers", HIDDEN, "-v"]),
    "a header of a tracer": (["-H", f"x-honeycomb-team: {SECRET}"], ["-H", f"x-honeycomb-team: {HIDDEN}"]),
    "a private key": (
        [f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----\n", "-v"],
        [f"-----BEGIN RSA PRIVATE KEY{HIDDEN}\n", "-v"],
    ),
    "a private key that is cut off": ([f"k='-----BEGIN PRIVATE KEY-----\\n{SECRET} "], [f"k='-----BEGIN PRIVATE KEY{HIDDEN}"]),
    **{
        f"of {form}": (["login", f"{form}{SECRET * 2}"], ["login", f"{form}{HIDDEN}"])
        for form in ("nvapi-", "gsk_", "xapp-", "dop_v1_", "sk_live_", "dckr_pat_", "pypi-", "hvs.", "ya29.", "xoxe-")
    },
    **{
        f"a webhook of {place}": (["--url", f"https://{shown}{SECRET}"], ["--url", f"https://{shown}{HIDDEN}"])
        for place, shown in {
            "a host": "hooks.slack.com/",
            "a path": "discord.com/api/webhooks/",
            "a query": "h/hook?",
            "any case": "H/Api/WebHook/",
        }.items()
    },
    "a webhook of a flag": (["--slack-webhook-url", f"https://h/{SECRET}", "-v"], ["--slack-webhook-url", HIDDEN, "-v"]),
    "a webhook in a text": ([f"curl 'https://hooks.slack.com/services/T0/{SECRET}' -d x"], [f"curl 'https://hooks.slack.com/{HIDDEN}' -d x"]),
    "a bot's address": ([f"https://api.telegram.org/bot12345678:{SECRET}{SECRET}/send"], [f"https://api.telegram.org/bot12345678:{HIDDEN}"]),
    "a password at its letter": (["x", f"-p{SECRET}", "-p80"], ["x", f"-p{HIDDEN}", "-p80"]),
    "a password at its letter in a text": ([f"x -p{SECRET} -p80:80/tcp -pthread"], [f"x -p{HIDDEN} -p80:80/tcp -pthread"]),
    "a password behind its letter": (["x", "-p", SECRET, "-p", "8080"], ["x", "-p", HIDDEN, "-p", "8080"]),
    **{
        f"a password of {program[0]}": ([*program, SECRET, "x"], [*program, HIDDEN, "x"])
        for program in (["sshpass", "-p"], ["/usr/bin/mysql", "-u", "me", "-p"], ["docker", "login", "-p"], ["unzip", "-P"], ["redis-cli", "-a"], ["ldapsearch", "-w"], ["mongosh", "-p"])
    },
    "a password of digits": (["sshpass", "-p", "1234", "ssh", SECRET], ["sshpass", "-p", HIDDEN, "ssh", SECRET]),
    "a password of small letters": (["mysql", "-psecret", SECRET], ["mysql", f"-p{HIDDEN}", SECRET]),
    "a password of a program in a text": ([f"sh -c 'sshpass -p \"{SECRET}\" ssh h; unzip -P {SECRET} a.zip'"], [f"sh -c 'sshpass -p {HIDDEN} ssh h; unzip -P {HIDDEN} a.zip'"]),
    "a one-time password": (["--otp", SECRET, "--pin=1234", "PIN=1234", "--pin-memory", "on"], ["--otp", HIDDEN, f"--pin={HIDDEN}", f"PIN={HIDDEN}", "--pin-memory", "on"]),
    **{
        f"a program's {form}": (["-c", f"go(); {form}; main()".replace("VALUE", SECRET)], ["-c", f"go(); {shown}; main()"])
        for form, shown in {
            "os.environ['X_KEY']='VALUE'": f"os.environ['X_KEY']={HIDDEN}",
            'os.environ["X_KEY"] = "VALUE"': f'os.environ["X_KEY"] = {HIDDEN}',
            "os.environ.setdefault('X_KEY', 'VALUE')": f"os.environ.setdefault('X_KEY', {HIDDEN})",
            "os.putenv('X_KEY', b'VALUE')": f"os.putenv('X_KEY', {HIDDEN})",
            "token = b'VALUE'": f"token = {HIDDEN}",
            'token = """VALUE"""': f"token = {HIDDEN}",
            "token: str = 'VALUE'": f"token: str = {HIDDEN}",
            "if token == 'VALUE'": f"if token == {HIDDEN}",
            "(token := 'VALUE')": f"(token := {HIDDEN})",
            "{'token' => 'VALUE'}": f"{{'token' => {HIDDEN}}}",
            "password += 'VALUE'": f"password += {HIDDEN}",
            "key = SecretStr('VALUE')": f"key = {HIDDEN})",
        }.items()
    },
    "one that is cut off": ([f"x token='a {SECRET}"], [f"x token={HIDDEN}"]),
    "known by its form": (["login", f"hf_{SECRET * 2}"], ["login", f"hf_{HIDDEN}"]),
}  # fmt: skip
PLAIN = [
    ["vllm", "serve", "org/model", "--max-num-batched-tokens", "8k", "--tokenizer", "org/tokenizer", "--port", "8000"],
    ["--max-tokens=4096", "--long-prefill-token-threshold", "1_024", "--tokenizer-mode", "auto"],
    ["--kv-transfer-config", '{"kv_connector":"LMCacheMPConnector", "max_tokens": 5}'],
    ["--config", '{"token": null, "password": false, "api_key": [true, null]}'],
    ["python", "-c", "from x import y; print(y(7))"],
    [
        "vllm",
        "serve",
        "-pp",
        "2",
        "-p",
        "8000",
        "-p8000",
        "-p80:80/tcp",
        "-p127.0.0.1:80:80",
        "-port=80",
        "-path",
        "a",
        "-prefix",
    ],
    [
        "mkdir",
        "-p",
        "/a/b1",
        "./c1",
        "cc -pthread -pipe x.c",
        "pytest -p no:x",
        "--pin-memory",
        "x.pinned=1",
        "spin=2",
        "http://h/hooked",
    ],
    ["docker", "run", "-u", "1000:1000", "docker run --user 0:0 x", "python -u -c 'x: y'", "git -u http://host/x"],
    [
        "image",
        "repository/name:v1@sha256:abc",
        "git@host:owner/name",
        "http://h:80/a@b",
        "a: b@c",
        "--x: y",
        "-----BEGIN CERTIFICATE-----",
    ],
    ["--sha256", "abc", "--served-model-name", "name:1", "--h11-max-header-count", "256", "x: y", "basic", "model2"],
    ["--ssl-keyfile", "/etc/k.pem", "http://127.0.0.1:8000/v1?x=1", "-tp", "2", "", "-", "--"],
]


@pytest.mark.parametrize("case", LINES)
def test_what_is_shown(case: str) -> None:
    given, shown = LINES[case]
    assert SECRET in " ".join(given) or case in ("a flag without one", "JSON with a number")
    assert without_secrets(given) == shown


@pytest.mark.parametrize("line", PLAIN, ids=lambda line: line[0])
def test_what_is_no_secret_is_shown_as_it_is(line: list[str]) -> None:
    assert without_secrets(line) == line


LONG = [
    "a",
    "aB9_",
    "a.",
    "-a",
    '"',
    chr(92),
    "a=",
    "a:",
    "://a",
    "eyJ-",
    "--key a ",
    "bearer ",
    "-u",
    "-u ",
    "-u a",
    "-u'",
    "--key ",
    "--key 'a', ",
    "a:b,",
    "a:@",
    "-----BEGIN PRIVATE KEY-----",
    "-----BEGIN ",
    *(
        "://hook",
        "://a/hook",
        "hook",
        "-p",
        "-p ",
        "-pa1",
        "sshpass ",
        "sshpass -p ",
        "mysql",
        "mysqlmysql-p",
        "login -p'",
    ),
    *("key='", 'key="""', f"key={3 * chr(39)}a", "'key',", "'key']", "key:=", "key:str", "key=a'", "bot12345:"),
]


def test_a_long_word_is_not_looked_at_again_and_again() -> None:
    """One of 128 KB, as a program or a file in base64 is, took minutes, in which the engine waited."""
    code = f"""if True:
    from vllm_livepatch.sitecustomize.redaction import sentence, without_secrets
    for word in {LONG!r}:
        text = word * (100_000 // len(word))
        assert len(without_secrets([text])) == 1 and sentence(text)
    """
    done = finish([sys.executable, "-c", code], os.environ)
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize("text", ["[" * 900 + f'"{SECRET}"' + "]" * 900, '{"a":' * 900 + "1" + "}" * 900])
def test_what_is_too_deep_is_not_shown(text: str) -> None:
    assert without_secrets([text]) == [HIDDEN]


NAMES = st.sampled_from(
    ["api-key", "API_KEY", "apiKey", "hf-token", "HF_TOKEN", "secret", "client_secret", "db-password", "awsSecretAccessKey"]
)  # fmt: skip
# As `secrets` and password stores make them.
VALUES = st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", min_size=20, max_size=40).map(
    "Z".__add__
)
WAYS = [
    lambda name, value: [f"--{name}", value],
    lambda name, value: [f"--{name}", value, value],
    lambda name, value: [f"--{name}={value}"],
    lambda name, value: [f"{name}={value}"],
    lambda name, value: ["--x", json.dumps({"a": [{name: value}]})],
    lambda name, value: ["--x=" + json.dumps({name: {"b": value}})],
    lambda name, value: ["-c", f"f({name.replace('-', '_')}='{value}')"],
    lambda name, value: [f"http://host/?{name}={value}"],
    lambda name, value: [f"http://{name}:{value}@host/"],
]  # fmt: skip


@given(NAMES, VALUES, st.sampled_from(WAYS), st.lists(st.sampled_from(["--port", "80", "a=b", "--flag"]), max_size=3))
def test_no_secret_gets_through_in_any_of_these_ways(name, value, way, around) -> None:  # type: ignore[no-untyped-def]
    assert value not in " ".join(without_secrets([*around, *way(name, value), *around]))


@given(st.lists(st.text(max_size=40), max_size=6))
def test_any_command_line_is_shown_with_as_many_words(line: list[str]) -> None:
    assert len(without_secrets(line)) == len(line)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--env", f'[{{"name": "HF_TOKEN", "value": "{SECRET}"}}]'], '[{"name": "HF_TOKEN", "value": "***"}]'),
        (
            ["--env", f'[{{"key": "api_key", "value": {{"a": "{SECRET}"}}}}]'],
            '[{"key": "api_key", "value": {"a": "***"}}]',
        ),
        (["--env", f'[["HF_TOKEN", "{SECRET}"], ["PORT", "80"]]'], '[["HF_TOKEN", "***"], ["PORT", "80"]]'),
        (["--env", '[{"name": "PORT", "value": "80"}]'], '[{"name": "PORT", "value": "80"}]'),
        (["--sk", SECRET], HIDDEN),
        ([f"--header=Authorization=Token {SECRET}"], f"--header=Authorization={HIDDEN}"),
    ],
)
def test_a_secret_beside_its_name(given: list[str], shown: str) -> None:
    assert without_secrets(given)[-1] == shown


@pytest.mark.parametrize("name", ["--tokenizer", "model", "--kv-transfer-config", "PATH", "--ssl-keyfile", "KEYBOARD"])
def test_names_that_are_none(name: str) -> None:
    assert not is_secret(name)


# What an error may quote, and what is to be read of it.
SENTENCES = {
    f"ConnectionError: {URL} refused": f"ConnectionError: postgres://{HIDDEN}@db:5432/name refused",
    f"got HF_TOKEN='{SECRET}' here": f"got HF_TOKEN={HIDDEN} here",
    f"{{'api_key': '{SECRET}', 'port': 80}}": f"{{'api_key': {HIDDEN}, 'port': 80}}",
    f"vllm serve --api-key {SECRET} --port 80": f"vllm serve --api-key {HIDDEN} --port 80",
    f"vllm serve --quiet --api-key {SECRET}": f"vllm serve --quiet --api-key {HIDDEN}",
    f"vllm serve --api-key {SECRET} {SECRET}2 --api-key {SECRET}3 --port 80": f"vllm serve --api-key {HIDDEN} {HIDDEN} --api-key {HIDDEN} --port 80",
    f"Command '['vllm', '--api-key', '{SECRET}', '{SECRET}2', '--port', '80']' returned 1": f"Command '['vllm', '--api-key', {HIDDEN}, {HIDDEN}, '--port', '80']' returned 1",
    # A list inside of a text that is quoted in its turn.
    f"{{'argv': '[\\'vllm\\', \\'--api-key\\', \\'{SECRET}\\', \\'{SECRET}2\\', \\'--port\\']'}}": (
        f"{{'argv': '[\\'vllm\\', \\'--api-key\\', {HIDDEN}, {HIDDEN}, \\'--port\\']'}}"
    ),
    f"['curl', '-u', 'me:{SECRET}', 'http://h']: 401": f"['curl', '-u', 'me:{HIDDEN}', 'http://h']: 401",
    f"curl --user me:{SECRET}: 401": f"curl --user me:{HIDDEN} 401",
    f"docker run -e HF_TOKEN={SECRET} -e A=b": f"docker run -e HF_TOKEN={HIDDEN} -e A=b",
    f"ValueError('--api-key {SECRET}')": f"ValueError('--api-key {HIDDEN}')",
    f"os.environ['X_KEY']='{SECRET}' in line 1": f"os.environ['X_KEY']={HIDDEN} in line 1",
    f"KeyError: os.environ.get('X_KEY', '{SECRET}')": f"KeyError: os.environ.get('X_KEY', {HIDDEN})",
    f"POST https://hooks.slack.com/services/T0/{SECRET}: 404": f"POST https://hooks.slack.com/{HIDDEN} 404",
    f"Command '['sshpass', '-p', '{SECRET}', 'ssh']' returned 1": f"Command '['sshpass', '-p', {HIDDEN}, 'ssh']' returned 1",
    f"mysqldump -p{SECRET} failed": f"mysqldump -p{HIDDEN} failed",
    f"401 for Bearer {SECRET}": f"401 for Bearer {HIDDEN}",
    f"ProxyError(user:{SECRET}@host:80)": f"ProxyError(user:{HIDDEN}@host:80)",
    f"no model at hf_{SECRET * 2}": f"no model at hf_{HIDDEN}",
    f"401: X-Api-Key: {SECRET} in it": f"401: X-Api-Key: {HIDDEN} in it",
    f"401: Authorization: Token {SECRET}": f"401: Authorization: {HIDDEN}",
    f"{{'Authorization': 'Token {SECRET}'}}": f"{{'Authorization': {HIDDEN}}}",
    f"YAML has access_token: {SECRET}": f"YAML has access_token: {HIDDEN}",
}


@pytest.mark.parametrize("text", SENTENCES)
def test_what_is_shown_of_a_sentence(text: str) -> None:
    assert SECRET in text
    assert sentence(text) == SENTENCES[text]


@pytest.mark.parametrize(
    "text",
    [
        "compile-cache-key: forced onto code that was never verified: vllm.envs:compile_factors",
        "off by default, LIVEPATCH_COMPILE_CACHE_KEY=on asks for it",
        "LIVEPATCH_CHUNKED_LMCACHE_LOAD_MAX_TOKENS='8192' is not a whole number of at least 1",
        "lmcache.utils:CacheEngineKey.to_string was replaced later by other.key: a function",
        "TypeError: expected 3 tokens, got 4 (wrappers.py, line 12)",
        "vllm.a:Scheduler.next_token: TypeError: it is None",
        "vllm.a:make_key: TypeError: it is None",
    ],
)
def test_what_is_no_secret_of_a_sentence_is_shown(text: str) -> None:
    assert sentence(text) == text


def test_no_secret_reaches_a_log_line_or_a_report(sandbox: Sandbox) -> None:
    """A patch's own error quotes what it met."""
    raises = f"""
    def wrappers(livepatch):
        def around(wrapped, instance, args, kwargs):
            livepatch.say("met", "redis://me:{SECRET}@host")
            raise ValueError("token='{SECRET}'")

        return dict.fromkeys(TARGETS, around)
    """
    sandbox.patch(code=raises)
    sandbox.generate()
    for form in ("text", "json"):
        done = sandbox.python(f"{USE_STEP}", LIVEPATCH_LOG=form)
        assert (done.code, done.out != PATCHED) == (0, True)
        assert "ValueError" in done.err
        assert "redis://" in done.err
        assert SECRET not in done.err
    (one, two) = (file.read_text("ascii") for file in sandbox.state.iterdir())
    assert "ValueError" in one
    assert SECRET not in one + two


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--api-key", SECRET, "-O3"], ["--api-key", HIDDEN, "-O3"]),
        (["-u", f"me:{SECRET}"], ["-u", f"me:{HIDDEN}"]),
        (["-u", "me:1234"], ["-u", f"me:{HIDDEN}"]),
        (["-u", "1234:me"], ["-u", f"1234:{HIDDEN}"]),
        (["-u", "http://host/path"], ["-u", "http://host/path"]),
        (["-u", "me"], ["-u", "me"]),
        ([f"a=b=c=d=TOKEN={SECRET} {SECRET}2"], [f"a=b=c=d=TOKEN={HIDDEN}"]),
    ],
    ids=[
        "a flag behind a secret",
        "a login",
        "a password of digits",
        "a user of digits",
        "a URL is no login",
        "a user alone",
        "four names in front",
    ],
)
def test_more_command_lines(arguments: list[str], shown: list[str]) -> None:
    assert without_secrets(arguments) == shown


def test_names_without_an_end_in_front_of_a_value() -> None:
    """A command line can hold a megabyte: no stack is as deep as that."""
    (shown,) = without_secrets(["a=" * 100_000 + f"TOKEN={SECRET}"])
    assert SECRET not in shown


@pytest.mark.parametrize("piece", [" ", "\n", "-a.", "(-u", "`-u", "(--user=(-u", "--user=", "a =", "x"])
@pytest.mark.parametrize("begin", ["request ", "basic", "--api-key", "key"])
def test_what_a_client_chooses_takes_no_time(begin: str, piece: str) -> None:
    """A client names its request; 20 kB of blanks once took 10 s, in which the engine served nobody."""
    text = begin + piece * (20_000 // len(piece))
    before = time.process_time()
    sentence(text)
    without_secrets([text])
    assert time.process_time() - before < 2


def test_a_long_sentence_ends_between_two_words() -> None:
    """What follows in the same word may be by what a secret is known."""
    begin = "refused: " + "of " * 5400
    shown = sentence(f"{begin}https://user:{SECRET * 20}@host/ is unknown")
    assert shown.startswith("refused: of")
    assert shown.endswith(" characters more)")
    assert SECRET not in shown
    assert len(shown) < 16500
    whole = "refused: " + "of " * 5000
    assert sentence(whole) == whole


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"API_KEY={SECRET} is refused", f"API_KEY={HIDDEN} is refused"),
        (f"token= ), key={SECRET}", f"token= ), key={HIDDEN}"),
        ("(run it with --api-key )", "(run it with --api-key )"),
        (f"--api-key ) --token {SECRET}", f"--api-key ) --token {HIDDEN}"),
    ],
    ids=["at the beginning", "behind a name without a value", "a flag without a value", "a flag behind such a one"],
)
def test_more_sentences(text: str, shown: str) -> None:
    assert sentence(text) == shown

"""A command line, or a sentence, without its secrets. Pure. What might be one is hidden: showing less hurts nobody."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

HIDDEN = "***"

_WORDS = frozenset(
    (
        *("auth", "authorization", "bearer", "cookie", "cred", "creds", "credential", "credentials", "headers"),
        *(
            "dsn",
            "honeycomb",
            "jwt",
            "mfa",
            "oauth",
            "otp",
            "pass",
            "passcode",
            "pat",
            "psk",
            "pw",
            "pwd",
            "sas",
            "totp",
        ),
        *("ak", "sk", "webhook", "webhooks"),  # an object store's access key and secret key
    )
)
_ENDS = (
    "token",
    "sig",
    "signature",
    "tokens",
    "secret",
    "secrets",
    "password",
    "passwords",
    "passwd",
    "passphrase",
    "key",
    "keys",
)
_LAST = frozenset(("pin", "pins", "puk"))  # where no other word follows, as in --pin-memory
_NUMBER = re.compile(r"[\d.,_]+[kKmMgG]?(i?[bB])?")
_FLAG = re.compile(r"--?[a-z][a-z0-9_.-]*(=.*)?", re.DOTALL)  # a value that begins with - seldom is all small letters
# The next words are its value, as where nothing quotes a header.
_BEFORE = re.compile(r"(?:-[\w.-]+=)?[A-Za-z_][\w.-]*:(?:bearer|basic)?|bearer", re.IGNORECASE)
_WHOLE = re.compile(r"(-*[A-Za-z_][\w.-]*\s*[:=]\s*)(.+)", re.DOTALL)  # NAME=value, --name=value, Header: value
# No pattern may take more than one look at a place, or a bounded number: a command line can hold a megabyte, clients
# choose what a sentence quotes, and the engine waits here. So two runs of blanks never meet, and a name that may begin
# inside of another has a longest length. Quotes inside of quotes have a backslash in front.
_QUOTED = r"""(?P<quote>\\{0,3}["'])?(?<![\w.-])(?P<name>[\w.-]+)"""
# Between a name and its value, as programs have it: environ['NAME'] = value, NAME: str = value, NAME := value,
# NAME == value, NAME => value.
_SIGN = r"(?::\s*(?:str|bytes|Any|SecretStr)(?:\s*\|\s*None)?\s*=|[+!|?]?[:=]{1,3}>?)"
# A name in quotes may also be the first of two arguments: setdefault('NAME', 'value').
_NAME = _QUOTED + r"(?(quote)(?P=quote)\s*(?:(?:\]\s*)?%s|,(?=\s*[bBfFrRuU]{0,2}\\{0,3}[\"']))|\s*(?:\]\s*)?%s)\s*"
_PAIR = re.compile(_NAME % (_SIGN, _SIGN))
# In a sentence a colon may be one: only after a name in quotes it is what a dictionary shows, and after one that no
# sentence has, such as X-Api-Key, what a header or YAML shows.
_NAMED = re.compile(_NAME % (_SIGN, r"(?:[+!|?]?:?={1,2}>?|(?:(?<=_key|-Key|oken|cret|word)|(?<=api-key)):(?=\s))"))
_NO_FLAG = r"""(?!\\{0,3}["']?--?[a-z][a-z0-9_.-]*(?:[=\s"'\\]|$))"""
# Between the words of a list, as `repr` or JSON shows it, are quotes and a comma.
_FLAGGED = re.compile(r"""(?<![\w-])--?(?P<name>[A-Za-z][\w.-]{0,100})(?:\\{0,3}["'],)?\s+""" + _NO_FLAG)
_MORE = re.compile(r"\s+" + _NO_FLAG)
_MORE_QUOTED = re.compile(r",?\s+" + _NO_FLAG)
# One in quotes, which may be cut off, or a word; and what follows in one piece, as of b'...', SecretStr('...').
_THREE = r"""\\{0,3}"{3}(?:[^"]|"(?!""))*(?:"{3}|\Z)|\\{0,3}'{3}(?:[^']|'(?!''))*(?:'{3}|\Z)"""
_QUOTES = _THREE + r"""|\\{0,3}"[^"]*(?:"|\Z)|\\{0,3}'[^']*(?:'|\Z)"""
_WORD = r"""[^\s,;&}\])"']"""
_VALUE = re.compile(rf"""(?:{_QUOTES}|{_WORD})(?:{_WORD}|"[^"\n]{{0,999}}"|'[^'\n]{{0,999}}')*""")
_USER = re.compile(r"(://)[^/\s\"']+(@)")  # to the last one: a password may hold another
# The same where no scheme is in front, as a proxy's may be. An image's digest comes behind such a sign, too.
_HOST = re.compile(r"""(?<![^\s"'`=,;(\[{])([^\s"'`=,;(\[{:@/]{0,100}:)(?!//)[^\s"']{1,200}@(?=[\w\[])(?!sha256:)""")
# Whatever scheme there is: `Authorization: Token ...`. The two that are known stay to be seen.
_HEADER = re.compile(
    r"""(authorization\\{0,3}["']?\s*[:=]\s*\\{0,3}["']?)(?!bearer|basic|\*\*\*)(?:[a-z-]{1,20}[^\S\n]+)?[^\s"'\\]+""",
    re.IGNORECASE,
)
_SCHEME = re.compile(r"\b(bearer|basic)(\s+)[^\s\"']+", re.IGNORECASE)
# Slack's, Discord's, Teams' and others': who has such an address may write there.
_HOOK = re.compile(r"""(://[^\s"'?#]{0,200}?hook[^\s/"'?#]{0,100}[/?])[^\s"']+""", re.IGNORECASE)
# Programs that take a password behind a flag of one letter.
_PASSWORD_FLAGS = {
    "p": r"sshpass|mysql[a-z_-]{0,20}|mariadb[a-z_-]{0,20}|7z[ar]?|mongo[a-z]{0,9}|cqlsh|influx|login",
    "P": r"zip|unzip|sqlcmd|bcp|tsql|mosquitto_[a-z]{1,4}|ipmitool",
    "a": r"(?:redis|valkey|keydb)-cli",
    "w": r"ldap[a-z]{1,9}",
}
_PROGRAMS = {letter: re.compile(programs) for letter, programs in _PASSWORD_FLAGS.items()}
_PASSWORDS = re.compile(
    "(?<![\\w-])((?:"
    + "|".join(
        rf"(?:{programs})(?![\w-])[^\n;|&]{{0,200}}?(?<![\w-])-{letter}(?![\w-]*=)"
        for letter, programs in _PASSWORD_FLAGS.items()
    )
    + r""")(?:\\{0,3}["'],)?\s*)"""
    + _VALUE.pattern
)
# The letter is the same for a port, and begins flags that are words.
_NO_PASSWORD = (
    r"(?:p|cp|ort|ath|refix|rofile|rint|ipe|id|db|g|y|rompt|roxy|arallel|recision|latform|ackage|roject|ool|thread|edantic)"
    r"s?(?:-[a-z-]{1,40})?(?:[=\s\"'\\,;)\]]|$)|[\d.:\[\]/-]+(?:tcp|udp)?(?:[\s\"'\\,;)\]]|$)"
)
_SHORT = re.compile(rf"""(?<![^\s"'`(\[,])(-p)(?!{_NO_PASSWORD})[^\s"'\\,;)\]]+""")
_LIKE_PASSWORD = re.compile(r"(?![/.~])(?![\d.:\[\]/-]+(?:tcp|udp)?$)(?=.*\d)(?=.*[A-Za-z]).+")
# curl's and others'. What is a number twice is a user and a group, as docker's -u has them.
_LOGIN_WORD = r"(?:-[A-Za-z]{0,8}[uU]|--(?:proxy-)?user)"
_LOGIN_FLAG = re.compile(_LOGIN_WORD)
_LOGIN = re.compile(
    rf"""(?<![^\s"'`(])((?:{_LOGIN_WORD}(?:\\{{0,3}}["'],)?[=\s]+|-[uU])\\{{0,3}}["']?(?!\d+:\d+(?:[\s"'\\]|$))"""
    r"""[^\s:"'\\]{0,200}:)(?!//)[^\s"'\\]+"""
)
# Hugging Face, OpenAI and the like, GitHub, GitLab, Slack, AWS, Google, NVIDIA, Groq, DigitalOcean, Stripe, Docker,
# npm, PyPI, Vault, Grafana, Replicate, Perplexity, xAI, Telegram; JSON web tokens.
_KNOWN = re.compile(
    r"\b(hf_|api_org_|sk-|gh[oprsu]_|github_pat_|glpat-|xox[abeoprs]-|xapp-|A[KS]IA|AIza|ya29\.|nvapi-|gsk_|do[opr]_v1_|"
    r"bot\d{5,12}:|[rs]k_(?:live|test)_|dckr_pat_|npm_|pypi-|hv[bs]\.|gl(?:sa|c)_|r8_|pplx-|xai-|eyJ[\w-]{8,999}\.)[\w./+=-]{12,}",
    re.ASCII,
)
_PEM = re.compile(
    r"(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY).*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|\Z)", re.DOTALL
)
LONGEST = 16384
"""Characters of a sentence."""
_DEEP = 4  # names in front of a value, as in --env=FOO_TOKEN=value
_SWITCHES = frozenset(("auto", "on", "off", "force", "strict", "none", "true", "false"))


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """The arguments, each in its place, with `***` for what a name says is secret, or a form that is known."""
    shown: list[str] = []
    flag = ""  # the secret one whose values these are: vLLM's --api-key takes several
    first = login = False
    takes: set[str] = set()  # flags behind which one of these programs has a password
    before = ""
    for argument in arguments:
        program = argument.rpartition("/")[2]
        takes |= {f"-{letter}" for letter, named in _PROGRAMS.items() if named.fullmatch(program)}
        last, before = before, argument
        if last in takes or (last == "-p" and _LIKE_PASSWORD.match(argument) is not None):
            shown.append(HIDDEN)
            continue
        if argument[:2] in takes and len(argument) > 2:
            shown.append(f"{argument[:2]}{HIDDEN}")
            continue
        was_login, login = login, _LOGIN_FLAG.fullmatch(argument) is not None
        is_flag = argument.startswith("-") and (not first or _FLAG.fullmatch(argument) is not None)
        if flag and not is_flag:
            shown.append(argument if _harmless(flag, argument) else HIDDEN)
            first = False
            continue
        names = (is_flag and "=" not in argument) or _BEFORE.fullmatch(argument) is not None
        flag = argument if names and is_secret(argument) else ""
        first = bool(flag)
        shown.append(_login(argument) if was_login else _text(argument))
    return shown


def sentence(text: str) -> str:
    """A log line, or a report's sentence: errors in it may quote any text, of which a client may choose the length."""
    return _without(_NAMED, _without_flagged(_forms(_shortened(text))), _SWITCHES)


def _shortened(text: str) -> str:
    """At most LONGEST characters, cut between two words: by what follows in its word many a secret is known."""
    if len(text) <= LONGEST:
        return text
    begin = text[:LONGEST].rpartition(" ")[0]
    return f"{begin} ... ({len(text) - len(begin)} characters more)"


def is_secret(name: str) -> bool:
    """Whether what has this name (of a flag, a variable, a key) may be a secret."""
    return bool(_secret_words(name))


def _secret_words(name: str) -> list[str]:
    parts = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    parts = [part.rstrip("0123456789") for part in parts]  # the second of them is one, too
    found = [part for part in parts if part in _WORDS or part.endswith(_ENDS)]
    return found or [part for part in parts[-1:] if part in _LAST]


def _harmless(name: str, value: str) -> bool:
    """A number of tokens, as in --max-num-batched-tokens 8k; a word that holds nothing."""
    counts = all(word in ("token", "tokens") for word in _secret_words(name))
    return not value or (counts and _NUMBER.fullmatch(value) is not None)


def _text(text: str, deep: int = _DEEP) -> str:
    """One argument, or a string inside of one."""
    value = _json(text)
    if value is not None:
        try:
            hidden = _inside(value)
            return text if hidden == value else json.dumps(hidden)
        except RecursionError:  # as deep as nothing is
            return HIDDEN
    whole = _WHOLE.fullmatch(text)
    if whole is not None:
        name, rest = whole.groups()
        if is_secret(name):
            return text if _harmless(name, rest) else f"{name}{HIDDEN}"
        if deep and _LOGIN_FLAG.fullmatch(name.rstrip("= ")):
            return f"{name}{_login(rest, deep - 1)}"
        if deep and (rest.startswith(("{", "[")) or _WHOLE.fullmatch(rest) is not None):
            return f"{name}{_text(rest, deep - 1)}"
    return _without(_PAIR, _without_flagged(_forms(text)))


def _login(text: str, deep: int = _DEEP) -> str:
    """`user:password`, the word behind a flag that wants one."""
    user, _, password = text.partition(":")
    if not password or password.startswith("//") or (user.isdigit() and password.isdigit()):
        return _text(text, deep)
    return f"{user}:{HIDDEN}"


def _without_flagged(text: str) -> str:
    """Without the words behind each secret flag, to the next flag: vLLM's --api-key takes several."""
    parts: list[str] = []
    end = 0
    for found in _FLAGGED.finditer(text):
        place: re.Match[str] | None = found
        while place is not None and place.start() >= end and is_secret(found["name"]):
            value = _VALUE.match(text, place.end())
            if value is None or _harmless(found["name"], value[0].strip("\\\"'")):
                break
            parts += [text[end : value.start()], HIDDEN]
            end = value.end()
            place = (_MORE_QUOTED if value[0][-1] in "\"'" else _MORE).match(text, end)
    return "".join((*parts, text[end:]))


def _without(names: re.Pattern[str], text: str, shown: Collection[str] = ()) -> str:
    """Without the value behind each secret name, but for the words that are shown. Any place may begin a name, also
    the value of one that is not secret.
    """
    parts: list[str] = []
    end = 0
    for found in names.finditer(text):
        if found.start() < end or not is_secret(found["name"]):
            continue
        value = _VALUE.match(text, found.end())
        if value is None or (shown and _ends_a_place(text, found)):
            continue
        word = value[0].strip("\\\"'")
        if word.lower() not in shown and not _harmless(found["name"], word):
            parts += [text[end : value.start()], HIDDEN]
            end = value.end()
    return "".join((*parts, text[end:]))


def _ends_a_place(text: str, found: re.Match[str]) -> bool:
    """Whether a name with a colon alone is the end of where something went wrong, as in module:Class.next_token: ..."""
    lone = text[found.end("name") : found.end()].strip() == ":"
    return lone and ("." in found["name"] or text[found.start() - 1 : found.start()] == ":")


def _forms(text: str) -> str:
    """Without those that are known by their form."""
    text = _PEM.sub(rf"\1{HIDDEN}", text)
    text = _HOOK.sub(rf"\1{HIDDEN}", text)
    text = _PASSWORDS.sub(rf"\1{HIDDEN}", text)
    text = _SHORT.sub(rf"\1{HIDDEN}", text)
    text = _USER.sub(rf"\1{HIDDEN}\2", text)
    text = _HOST.sub(rf"\1{HIDDEN}@", text)
    text = _LOGIN.sub(rf"\1{HIDDEN}", text)
    text = _HEADER.sub(rf"\1{HIDDEN}", text)
    text = _SCHEME.sub(rf"\1\2{HIDDEN}", text)
    return _KNOWN.sub(rf"\1{HIDDEN}", text)


def _json(text: str) -> Any:
    """An object or a list, None for any other text."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _inside(value: Any, secret: str = "") -> Any:
    """`secret` is the name that makes it one."""
    if isinstance(value, dict):
        named = [name for name in (value.get("name"), value.get("key")) if isinstance(name, str) and is_secret(name)]
        secret = secret or "".join(named[:1] if "value" in value else [])
        return {
            key: part if part in named else _inside(part, key if is_secret(key) else secret)
            for key, part in value.items()
        }
    if isinstance(value, list):
        if (
            len(value) == 2
            and isinstance(value[0], str)
            and re.fullmatch(r"\w[\w.]*", value[0])
            and is_secret(value[0])
        ):
            return [value[0], _inside(value[1], value[0])]
        if not secret and value and all(isinstance(part, str) for part in value):
            return without_secrets(value)  # a command line
        return [_inside(part, secret) for part in value]
    if value is None or isinstance(value, bool):
        return value
    if secret:
        return value if _harmless(secret, str(value)) else HIDDEN
    return _text(value) if isinstance(value, str) else value

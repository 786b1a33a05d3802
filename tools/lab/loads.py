"""What the lab's load may be: `--load NAME[:OPTION=VALUE,...]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.lab import model

Sessions = tuple[tuple[str, ...], ...]
"""Visits to the server; of each, what the user says in turn."""

_LEAST = {"rate": 0.01, "timeout": 1.0}
_MOST = {"share": 1, "stops": 1}
_CHOICES = {"stream": ("yes", "no", "half"), "api": ("completions", "chat", "half")}


@dataclass(frozen=True)
class Visits:
    """What the loads of the lab's own clients have in common. Times in seconds."""

    output: int = 16
    """Tokens in an answer."""
    share: float = 0.6
    """Of requests that are given up, where clients hang up; the moment is drawn from 0 to ``within``."""
    within: float = 0.4
    calm: float = 0.0
    """The first seconds, in which nobody hangs up (to the end of a wave). They come on top of the load's."""
    timeout: float = 60.0
    """How long an answer is waited for."""
    stops: float = 0.0
    """Of requests that end with the first token of their answer, as a stop token. A prefill engine ends them by it."""
    stream: str = "yes"
    """Whether tokens are asked for as they come, and timed: `yes`, `no`, or by `half` of the clients."""
    api: str = "completions"
    """`completions`, `chat`, or each by `half` of the clients."""


@dataclass(frozen=True)
class Storm(Visits):
    """Clients ask for stored prompts, drawn anew each time, in waves."""

    prompts: int = 12
    # 16 chunks of LMCache's and a rest, which is always computed.
    tokens: int = 1052
    """In a prompt."""
    requests: int = 2
    """Of each client in a wave."""

    def sessions(self, seed: int) -> Sessions:
        return tuple((prompt,) for prompt in model.prompts(self.prompts, self.tokens, seed))

    def longest(self) -> int:
        return self.tokens + self.output


@dataclass(frozen=True)
class Conversations(Visits):
    """Conversations with a common beginning, each of which comes back, longer, in every wave: a turn a wave."""

    conversations: int = 12
    turns: int = 5
    prefix: int = 512
    """Tokens that all conversations begin with."""
    tokens: int = 100
    """What a user says in a turn."""
    requests: int = 1
    """Turns of each client's in a wave."""

    def sessions(self, seed: int) -> Sessions:
        (common,) = model.prompts(1, self.prefix, f"{seed}/prefix")
        drawn = iter(model.prompts(self.conversations * self.turns, self.tokens, f"{seed}/turns"))
        first = f"{common} "
        return tuple(
            tuple((first if turn == 0 else "") + next(drawn) for turn in range(self.turns))
            for _ in range(self.conversations)
        )

    def longest(self) -> int:
        return self.prefix + self.turns * (self.tokens + self.output)


@dataclass(frozen=True)
class Bench:
    """Upstream's own `vllm bench serve`, random prompts at a rate."""

    rate: float = 2.0
    """Requests a second."""
    num: int = 0
    """Requests in all; 0: as many as fill the load's seconds."""
    input: int = 512
    output: int = 64
    api: str = "completions"

    def longest(self) -> int:
        return self.input + self.output


Spec = Storm | Conversations | Bench
KINDS: Mapping[str, Callable[..., Spec]] = {"storm": Storm, "conversations": Conversations, "bench": Bench}


def parse(text: str) -> Spec:
    """Raises UserError, in one line, for what is no load."""
    name, _, rest = text.partition(":")
    if name not in KINDS:
        raise UserError(f"--load {text}: there are {', '.join(KINDS)}")
    kind = KINDS[name]
    defaults = asdict(kind())
    given: dict[str, Any] = {}
    for word in filter(None, rest.split(",")):
        option, equals, value = word.partition("=")
        if not equals or option not in defaults:
            raise UserError(f"--load {text}: {word!r} is no option of {name}; there are {', '.join(defaults)}")
        given[option] = _value(text, name, option, value, defaults[option])
    spec = kind(**given)
    if spec.longest() > model.CONTEXT:
        raise UserError(f"--load {text}: {spec.longest()} tokens are more than the model's {model.CONTEXT}")
    return spec


def described(spec: Spec) -> dict[str, Any]:
    """The load by its name and all of its options, for JSON."""
    name = next(name for name, kind in KINDS.items() if type(spec) is kind)
    return {"name": name, **{entry.name: getattr(spec, entry.name) for entry in fields(spec)}}


def _value(text: str, name: str, option: str, value: str, default: Any) -> Any:
    choices = _CHOICES.get(option, ())
    if isinstance(default, str):
        # Upstream's benchmark has one interface a run.
        allowed = [choice for choice in choices if name != "bench" or choice != "half"]
        if value not in allowed:
            raise UserError(f"--load {text}: {option} is one of {', '.join(allowed)}")
        return value
    whole = isinstance(default, int)
    least, most = (1 if whole else _LEAST.get(option, 0.0)), _MOST.get(option, 1_000_000)
    try:
        number = type(default)(value)
    except ValueError:
        number = None
    if number is None or not least <= number <= most:
        kind = "whole number" if whole else "number"
        raise UserError(f"--load {text}: {option} is a {kind} from {least} to {most}")
    return number

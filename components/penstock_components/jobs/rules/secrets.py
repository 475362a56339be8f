"""Secrets in a job's environment and arguments, where everyone who may read the job reads them.

By the name under which a value stands, or by the shape that a provider gives its keys. No value is ever told.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from penstock_components.jobs.findings import Finding
from penstock_components.jobs.messages import CustomJobSpec
from penstock_components.jobs.rules.contents import Program, is_placeholder, programs
from penstock_components.jobs.rules.context import Context

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS = frozenset(
    {"TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS", "APIKEY"}
)
_SECRET_PAIRS = frozenset(
    {("API", "KEY"), ("PRIVATE", "KEY"), ("ACCESS", "KEY"), ("SECRET", "KEY"), ("WANDB", "KEY")}
)
_ABOUT_A_SECRET = frozenset(
    {
        "URI", "URL", "PATH", "FILE", "FILENAME", "NAME", "VERSION", "DIR", "FOLDER", "LENGTH", "LEN", "COUNT", "SIZE",
        "TYPE", "ID", "IDS", "INDEX", "LIMIT", "BUDGET", "RESOURCE", "REF", "TTL", "EXPIRY", "DIM", "WEIGHT", "LOSS", "PROBABILITY",
    }
)  # fmt: skip
"""Last words of names that tell where or what a secret is, or how many tokens of a text."""
_TOKENS_OF_TEXT = frozenset(
    {"BOS", "EOS", "PAD", "UNK", "CLS", "SEP", "MASK", "SPECIAL", "STOP", "IMAGE", "AUDIO", "END", "START", "PER", "FIRST", "LAST"}
)  # fmt: skip
"""Words before TOKEN that speak of a text's tokens."""
_SHAPES = {
    "a Google API key": r"AIza[0-9A-Za-z_-]{35}",
    "a Google OAuth token": r"ya29\.[\w-]{20,}",
    "a Google OAuth client secret": r"GOCSPX-[\w-]{20,}",
    "a GitHub token": r"gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{22,}",
    "a GitLab token": r"glpat-[\w-]{20,}",
    "a Slack token": r"xox[abeoprs]-[\w-]{10,}",
    "a Hugging Face token": r"hf_[A-Za-z0-9]{30,}",
    "an AWS access key": r"(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Za-z])",
    "an API key (sk-...)": r"sk-[\w-]{32,}",
    "a private key": r"-----BEGIN (?:[A-Z]+ ){0,3}PRIVATE KEY",
    "a service account's key": r"[\"']?type[\"']?\s*:\s*[\"']service_account[\"']",
    "a JSON web token": r"eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+",
    "a password in a URL": r"[a-z][a-z0-9+.]{1,20}://[^\s/:@$]{0,80}:[^\s/:@$]{1,200}@",
}
_SHAPE = re.compile(
    "|".join(
        f"(?P<shape{index}>(?<![A-Za-z0-9_])(?:{shape}))" for index, shape in enumerate(_SHAPES.values())
    )
)
_RESOURCE = re.compile(
    r"(?://secretmanager\.googleapis\.com/)?projects/[^/\s]+/(?:locations/[^/\s]+/)?secrets/[^/\s]+(?:/versions/[^/\s]+)?"
)
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)")
_ASSIGNED = (
    re.compile(r"(?<![\w-])--?([A-Za-z][\w.-]*)[= ]([^\s;&|]+)"),
    re.compile(r"(?<![\w-])([A-Z][A-Z0-9_]*)=([^\s;&|]+)"),
    re.compile(r"[\"'](\w+)[\"']\s*:\s*[\"']([^\"']+)[\"']"),
)
"""In a line for a shell or a JSON text: options, variables, members."""


def check(spec: CustomJobSpec, _context: Context) -> Iterator[Finding]:
    """Every variable and every word of a command line that holds a secret."""
    for program in programs(spec):
        for index, variable in enumerate(program.env):
            told = told_of(variable.name, variable.value)
            if told:
                yield _finding(f"{program.path}.env[{index}]", variable.name, told, len(variable.value))
        yield from _words(program)


def told_of(name: str, value: str) -> str:
    """Why a value that stands under a name is held for a secret; empty when it is not."""
    if is_placeholder(value) or _RESOURCE.fullmatch(value.strip()):
        return ""
    shape = _shape(value)
    if shape:
        return f"has the shape of {shape}"
    return "is a secret by its name" if _is_secret_name(name) and _may_be_secret(value, name) else ""


def _words(program: Program) -> Iterator[Finding]:
    option = ""
    for path, word in program.words():
        if not word.startswith("-"):
            told, name = told_of(option, word), option
        else:
            name, _, value = word.lstrip("-").partition("=")
            told = told_of(name, value) if value else ""
        if not told and not is_placeholder(word):
            name, told = _inside(word)
        if told:
            yield _finding(path, f"--{name}" if _OPTION.fullmatch(f"--{name}") else "", told, len(word))
        match = _OPTION.fullmatch(word)
        option = match[1] if match else ""


def _inside(word: str) -> tuple[str, str]:
    """Name and reason of the first secret within a shell line or a JSON text."""
    shape = _shape(word)
    if shape:
        return "", f"holds what has the shape of {shape}"
    for form in _ASSIGNED:
        for match in form.finditer(word):
            told = told_of(match[1], match[2].strip("\"',)}]"))
            if told:
                return match[1], told
    return "", ""


def _shape(text: str) -> str:
    match = _SHAPE.search(text)
    return list(_SHAPES)[int((match.lastgroup or "shape0").removeprefix("shape"))] if match else ""


def _is_secret_name(name: str) -> bool:
    words = [word.upper() for word in _WORD.findall(name)]
    if not words or words[-1] in _ABOUT_A_SECRET:
        return False
    if any(pair in _SECRET_PAIRS for pair in itertools.pairwise(words)):
        return True
    found = [index for index, word in enumerate(words) if word in _SECRET_WORDS]
    of_text = [index for index in found if words[index] == "TOKEN" and set(words[:index]) & _TOKENS_OF_TEXT]
    return len(found) > len(of_text)


def _may_be_secret(value: str, name: str) -> bool:
    """Whether the value is no flag, no number of tokens, no path and no variable to be expanded."""
    text = value.strip().strip("\"'")
    if not text or text.lower() in ("true", "false", "none", "null", "yes", "no"):
        return False
    if text.startswith(("$", "/", "./", "gs://", "<")):
        return False
    return not (text.isdecimal() and len(text) < 8 and "TOKEN" in name.upper())


def _finding(path: str, name: str, told: str, length: int) -> Finding:
    return Finding(
        path=path,
        rule="secret",
        reason=f"{f'{name} ' if name else 'it '}{told} ({length} characters); whoever may read the job reads it.",
        fix="Store it in Secret Manager, give the secret's name in env (projects/<project>/secrets/<secret>/versions/latest) and "
        "read it when the program starts, as the job's service account; a training job has no field that does it. Replace a "
        "secret that was sent already.",
    )

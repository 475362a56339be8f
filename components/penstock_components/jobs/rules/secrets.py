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
    {"SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS", "APIKEY"}
)
_SECRET_KEYS = frozenset(
    {"API", "PRIVATE", "ACCESS", "SECRET", "AUTH", "SIGNING", "WEBHOOK", "WANDB", "COMET", "NEPTUNE", "OPENAI",
        "ANTHROPIC", "AZURE", "COHERE", "MISTRAL", "GEMINI", "GROQ", "HF", "HUGGINGFACE", "LANGSMITH", "SLACK"}
)  # fmt: skip
"""Words before KEY that make it a secret."""
_SECRET_PATS = frozenset({"GH", "GITHUB", "GITLAB", "GIT", "AZURE", "ADO", "DEVOPS", "DATABRICKS"})
"""Words before PAT, a personal access token."""
_ABOUT_A_SECRET = frozenset(
    {
        "URI", "URL", "PATH", "FILE", "FILENAME", "NAME", "VERSION", "DIR", "FOLDER", "LENGTH", "LEN", "COUNT", "SIZE",
        "TYPE", "ID", "IDS", "INDEX", "LIMIT", "BUDGET", "RESOURCE", "REF", "TTL", "EXPIRY", "DIM", "WEIGHT", "LOSS", "PROBABILITY",
        "PROJECT", "MODE", "HEADER", "REGION", "LOCATION", "PROVIDER", "BACKEND", "METHOD", "SOURCE", "STORE", "SCOPE", "SCOPES",
        "ENDPOINT", "HOST", "PORT", "ENABLED", "REQUIRED", "POLICY", "ALGORITHM", "PREFIX", "FORMAT", "ENV",
    }
)  # fmt: skip
"""Last words of names that tell where or what a secret is, or how many tokens of a text."""
_TOKENS_OF_TEXT = frozenset(
    {"BOS", "EOS", "PAD", "UNK", "CLS", "SEP", "MASK", "SPECIAL", "STOP", "IMAGE", "AUDIO", "END", "START", "PER", "FIRST", "LAST",
        "VIDEO", "VISION", "TEXT", "CLASS", "REGISTER", "PROMPT", "NEXT", "BEGIN", "NEWLINE", "NEW", "TARGET", "LABEL"}
)  # fmt: skip
"""Words before TOKEN that speak of a text's tokens."""
_SHAPES = {
    "a Google API key": r"AIza[0-9A-Za-z_-]{35}",
    "a Google OAuth token": r"ya29\.[\w-]{20,}",
    "a Google OAuth client secret": r"GOCSPX-[\w-]{20,}",
    "a GitHub token": r"gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{22,}",
    "a GitLab token": r"glpat-[\w-]{20,}",
    "a Slack token": r"xox[abeoprs]-[\w-]{10,}",
    "a webhook's URL": r"hooks\.slack\.com/(?:services|workflows|triggers)/[\w/-]{10,}"
    r"|discord(?:app)?\.com/api/webhooks/\d+/[\w-]{20,}",
    "a bearer token": r"[Bb]earer\s{1,8}(?=[\w.~+/-]{0,80}\d)[\w.~+/-]{12,}",
    "a Hugging Face token": r"hf_[A-Za-z0-9]{30,}",
    "an AWS access key": r"(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Za-z])",
    "an API key (sk-...)": r"sk-[\w-]{32,}",
    "a private key": r"-----BEGIN (?:[A-Z]+ ){0,3}PRIVATE KEY",
    "a service account's key": r"[\"']?type\\*[\"']?\s*:\s*\\*[\"']service_account",
    "a JSON web token": r"(?<!-)eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+",
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
_REFERENCE = re.compile(
    r"(?:sm|gsm|gcpsm|gcp-secretmanager|secretmanager|secret|secrets|vault|op|berglas|ref\+\w+)://\S+|arn:aws:secretsmanager:\S+"
)
"""A secret's name as programs and tools that fetch it want it."""
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)")
_ASSIGNED = (
    re.compile(r"(?<![\w-])--?([A-Za-z][\w.-]*)[= ]([^\s;&|]+)"),
    re.compile(r"(?<![\w-])([A-Z][A-Z0-9_]*)=([^\s;&|]+)"),
    re.compile(r"[\"'](\w+)\\*[\"']\s*:\s*\\*[\"']([^\"'\\]+)"),
)
"""In a line for a shell or a JSON text: options, variables, members."""


def check(spec: CustomJobSpec, _context: Context) -> Iterator[Finding]:
    """Every variable and every word of a command line that holds a secret."""
    for program in programs(spec):
        for index, variable in enumerate(program.env):
            is_named = _is_secret(variable.name, variable.value)
            told = _told(variable.name, variable.name if is_named else "", variable.value)
            path = f"{program.path}.env[{index}]"
            if told:
                yield _finding(path, told, len(variable.value))
            elif _is_given_later(variable.name, variable.value):
                yield _given_later(path, variable.name)
        yield from _words(program)


def hides(name: str, value: str) -> bool:
    """Whether the value of a variable or an option of that name, with its dashes or without, must not be shown."""
    name = name.lstrip("-")
    return bool(_told(name, name if _is_secret(name, value) else "", value))


def _words(program: Program) -> Iterator[Finding]:
    before = ""
    for path, word in program.words():
        option, _, value = word.partition("=") if word.startswith("-") else (before, "", word)
        name = option.lstrip("-")
        told = _told("", f"--{name}" if _is_secret(name, value) else "", word)
        if told:
            yield _finding(path, told, len(word))
        elif _is_given_later(name, value):
            yield _given_later(path, f"--{name}")
        before = word if _OPTION.fullmatch(word) else ""


def _told(holder: str, named: str, text: str) -> str:
    """Why a text is held for a secret, or for something that holds one; empty when it is not."""
    shape = _shape(text)
    if shape:
        return f"{holder or 'it'} holds what has the shape of {shape}"
    if named:
        return f"{named} is a secret by its name"
    inside = _named_inside(text)
    return f"{holder or 'it'} holds {inside}, a secret by its name" if inside else ""


def _named_inside(text: str) -> str:
    """What the first secret within a shell line or a JSON text is called."""
    for form in _ASSIGNED:
        for match in form.finditer(text):
            is_name = match[1] == "secret" and "gcloud secrets" in text
            is_call = "(" in match[2] or "[" in match[2]
            if not is_name and not is_call and _is_secret(match[1], match[2].strip("\"',}")):
                return match[1]
    return ""


def _shape(text: str) -> str:
    match = _SHAPE.search(text)
    return list(_SHAPES)[int((match.lastgroup or "shape0").removeprefix("shape"))] if match else ""


def _is_secret(name: str, value: str) -> bool:
    """Whether a value is a secret because of the name under which it stands."""
    return _names_a_secret(name) and _may_be_secret(value, name)


def _names_a_secret(name: str) -> bool:
    words = [word.upper() for word in _WORD.findall(name)]
    if not words or words[-1] in _ABOUT_A_SECRET:
        return False
    if any(second == "KEY" and first in _SECRET_KEYS for first, second in itertools.pairwise(words)):
        return "PUBLIC" not in words
    if words[-1] == "KEY" and "AZURE" in words:
        return True
    if words[-1] == "TOKEN" and not set(words[:-1]) & _TOKENS_OF_TEXT:
        return True
    if words[-1] == "PWD" and words[0] not in ("PWD", "OLD"):
        return True
    if words[-1] == "PAT" and _SECRET_PATS & set(words[:-1]):
        return True
    return any(word in _SECRET_WORDS or word.endswith(("PASSWORD", "PASSWD")) for word in words)


def _may_be_secret(value: str, name: str) -> bool:
    """Whether the value is no flag, no number, no path, no name of a secret, and known before the pipeline runs."""
    text = value.strip().strip("\"'")
    if not text or text.lower() in ("true", "false", "none", "null", "yes", "no"):
        return False
    if text.startswith(("$", "/", "./", "gs://", "<")) or is_placeholder(text):
        return False
    if _RESOURCE.fullmatch(text) or _REFERENCE.fullmatch(text):
        return False
    is_number = re.fullmatch(r"[-+]?\d{0,7}(?:\.\d*)?", text) is not None
    return not (is_number and "TOKEN" in name.upper())


def _is_given_later(name: str, value: str) -> bool:
    """Whether a pipeline puts in, as a whole, the value of a name that is a secret's."""
    text = value.strip()
    return _names_a_secret(name) and is_placeholder(text) and text.startswith("{{") and text.endswith("}}")


def _given_later(path: str, name: str) -> Finding:
    return Finding(
        path=path,
        rule="secret-parameter",
        reason=f"{name} is a secret by its name, and a pipeline parameter or output gives its value, which then stands in clear in "
        "the run of the pipeline and in the job.",
        fix="Let what gives it hold the secret's name (projects/<project>/secrets/<secret>/versions/latest), never the secret, and "
        "read it from Secret Manager when the program starts.",
        severity="warning",
    )


def _finding(path: str, told: str, length: int) -> Finding:
    return Finding(
        path=path,
        rule="secret",
        reason=f"{told} ({length} characters); whoever may read the job reads it.",
        fix="Store it in Secret Manager, give the secret's name in env (projects/<project>/secrets/<secret>/versions/latest) and "
        "read it when the program starts, as the job's service account; a training job has no field that does it. Replace a "
        "secret that was sent already.",
    )

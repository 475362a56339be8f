"""Whether the nodes of a job wait for each other, as far as their command lines tell."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from penstock_components.jobs.messages import CustomJobSpec
from penstock_components.jobs.roles import SERVERS
from penstock_components.jobs.rules.contents import Program, is_placeholder, programs

Rendezvous = Literal["fixed", "elastic", "unknown"]
"""Of all nodes, which wait for one that is gone; of those that are there; or not to be told."""

_BEFORE_A_PROGRAM = frozenset({"exec", "env", "nohup", "then", "do", "else", "time"})
_OPERATORS = ";|&(\n"
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
    "penstock_trainer": "penstock_trainer",
}
_PYTHON = re.compile(r"python[\d.]*")
_FLAGS = frozenset(
    {"standalone", "no-python", "module", "m", "elastic-training", "no-ssh", "run-path", "use-env"}
)
"""Options of launchers that take no value."""


def rendezvous_of(spec: CustomJobSpec) -> Rendezvous:
    """Of the nodes, pools 0 and 1: fixed where one of them surely is, else elastic where one is."""
    found = {_of_program(program) for program in programs(spec) if program.index < SERVERS}
    return "fixed" if "fixed" in found else "elastic" if "elastic" in found else "unknown"


def _of_program(program: Program) -> Rendezvous:
    # PET_RDZV_BACKEND and the like are torchrun's options, given by environment.
    has_defaults = any(variable.name.startswith("PET_") for variable in program.env)
    for launcher, rest in _launchers(_words(program)):
        options = _options(rest)
        if launcher == "penstock_trainer" and rest[:1] == ["launch"]:
            return "elastic" if "nodes" in _options(rest[1:]) else "fixed"
        if launcher == "torchrun":
            found = _of_torchrun(options)
            return "unknown" if has_defaults and found == "fixed" else found
        if launcher == "deepspeed":
            return _of_deepspeed(options)
    return "unknown"


def _of_torchrun(options: Mapping[str, str]) -> Rendezvous:
    """Without --nnodes each node is a group of its own; a backend other than static lets a node come back."""
    least, _, most = options.get("nnodes", "").partition(":")
    if most and least != most:
        return "elastic"
    is_static = options.get("rdzv-backend", "static") == "static" and "standalone" not in options
    is_several = least.isdecimal() and least.lstrip("0") not in ("", "1")
    return "fixed" if is_static and is_several else "unknown"


def _of_deepspeed(options: Mapping[str, str]) -> Rendezvous:
    """Without any word of other nodes it takes the machine that it is on."""
    if "elastic-training" in options or options.get("num-nodes") == "1":
        return "unknown"
    return "fixed" if {"hostfile", "H", "num-nodes", "master-addr", "no-ssh"} & set(options) else "unknown"


def _words(program: Program) -> Iterator[list[str]]:
    """What is run, word by word: the command line itself, and each line for a shell that is in it."""
    package = program.pool.python_package_spec
    module = ("python", "-m", package.python_module) if package is not None and not program.command else ()
    line = [*module, *program.command, *program.args]
    yield line
    for index, word in enumerate(line):
        if re.search(r"\s", word) and (index == 0 or re.fullmatch(r"-[a-z]*c", line[index - 1])):
            yield _split(word)
            yield line[index + 1 :]  # the words that a shell gets behind its line, as exec "$@" runs them


def _split(line: str) -> list[str]:
    lexer = shlex.shlex(line.replace("\\\n", " "), posix=True, punctuation_chars=f"{_OPERATORS})<>")
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    try:
        return list(lexer)
    except ValueError:
        return line.split()


def _launchers(lines: Iterator[list[str]]) -> Iterator[tuple[str, list[str]]]:
    """Launchers that stand where a program stands, with the words behind them."""
    for words in lines:
        for index, word in enumerate(words):
            if index and not _is_before_a_program(words[index - 1]):
                continue
            name = posixpath.basename(word)
            if name in ("torchrun", "deepspeed"):
                yield name, words[index + 1 :]
            elif _PYTHON.fullmatch(name):
                module, rest = _module(words[index + 1 :])
                if module in _MODULES:
                    yield _MODULES[module], rest


def _is_before_a_program(word: str) -> bool:
    is_operator = bool(word) and not word.strip(_OPERATORS)
    is_variable = re.match(r"[A-Za-z_]\w*=", word) is not None
    return is_operator or is_variable or posixpath.basename(word) in _BEFORE_A_PROGRAM


def _module(words: Sequence[str]) -> tuple[str, list[str]]:
    """What python's -m names, and the words behind it."""
    for index, word in enumerate(words):
        if word == "-m":
            return "".join(words[index + 1 : index + 2]), list(words[index + 2 :])
        if not word.startswith("-"):
            break
    return "", []


def _options(words: Sequence[str]) -> dict[str, str]:
    """Options up to the program that is launched, with - for _; `--a=b` and `--a b` are the same."""
    found: dict[str, str] = {}
    waiting = ""
    for word in words:
        if word == "--":
            break
        if word.startswith("-"):
            name, _, value = word.lstrip("-").partition("=")
            name = name.replace("_", "-")
            found[name] = value
            waiting = "" if value or name in _FLAGS else name
        elif waiting:
            found[waiting], waiting = word, ""
        else:
            break
    return {name: "" if is_placeholder(value) else value for name, value in found.items()}

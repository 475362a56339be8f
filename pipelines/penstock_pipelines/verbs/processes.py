"""The command's child processes: signals reach them, and a verb can start again in the stand-in's environment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from penstock_pipelines.local import find_server, is_state, server_on
from penstock_pipelines.settings import load_settings

EXIT_INTERRUPTED = 130
_REENTERED = "PENSTOCK_REENTERED"


def child(arguments: list[str], environment: Mapping[str, str]) -> int:
    """Run Python with `arguments`; its exit code as a shell shows it.

    Ctrl-C reaches the child as well: it cancels, and is waited for. SIGTERM and SIGHUP
    are passed on as the same.
    """
    process = subprocess.Popen([sys.executable, *arguments], env=dict(environment))
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: process.send_signal(signal.SIGINT))
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            continue
        return 128 - code if code < 0 else code


def interrupt_on_signals() -> None:
    """Have `timeout`, CI and a closed terminal interrupt the command, which then leaves nothing behind.

    A shell starts background commands with SIGINT ignored, and children inherit that: they could not be interrupted. What
    `nohup` ignores stays ignored.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.default_int_handler)


def this_command(settings_file: Path | None) -> list[str]:
    """Arguments of Python that start this command with the same settings."""
    return ["-m", "penstock_pipelines.cli", *(["--settings", str(settings_file)] if settings_file else [])]


def reenter_with(state: Path, settings_file: Path | None) -> None:
    """Where `state` is a stand-in's, start this very command again in the environment of that stand-in.

    One that does not run is started for as long as the command takes. In such an environment already: nothing to do.
    """
    if not is_state(state) or _REENTERED in os.environ:
        return
    running = find_server(state)
    with (
        contextlib.nullcontext(running)
        if running
        else server_on(state, load_settings(settings_file)) as server
    ):
        code = child(
            ["-m", "penstock_pipelines.cli", *sys.argv[1:]], server.environment() | {_REENTERED: "1"}
        )
    sys.exit(code)

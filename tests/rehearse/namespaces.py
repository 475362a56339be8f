"""Whether this machine lets a user make namespaces."""

from __future__ import annotations

import subprocess


def refusal(*arguments: str) -> str:
    """Why namespaces cannot be made here; empty when they can."""
    try:
        done = subprocess.run(["unshare", *arguments, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        return "unshare is not installed"
    return done.stderr.strip() if done.returncode else ""

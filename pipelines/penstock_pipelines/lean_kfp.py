"""Loads kfp's language and compiler without what compiling does not need, which is most of its import.

`import kfp` also imports kfp.client and, through it, Kubernetes' client: more than half of a compile's CPU time. kfp leaves it
out where `_KFP_RUNTIME` says that a component is running; kfp.dsl must be imported after that is taken back, or it would
leave out what authors need. `requests`, which kfp only uses to load components from URLs, is loaded when it is first used.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

_RUNTIME = "_KFP_RUNTIME"


def load_kfp() -> None:
    """Import kfp.dsl and kfp.compiler; the same modules as otherwise, `kfp.Client` left out. Later calls do nothing.

    Where kfp was imported before, it stays as it is.
    """
    if "kfp" not in sys.modules and _RUNTIME not in os.environ:
        _load_when_used("requests")
        os.environ[_RUNTIME] = "true"
        try:
            importlib.import_module("kfp")
        finally:
            del os.environ[_RUNTIME]
    importlib.import_module("kfp.dsl")
    importlib.import_module("kfp.compiler")


def _load_when_used(name: str) -> None:
    """Put a module in its place that loads itself at the first look into it (importlib's LazyLoader)."""
    spec = importlib.util.find_spec(name)
    if name in sys.modules or spec is None or spec.loader is None:
        return
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)

"""Loads kfp's language and compiler without what compiling does not need, which is most of its import.

`import kfp` also imports kfp.client and, through it, Kubernetes' client: more than half of a compile's CPU time. kfp leaves it
out where `_KFP_RUNTIME` says that a component is running; kfp.dsl must be imported after that is taken back, or it would
leave out what authors need. `requests`, which kfp only uses to load components from URLs, is loaded when it is first used.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType

_RUNTIME = "_KFP_RUNTIME"


def load_kfp() -> None:
    """Import kfp.dsl and kfp.compiler; the same modules as otherwise, `kfp.Client` left out. Later calls do nothing.

    Where kfp was imported before, it stays as it is.
    """
    if "kfp" not in sys.modules and _RUNTIME not in os.environ:
        sys.meta_path.insert(0, _WhenUsed("requests"))
        os.environ[_RUNTIME] = "true"
        try:
            importlib.import_module("kfp")
        finally:
            del os.environ[_RUNTIME]
    importlib.import_module("kfp.dsl")
    importlib.import_module("kfp.compiler")


class _WhenUsed(MetaPathFinder):
    """Finds one module for importlib's LazyLoader, which loads it at the first look into it.

    A finder, because a module that was put into sys.modules before is looked into by its first import.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec

"""Loads kfp's language and compiler without its client, which compiling does not need.

`import kfp` also imports kfp.client and, through it, Kubernetes' client: more than half of a compile's CPU time. kfp leaves it
out where `_KFP_RUNTIME` says that a component is running; kfp.dsl must be imported after that is taken back, or it would
leave out what authors need.
"""

from __future__ import annotations

import importlib
import os
import sys

_RUNTIME = "_KFP_RUNTIME"


def load_kfp() -> None:
    """Import kfp.dsl and kfp.compiler; the same modules as otherwise, `kfp.Client` left out. Later calls do nothing.

    Where kfp was imported before, it stays as it is.
    """
    if "kfp" not in sys.modules and _RUNTIME not in os.environ:
        os.environ[_RUNTIME] = "true"
        try:
            importlib.import_module("kfp")
        finally:
            del os.environ[_RUNTIME]
    importlib.import_module("kfp.dsl")
    importlib.import_module("kfp.compiler")

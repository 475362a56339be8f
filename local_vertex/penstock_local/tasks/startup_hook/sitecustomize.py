"""Start-up hook of lightweight Python tasks: points kfp's hard-coded `/gcs/` at the task's own view of the buckets.

This is the one place where a client is changed. kfp 2.17 writes an artifact with a gs:// URI to `/gcs/BUCKET/NAME`, a
path that only a Cloud Storage mount has, and offers no setting for it. The constant is set right after kfp's own
module has run, so that processes which never import kfp (pip, shells) are left alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_MODULE = "kfp.dsl.types.artifact_types"


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find kfp's module as usual, with a loader that sets the constant afterwards."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _MODULE else None
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenSetMount(spec.loader)
        return spec


class _ThenSetMount(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As kfp's own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run kfp's module, then set where a gs:// URI lies."""
        self._loader.exec_module(module)
        mount = os.environ["PENSTOCK_GCS_VIEW"].rstrip("/") + "/"
        vars(module)["_GCS_LOCAL_MOUNT_PREFIX"] = mount


if "PENSTOCK_GCS_VIEW" in os.environ:
    sys.meta_path.insert(0, _Finder())

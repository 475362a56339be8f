"""The protobuf messages of the pipeline IR, loaded without running the KFP SDK.

`kfp-pipeline-spec` puts its one module inside the namespace `kfp`. Where the SDK is installed too, the statement
`from kfp.pipeline_spec import pipeline_spec_pb2` first runs `kfp/__init__.py`, which imports the compiler and a
Kubernetes client. The stand-in must neither need nor pay for those, so the module is found on the path of the
(unimported) package and executed under a name of our own. Protobuf keeps one descriptor per file name in the
process: if the SDK is imported as well, both see the same message classes.
"""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any


def _load_messages() -> ModuleType:
    package = importlib.util.find_spec("kfp")
    for folder in (package.submodule_search_locations or ()) if package else ():
        path = Path(folder) / "pipeline_spec" / "pipeline_spec_pb2.py"
        if path.is_file():
            spec = importlib.util.spec_from_file_location(f"{__package__}._pipeline_spec_pb2", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise ModuleNotFoundError(
        "kfp-pipeline-spec is not installed; install penstock[local]", name="kfp.pipeline_spec"
    )


# Generated at run time by protobuf, so a type checker cannot see the classes.
pipeline_spec_pb2: Any = _load_messages()

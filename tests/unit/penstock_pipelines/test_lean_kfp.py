"""kfp as the compile verb loads it: less of it, and what is left out comes when it is used."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json, os, sys
from penstock_pipelines.lean_kfp import load_kfp
load_kfp()
load_kfp()
import google_cloud_pipeline_components.v1.custom_job
left_out = [name for name in ("kubernetes", "urllib3") if name in sys.modules]
from kfp import compiler, dsl
from kfp.components import load_component_from_url
try:
    load_component_from_url("http://127.0.0.1:9/component.yaml")
except Exception as exc:
    used = type(exc).__module__
import requests.adapters
print(json.dumps([left_out, used, hasattr(requests.adapters, "HTTPAdapter"), "_KFP_RUNTIME" in os.environ]))
"""


def test_what_compiling_does_not_need_is_left_out_until_it_is_used() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [[], "requests.exceptions", True, False]

"""What a launcher brings into its process."""

import pkgutil
import subprocess
import sys

import pytest

from penstock_components import launchers

PROGRAM = """
import importlib, sys
importlib.import_module(sys.argv[1])
heavy = ("kfp", "torch", "google_cloud_pipeline_components", "google.cloud.aiplatform_v1", "google.cloud.aiplatform")
print(*(name for name in heavy if name in sys.modules))
"""


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(launchers.__path__)])
def test_a_launcher_imports_neither_kfp_nor_torch_nor_a_client_before_it_needs_one(name):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"penstock_components.launchers.{name}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == []


def test_the_package_itself_imports_nothing():
    program = "import sys; before = set(sys.modules); import penstock_components; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["penstock_components"]

import subprocess
import sys

import pytest


def test_loading_the_messages_does_not_import_the_kfp_sdk() -> None:
    program = (
        "import sys; from penstock_local.orchestrator import engine; "
        "print([name for name in sys.modules if name.split('.')[0] in ('kfp', 'kubernetes')])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("sdk_first", [True, False])
def test_the_sdk_and_the_engine_share_message_classes(sdk_first: bool) -> None:
    imports = [
        "from kfp.pipeline_spec import pipeline_spec_pb2 as theirs",
        "from penstock_local.orchestrator.proto import pipeline_spec_pb2 as ours",
    ]
    program = "; ".join(
        [*(imports if sdk_first else reversed(imports)), "assert ours.PipelineSpec is theirs.PipelineSpec"]
    )
    subprocess.run([sys.executable, "-c", program], check=True)

"""A hand-made ExecutorInput on file:// URIs, and what a launcher hands back through it."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock_components.launchers.executor import ExecutorInput
from penstock_components.launchers.registry import Registry
from unit.penstock_components.launchers.model_registry import InMemoryModelService


class TaskBed:
    """One task's directory: artifacts below artifacts/, outputs below outputs/."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def uri(self, *names: str) -> str:
        return self.root.joinpath(*names).as_uri()

    def write(self, name: str, data: str | bytes) -> str:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return path.as_uri()

    @staticmethod
    def tick() -> None:
        """Let the file system's clock move: generations on disk are modification times, in steps of some milliseconds."""
        time.sleep(0.02)

    def message(
        self,
        parameters: Mapping[str, Any],
        *,
        inputs: Mapping[str, str] | None = None,
        outputs: Sequence[str] = (),
        returns: Sequence[str] = (),
    ) -> str:
        """ExecutorInput as Vertex AI spells it; `inputs` are URIs by artifact, `returns` are output parameters."""
        artifacts = {
            name: {"artifacts": [{"name": f"n-{name}", "uri": uri, "metadata": {}}]}
            for name, uri in (inputs or {}).items()
        }
        made = {
            name: {"artifacts": [{"name": f"n-{name}", "uri": self.uri("artifacts", name), "metadata": {}}]}
            for name in outputs
        }
        return json.dumps(
            {
                "inputs": {"parameterValues": dict(parameters), "artifacts": artifacts},
                "outputs": {
                    "artifacts": made,
                    "parameters": {
                        name: {"outputFile": str(self.root / "outputs" / name)} for name in returns
                    },
                    "outputFile": str(self.root / "outputs" / "executor_output.json"),
                },
            }
        )

    def task(self, parameters: Mapping[str, Any], **places: Any) -> ExecutorInput:
        return ExecutorInput.from_json(self.message(parameters, **places))

    def run(self, main: Callable[[Sequence[str]], int], parameters: Mapping[str, Any], **places: Any) -> int:
        return main(["--executor-input", self.message(parameters, **places)])

    def output(self) -> Any:
        return json.loads((self.root / "outputs" / "executor_output.json").read_text())

    def metadata(self, artifact: str) -> Any:
        (entry,) = self.output()["artifacts"][artifact]["artifacts"]
        return entry["metadata"]

    def parameter(self, name: str) -> str:
        """As its own file has it; executor_output.json must say the same."""
        text = (self.root / "outputs" / name).read_text()
        told = self.output()["parameterValues"][name]
        assert text == (told if isinstance(told, str) else json.dumps(told))
        return text

    def has_output(self) -> bool:
        return (self.root / "outputs" / "executor_output.json").exists()

    def artifact(self, *names: str) -> Path:
        return self.root.joinpath("artifacts", *names)


@pytest.fixture
def bed(tmp_path: Path) -> TaskBed:
    return TaskBed(tmp_path)


@pytest.fixture
def service() -> InMemoryModelService:
    return InMemoryModelService()


@pytest.fixture
def open_registry(service: InMemoryModelService) -> Callable[..., Registry]:
    return lambda **place: Registry(service, **place)

"""Run time parameters: read off the compiled pipeline, given as NAME=VALUE, checked before anything is sent."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from penstock_components.launchers.errors import LauncherError
from penstock_components.launchers.registry import check_model_id
from penstock_pipelines.errors import InputError

_TYPES: Mapping[str, tuple[type, ...]] = {
    "STRING": (str,),
    "NUMBER_INTEGER": (int,),
    "NUMBER_DOUBLE": (int, float),
    "BOOLEAN": (bool,),
    "LIST": (list,),
    "STRUCT": (dict,),
}


class PipelineParameters:
    """The root inputs of one compiled pipeline."""

    def __init__(self, compiled: Path) -> None:
        """Raises InputError when the file is not a compiled pipeline."""
        try:
            spec = next(
                yaml.load_all(compiled.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            )
            self.pipeline_name: str = spec["pipelineInfo"]["name"]
            self._definitions: Mapping[str, Mapping[str, Any]] = (
                spec["root"].get("inputDefinitions", {}).get("parameters", {})
            )
        except (OSError, yaml.YAMLError, KeyError, TypeError) as exc:
            raise InputError(f"{compiled} is not a compiled pipeline; `penstock compile` makes one.") from exc

    @property
    def names(self) -> Collection[str]:
        """Names of the parameters."""
        return self._definitions.keys()

    def values(self, given: Sequence[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Values for a run: NAME=VALUE texts over `defaults`, each of the type that the pipeline declares.

        Raises InputError: an unknown name (the nearest is named), a name given twice, a value of the wrong type, a
        model id that the registry does not take, or a required parameter without a value.
        """
        values = {name: self._checked(name, value) for name, value in defaults.items()}
        told: set[str] = set()
        for text in given:
            name, separator, value = text.partition("=")
            if not separator:
                raise InputError(f"parameter {text!r} is not of the form NAME=VALUE.")
            if name in told:
                raise InputError(f"parameter {name} is given twice; give it once.")
            told.add(name)
            values[name] = self._checked(name, self._parsed(name, value))
        missing = [n for n, d in self._definitions.items() if n not in values and not d.get("isOptional")]
        if missing:
            raise InputError(
                f"{self.pipeline_name} needs a value for {', '.join(missing)}; give -p {missing[0]}=VALUE, or set it "
                "under [parameters] in penstock.toml."
            )
        return values

    def _parsed(self, name: str, text: str) -> Any:
        kind = self._kind(name)
        if kind == "STRING":
            return text
        try:
            return json.loads(text.lower() if kind == "BOOLEAN" else text)
        except json.JSONDecodeError as exc:
            raise InputError(f"parameter {name}={text!r} is not a {kind}.") from exc

    def _checked(self, name: str, value: Any) -> Any:
        kind = self._kind(name)
        if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "BOOLEAN"):
            raise InputError(f"parameter {name}={value!r} is not a {kind}.")
        if name == "model_id":
            try:
                check_model_id(str(value))
            except LauncherError as exc:
                raise InputError(str(exc)) from exc
        return value

    def _kind(self, name: str) -> str:
        if name not in self._definitions:
            nearest = difflib.get_close_matches(name, self._definitions, n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            known = ", ".join(sorted(self._definitions))
            raise InputError(f"{self.pipeline_name} has no parameter {name!r}.{hint} Parameters: {known}.")
        return str(self._definitions[name]["parameterType"])

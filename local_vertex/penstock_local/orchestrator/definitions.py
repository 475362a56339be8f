"""Component interfaces and executors, from protobuf to `ir`; what cannot be honoured is refused by its path."""

from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf import json_format

from penstock_local.orchestrator import ir
from penstock_local.orchestrator.errors import InvalidSpecError, UnsupportedSpecError
from penstock_local.orchestrator.proto import pipeline_spec_pb2
from penstock_local.orchestrator.values import ParameterType, plain


def parse_message(message: Any, content: Mapping[str, Any], path: str) -> Any:
    """`content` as `message`; raises `InvalidSpecError` for unknown fields and wrong types."""
    try:
        return json_format.ParseDict(dict(content), message, ignore_unknown_fields=False)
    except json_format.ParseError as exc:
        raise InvalidSpecError(path, f"not a {message.DESCRIPTOR.name}: {exc}") from exc


def refuse_set(message: Any, path: str, fields: Iterable[str]) -> None:
    """Raises `UnsupportedSpecError` for the first of `fields` that is set."""
    for field in fields:
        if getattr(message, field, None) and any(
            descriptor.name == field for descriptor, _ in message.ListFields()
        ):
            name = message.DESCRIPTOR.fields_by_name[field].json_name
            raise UnsupportedSpecError(f"{path}.{name}", "not supported here; remove it from the pipeline")


def json_value(message: Any) -> Any:
    """A protobuf `Value` or `Struct` as plain JSON data."""
    return plain(json_format.MessageToDict(message))


def parameters(definitions: Mapping[str, Any], path: str) -> dict[str, ir.ParameterDefinition]:
    """The declared parameters of one side of an interface."""
    return {name: _parameter(definition, f"{path}['{name}']") for name, definition in definitions.items()}


def _parameter(message: Any, path: str) -> ir.ParameterDefinition:
    refuse_set(message, path, ("type",))
    type_name = pipeline_spec_pb2.ParameterType.ParameterTypeEnum.Name(message.parameter_type)
    if type_name not in ParameterType.__members__:
        raise UnsupportedSpecError(
            f"{path}.parameterType", f"{type_name}; supported are {', '.join(ParameterType.__members__)}"
        )
    if message.DESCRIPTOR.containing_type.name == "ComponentOutputsSpec":
        return ir.ParameterDefinition(type=ParameterType[type_name])
    has_default = message.HasField("default_value")
    return ir.ParameterDefinition(
        type=ParameterType[type_name],
        is_optional=message.is_optional or has_default,
        default=json_value(message.default_value) if has_default else None,
        literals=tuple(json_value(literal) for literal in message.literals),
    )


def artifacts(definitions: Mapping[str, Any], path: str) -> dict[str, ir.ArtifactDefinition]:
    """The declared artifacts of one side of an interface."""
    result = {}
    for name, message in definitions.items():
        where = f"{path}['{name}']"
        refuse_set(message.artifact_type, f"{where}.artifactType", ("schema_uri", "instance_schema"))
        refuse_set(message, where, ("properties", "custom_properties"))
        result[name] = ir.ArtifactDefinition(
            schema_title=message.artifact_type.schema_title,
            schema_version=message.artifact_type.schema_version,
            is_list=message.is_artifact_list,
            is_optional=getattr(message, "is_optional", False),
            metadata=json_value(message.metadata) if hasattr(message, "metadata") else {},
        )
    return result


def container(message: Any, path: str) -> ir.Container:
    """A container executor."""
    # CPU, memory and accelerator limits choose a machine on Vertex AI; here every task runs on this one. Requests,
    # which Vertex AI does not take either, are refused.
    refuse_set(message, path, ("lifecycle",))
    requests = ("cpu_request", "memory_request", "resource_cpu_request", "resource_memory_request")
    refuse_set(message.resources, f"{path}.resources", requests)
    if not message.image:
        raise InvalidSpecError(f"{path}.image", "is empty")
    if "{{" in message.image:
        raise UnsupportedSpecError(
            f"{path}.image", f"{message.image!r} is known only at run time; set it when compiling"
        )
    return ir.Container(
        path=path,
        image=message.image,
        command=tuple(message.command),
        args=tuple(message.args),
        env={variable.name: variable.value for variable in message.env},
    )


def importer(message: Any, path: str) -> ir.Importer:
    """An importer executor."""
    refuse_set(message, path, ("download_to_workspace", "properties", "custom_properties"))
    refuse_set(message.artifact_uri, f"{path}.artifactUri", ("constant_value",))
    constant = message.artifact_uri.constant.string_value
    # An f-string URI reaches the spec as `{{channel:...}}`, which no service can resolve; the compiler also passes the
    # same string, with real placeholders, as the task's input `uri`.
    is_constant = message.artifact_uri.HasField("constant") and "{{channel:" not in constant
    return ir.Importer(
        uri=constant if is_constant else None,
        metadata=json_value(message.metadata),
        reimport=message.reimport,
    )

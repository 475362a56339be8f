"""Checks that every reference inside a pipeline leads somewhere, before anything runs."""

from collections.abc import Iterable, Set
from difflib import get_close_matches

from penstock_local.orchestrator import ir
from penstock_local.orchestrator.errors import InvalidSpecError


def unknown(name: str, known: Iterable[str]) -> str:
    """`'lr-rate' is unknown; did you mean 'lr_rate'?`, or the list of what is known."""
    names = sorted(known)
    match = get_close_matches(name, names, n=1)
    hint = f"did you mean {match[0]!r}?" if match else f"known: {', '.join(names) or 'none'}"
    return f"{name!r} is unknown; {hint}"


def check_references(root: ir.Component) -> None:
    """Raises `InvalidSpecError` for a task, input or output that does not exist, a missing input, or a cycle."""
    _check_dag(root, frozenset(), "pipelineSpec.root", set())


def _check_dag(
    component: ir.Component, unbound: frozenset[str], path: str, seen: set[tuple[str, frozenset[str]]]
) -> None:
    if (component.name, unbound) in seen:
        return
    seen.add((component.name, unbound))
    dag = component.implementation
    assert isinstance(dag, ir.Dag)
    for task in dag.tasks.values():
        _check_task(task, component, dag, unbound, seen)
    _check_outputs(dag, path)
    _check_order(dag, path)


def _check_task(
    task: ir.Task,
    parent: ir.Component,
    dag: ir.Dag,
    unbound: frozenset[str],
    seen: set[tuple[str, frozenset[str]]],
) -> None:
    for name in sorted(task.dependencies - dag.tasks.keys()):
        raise InvalidSpecError(task.path, f"depends on task {unknown(name, dag.tasks)}")
    broken: set[str] = set()
    for name, source in task.parameters.items():
        problem = _problem(source, parent.input_parameters.keys() - unbound, dag, artifacts=False)
        broken.update([name] if problem else [])
        # kfp 2.17 gives a group of tasks inputs that no task in it reads, taken from loop items that exist only
        # inside. They are dropped here; a task that does read one is refused, in whatever depth it stands.
        if problem and not isinstance(task.component.implementation, ir.Dag):
            raise InvalidSpecError(f"{task.path}.inputs.parameters['{name}']", problem)
    for name, artifact_source in task.artifacts.items():
        problem = _problem(artifact_source, parent.input_artifacts.keys() - unbound, dag, artifacts=True)
        if problem:
            raise InvalidSpecError(f"{task.path}.inputs.artifacts['{name}']", problem)
    item = {task.loop.item_input} if task.loop else set()
    missing = _missing(task.component, task.parameters.keys() | task.artifacts.keys() | item)
    if isinstance(task.component.implementation, ir.Dag):
        _check_dag(task.component, frozenset((broken | missing) - item), task.path, seen)
    elif missing:
        raise InvalidSpecError(
            f"{task.path}.inputs", f"required inputs are missing: {', '.join(sorted(missing))}"
        )


def _problem(
    source: ir.ParameterSource | ir.ArtifactSource, parent_inputs: Set[str], dag: ir.Dag, *, artifacts: bool
) -> str | None:
    if isinstance(source, ir.FromParent) and source.name not in parent_inputs:
        return f"no value reaches the component input {source.name!r}; if this is a loop item read inside a nested loop, pass it through a task of the outer loop"
    if isinstance(source, ir.FromTask):
        producer = dag.tasks[source.task].component
        outputs = producer.output_artifacts if artifacts else producer.output_parameters
        if source.output not in outputs:
            return f"output of task {source.task!r}: {unknown(source.output, outputs)}"
    return None


def _missing(component: ir.Component, given: Set[str]) -> set[str]:
    parameters = {
        name for name, definition in component.input_parameters.items() if not definition.is_optional
    }
    artifacts = {name for name, definition in component.input_artifacts.items() if not definition.is_optional}
    return (parameters | artifacts) - given


def _check_outputs(dag: ir.Dag, path: str) -> None:
    for kind, outputs in (("parameters", dag.parameter_outputs), ("artifacts", dag.artifact_outputs)):
        for name, sources in outputs.items():
            for source in sources:
                where = f"{path}.dag.outputs.{kind}['{name}']"
                if source.task not in dag.tasks:
                    raise InvalidSpecError(where, f"task {unknown(source.task, dag.tasks)}")
                problem = _problem(source, set(), dag, artifacts=kind == "artifacts")
                if problem:
                    raise InvalidSpecError(where, problem)


def _check_order(dag: ir.Dag, path: str) -> None:
    left = dict(dag.tasks)
    while left:
        ready = [name for name, task in left.items() if not task.dependencies & left.keys()]
        if not ready:
            raise InvalidSpecError(
                f"{path}.dag.tasks", f"these tasks wait for each other: {', '.join(sorted(left))}"
            )
        for name in ready:
            del left[name]

"""As whom a job runs, and the resources that it names: accounts, keys, TensorBoard, experiments, labels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from penstock_components.jobs.findings import Finding, quoted
from penstock_components.jobs.messages import CustomJob, CustomJobSpec, EncryptionSpec
from penstock_components.jobs.rules.contents import is_placeholder
from penstock_components.jobs.rules.context import Context

NOT_IN_GCPC = (
    "scheduling.disable_retries",
    "experiment",
    "experiment_run",
    "enable_dashboard_access",
    "protected_artifact_location_id",
    "models",
)
"""Fields of the job spec that CustomTrainingJobOp (2.22) has no input for."""
LONGEST_NAME = 128
LONGEST_LABEL = 63
"""Of keys and values, as Google Cloud's guide to labels has it; the API's own text says 64."""
MOST_LABELS = 64
RESERVED_LABEL = "vertex-ai-pipelines-run-billing-id"

_ACCOUNT = re.compile(r"[^@\s/]+@[a-z0-9.-]+\.gserviceaccount\.com")
_LOCATED = r"projects/[^/]+/locations/[^/]+"
_TENSORBOARD = re.compile(rf"{_LOCATED}/tensorboards/[^/]+")
_CONTEXT = re.compile(rf"{_LOCATED}/metadataStores/[^/]+/contexts/[^/]+")
_KEY = re.compile(rf"{_LOCATED}/keyRings/[^/]+/cryptoKeys/[^/]+")
_RESOURCE_ID = re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")
_PLACE = "projects/<project>/locations/<region>"


def check(spec: CustomJobSpec, context: Context) -> Iterator[Finding]:
    """Accounts and resource names of a job spec."""
    yield from _account(spec, context)
    yield from _resource("tensorboard", spec.tensorboard, _TENSORBOARD, f"{_PLACE}/tensorboards/<id>")
    if not context.through_gcpc:
        yield from _experiment(spec, context)
    else:
        yield from not_carried(spec)
    resource_id = spec.persistent_resource_id
    if resource_id and not is_placeholder(resource_id) and not _RESOURCE_ID.fullmatch(resource_id):
        last = resource_id.rstrip("/").rpartition("/")[2]
        yield Finding(
            path="persistent_resource_id",
            rule="persistent-resource-id",
            reason=f"{quoted(resource_id)} is no ID of a persistent resource; it is looked for in the job's own project and region.",
            fix=f"Write {last}."
            if _RESOURCE_ID.fullmatch(last)
            else "Write lower-case letters, digits and -, at most 63.",
        )


def check_job(job: CustomJob) -> Iterator[Finding]:
    """Name, labels and key of a job."""
    yield from check_resource(job.display_name, job.labels, job.encryption_spec)


def check_resource(
    display_name: str, labels: Mapping[str, str], encryption: EncryptionSpec | None
) -> Iterator[Finding]:
    """The same for any job resource."""
    if not display_name or len(display_name) > LONGEST_NAME:
        yield Finding(
            path="display_name",
            rule="display-name",
            reason=f"it has {len(display_name)} characters; it takes {LONGEST_NAME}."
            if display_name
            else "it is missing.",
            fix="Shorten it." if display_name else "Name the job; it is what lists of jobs show.",
        )
    yield from _labels(labels)
    if encryption is not None:
        form = f"{_PLACE}/keyRings/<ring>/cryptoKeys/<key>"
        if not encryption.kms_key_name:
            yield Finding(
                path="encryption_spec.kms_key_name",
                rule="required",
                reason="it is missing.",
                fix=f"Write {form}, or leave encryption_spec out.",
            )
        yield from _resource("encryption_spec.kms_key_name", encryption.kms_key_name, _KEY, form)


def not_carried(spec: CustomJobSpec) -> Iterator[Finding]:
    """What is set and would be lost on the way through CustomTrainingJobOp."""
    for path in NOT_IN_GCPC:
        holder, _, name = path.rpartition(".")
        if getattr(getattr(spec, holder) if holder else spec, name, None):
            yield Finding(
                path=path,
                rule="not-in-gcpc",
                reason=f"CustomTrainingJobOp has no input for {name}; it would be lost.",
                fix="Leave it out, or send the job with the SDK, gcloud or REST.",
            )


def _account(spec: CustomJobSpec, context: Context) -> Iterator[Finding]:
    account = spec.service_account
    if account and not is_placeholder(account) and not _ACCOUNT.fullmatch(account):
        email = account.rstrip("/").rpartition("/")[2]
        yield Finding(
            path="service_account",
            rule="service-account",
            reason=f"{quoted(account)} is not the e-mail address of a service account; a job runs as one, never as a person.",
            fix=f"Write {email}."
            if _ACCOUNT.fullmatch(email)
            else "Write <name>@<project>.iam.gserviceaccount.com.",
        )
    if spec.tensorboard and not account and context.knows("tensorboard", "service_account"):
        yield Finding(
            path="service_account",
            rule="tensorboard-account",
            reason="a job that writes to a TensorBoard needs a service account of yours, and none is given.",
            fix="Set service_account to one that may write to the TensorBoard and to base_output_directory.",
        )


def _experiment(spec: CustomJobSpec, context: Context) -> Iterator[Finding]:
    if spec.experiment and spec.tensorboard and context.knows("experiment", "tensorboard"):
        yield Finding(
            path="experiment",
            rule="experiment-or-tensorboard",
            reason="experiment and tensorboard exclude each other.",
            fix="Keep experiment, which has a TensorBoard of its own, or tensorboard.",
        )
    store = f"{_PLACE}/metadataStores/default/contexts"
    yield from _resource("experiment", spec.experiment, _CONTEXT, f"{store}/<experiment>")
    yield from _resource("experiment_run", spec.experiment_run, _CONTEXT, f"{store}/<experiment>-<run>")


def _resource(path: str, name: str, form: re.Pattern[str], told: str) -> Iterator[Finding]:
    if name and not is_placeholder(name) and not form.fullmatch(name):
        yield Finding(
            path=path,
            rule="resource-name",
            reason=f"{quoted(name)} is not the full name of the resource.",
            fix=f"Write {told}.",
        )


def _labels(labels: Mapping[str, str]) -> Iterator[Finding]:
    if len(labels) > MOST_LABELS:
        yield Finding(
            path="labels",
            rule="label-count",
            reason=f"there are {len(labels)} labels; a job takes {MOST_LABELS}.",
            fix="Keep those by which you look for jobs or split costs.",
        )
    for key, value in labels.items():
        if key == RESERVED_LABEL:
            yield Finding(
                path=f"labels[{key!r}]",
                rule="label-reserved",
                reason="Vertex AI Pipelines sets this label on the jobs that it makes, and it is reserved for that.",
                fix="Remove it: the service sets it.",
                severity="warning",
            )
            continue
        fault = _label_fault(key, value)
        if fault:
            yield Finding(
                path=f"labels[{key!r}]",
                rule="label",
                reason=f"{fault}.",
                fix="Labels have lower-case letters, digits, _ and -, at most 63 of them; a key begins with a letter.",
            )


def _label_fault(key: str, value: str) -> str:
    for kind, text in (("key", key), ("value", value)):
        if kind == "value" and is_placeholder(text):
            continue
        if len(text) > LONGEST_LABEL:
            return f"the {kind} has {len(text)} characters"
        wrong = next((char for char in text if not _is_label_char(char)), "")
        if wrong:
            return f"the {kind} {quoted(text)} holds {wrong!r}"
    return "" if key[:1].isalpha() else f"the key {quoted(key)} does not begin with a letter"


def _is_label_char(char: str) -> bool:
    return char in "_-" or char.isdigit() or (char.isalpha() and char == char.lower())

"""Accounts, resource names, labels: what a job names has to be named rightly."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from penstock_components.jobs.findings import Finding
from penstock_components.jobs.messages import CustomJob, CustomJobSpec, EncryptionSpec, Scheduling
from penstock_components.jobs.rules.context import Context
from penstock_components.jobs.rules.identity import NOT_IN_GCPC, check_job
from penstock_components.jobs.rules.whole_job import check_custom_job
from unit.penstock_components.jobs.rules.specs import RESTARTS, findings, job, refused

ACCOUNT = "trainer@project.iam.gserviceaccount.com"
TENSORBOARD = "projects/1/locations/europe-west4/tensorboards/2"
EXPERIMENT = "projects/1/locations/europe-west4/metadataStores/default/contexts/study"
KEY = "projects/p/locations/europe-west4/keyRings/r/cryptoKeys/k"


def of_job(
    labels: Mapping[str, str] | None = None, *, name: str = "job", key: str | None = None
) -> list[Finding]:
    encryption = None if key is None else EncryptionSpec(kms_key_name=key)
    return list(check_job(CustomJob(display_name=name, labels=labels or {}, encryption_spec=encryption)))


@pytest.mark.parametrize(
    ("account", "word"),
    [
        ("someone@example.com", "never as a person"),
        ("trainer", "iam.gserviceaccount.com"),
        (f"projects/-/serviceAccounts/{ACCOUNT}", f"Write {ACCOUNT}."),
    ],
)
def test_a_job_runs_as_a_service_account(account: str, word: str) -> None:
    refused(job(service_account=account), "service_account", "service-account", word)


@pytest.mark.parametrize("account", [ACCOUNT, "123-compute@developer.gserviceaccount.com", "{{$.inputs.x}}"])
def test_accounts_of_projects_and_placeholders_are_taken(account: str) -> None:
    assert findings(job(service_account=account)) == []


def test_a_tensorboard_needs_a_service_account() -> None:
    refused(job(tensorboard=TENSORBOARD), "service_account", "tensorboard-account", "Set service_account")


@pytest.mark.parametrize(
    ("spec", "unknown"),
    [
        (job(tensorboard=TENSORBOARD), {"service_account"}),
        (job(tensorboard=TENSORBOARD), {"tensorboard"}),
        (job(tensorboard="{{$.inputs.parameters['tensorboard']}}"), set()),
        (job(tensorboard=TENSORBOARD, service_account=ACCOUNT, experiment=EXPERIMENT), {"tensorboard"}),
        (job(service_account=ACCOUNT, tensorboard="{{$.inputs.x}}", experiment=EXPERIMENT), set()),
        (job(service_account="someone@example.com"), {"service_account"}),
    ],
)
def test_accounts_and_tensorboards_of_a_run_are_not_judged_before_it(
    spec: CustomJobSpec, unknown: set[str]
) -> None:
    assert findings(spec, unknown=frozenset(unknown)) == []


def test_experiment_and_tensorboard_exclude_each_other() -> None:
    spec = job(tensorboard=TENSORBOARD, service_account=ACCOUNT, experiment=EXPERIMENT)
    refused(spec, "experiment", "experiment-or-tensorboard", "exclude each other")


@pytest.mark.parametrize(
    ("field", "name", "form"),
    [
        ("tensorboard", "2", "projects/<project>/locations/<region>/tensorboards/<id>"),
        ("experiment", "study", "metadataStores/default/contexts/<experiment>"),
        ("experiment_run", "run-1", "contexts/<experiment>-<run>"),
    ],
)
def test_a_resource_has_its_full_name(field: str, name: str, form: str) -> None:
    spec = job(**{field: name}, service_account=ACCOUNT)
    refused(spec, field, "resource-name", f"'{name}' is not the full name", form)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("projects/p/locations/l/persistentResources/shared", "Write shared."),
        ("Shared_L4", "lower-case letters"),
        ("9shared", "lower-case letters"),
    ],
)
def test_a_persistent_resource_goes_by_its_id(name: str, word: str) -> None:
    refused(job(persistent_resource_id=name), "persistent_resource_id", "persistent-resource-id", word)


@pytest.mark.parametrize("path", NOT_IN_GCPC)
def test_what_the_op_has_no_input_for_is_refused_by_name(path: str) -> None:
    fields: dict[str, object] = {
        "scheduling.disable_retries": Scheduling(disable_retries=True),
        "experiment": EXPERIMENT,
        "experiment_run": EXPERIMENT,
        "enable_dashboard_access": True,
        "protected_artifact_location_id": "us-central1",
        "models": ("projects/p/locations/l/models/m",),
    }
    spec = job(**{path.partition(".")[0]: fields[path]})
    name = path.rpartition(".")[2]
    refused(spec, path, "not-in-gcpc", f"no input for {name}", "SDK", through_gcpc=True)
    assert findings(spec) == []


def test_a_job_needs_a_name_of_at_most_128_characters() -> None:
    (none,), (long,) = of_job(name=""), of_job(name="x" * 129)
    assert (none.path, none.rule, none.reason) == ("display_name", "display-name", "it is missing.")
    assert "Name the job" in none.fix
    assert "129 characters" in long.reason
    assert "Shorten it" in long.fix
    assert of_job(name="ü" * 128) == []


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({"Team": "a"}, "the key 'Team' holds 'T'"),
        ({"team": "Vision"}, "the value 'Vision' holds 'V'"),
        ({"team": "a.b"}, "holds '.'"),
        ({"team": "x" * 64}, "the value has 64 characters"),
        ({"x" * 64: "a"}, "the key has 64 characters"),
        ({"1team": "a"}, "does not begin with a letter"),
        ({"": "a"}, "does not begin with a letter"),
    ],
)
def test_a_label_that_is_not_taken_is_refused(labels: dict[str, str], words: str) -> None:
    (finding,) = of_job(labels)
    assert finding.path == f"labels[{next(iter(labels))!r}]"
    assert words in finding.reason
    assert "lower-case letters" in finding.fix


def test_the_label_that_the_service_sets_itself_is_a_warning_to_remove_it() -> None:
    (finding,) = of_job({"vertex-ai-pipelines-run-billing-id": "123", "goog-ccm": "true"})
    assert (finding.rule, finding.severity) == ("label-reserved", "warning")
    assert finding.path == "labels['vertex-ai-pipelines-run-billing-id']"
    assert finding.fix == "Remove it: the service sets it."


def test_labels_of_any_language_are_taken_up_to_64() -> None:
    assert of_job({"équipe": "видение-2", "run_id": "", "when": "{{$.inputs.x}}"}) == []
    assert of_job({"k" * 63: "v" * 63}) == []
    assert of_job({f"k{index}": "v" for index in range(64)}) == []
    assert [each.rule for each in of_job({f"k{index}": "v" for index in range(65)})] == ["label-count"]


@pytest.mark.parametrize("key", ["", "k", f"{KEY}/cryptoKeyVersions/1", "projects/p/keyRings/r/cryptoKeys/k"])
def test_a_key_has_its_full_name(key: str) -> None:
    (finding,) = of_job(key=key)
    assert finding.path == "encryption_spec.kms_key_name"
    assert "keyRings/<ring>/cryptoKeys/<key>" in finding.fix
    assert of_job(key=KEY) == []


def test_paths_of_a_job_begin_at_the_job() -> None:
    spec = CustomJobSpec(worker_pool_specs=job().worker_pool_specs, network="n", scheduling=RESTARTS)
    (finding,) = check_custom_job(CustomJob(display_name="j", job_spec=spec), Context())
    assert finding.path == "job_spec.network"

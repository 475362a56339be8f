"""Versions and aliases in the Model Registry."""

import functools

import pytest
from google.api_core.exceptions import PermissionDenied

from penstock_components.launchers import register_model
from penstock_components.launchers.registry import Registry, label_value
from penstock_components.launchers.verdict import Thresholds, Verdict
from unit.penstock_components.launchers.model_registry import LOCATION, PARENT, PROJECT

PLACES = {"outputs": ["registered"], "returns": ["resource_name", "version_id", "aliases"]}
MODEL = f"{PARENT}/models/llama"


@pytest.fixture
def register(bed, open_registry):
    """Runs the task for a run's name; `champion` is the version that the gate compared with."""

    def run(run_name, *, promote=False, champion="", floors_passed=True, judged="", **change):
        verdict = Verdict(
            floors_passed=floors_passed,
            beats_champion=promote,
            reasons=("first reason.", "second reason."),
            challenger_uri=judged or f"gs://b/{run_name}/model",
            champion_name=champion,
            thresholds=Thresholds(
                min_improvement_over_unigram=0, max_bits_per_byte=0, min_improvement_over_champion=0
            ),
        )
        parameters = {
            "model_id": "llama", "display_name": "", "description": "A small llama",
            "serving_image": "us-docker.pkg.dev/p/r/vllm:1", "run_name": run_name, "project": PROJECT,
            "location": LOCATION, **change,
        }  # fmt: skip
        inputs = {
            "model": f"gs://b/{run_name}/model",
            "verdict": bed.write("verdict.json", verdict.to_json()),
        }
        main = functools.partial(register_model.main, open_registry=open_registry)
        return bed.run(main, parameters, inputs=inputs, **PLACES)

    return run


def test_a_verdict_about_another_model_registers_nothing(register, service, capsys):
    assert register("run-1", judged="gs://b/other/model") == 1
    assert "the verdict is about gs://b/other/model" in capsys.readouterr().err
    assert service.models == {}


def test_a_model_that_the_gate_refused_is_not_registered(register, service, capsys):
    assert register("run-1", floors_passed=False) == 1
    assert "the gate refused gs://b/run-1/model" in capsys.readouterr().err
    assert service.models == {}


def test_the_first_version_creates_the_model(bed, register, service):
    assert register("run-1") == 0
    assert service.aliases("llama") == {"1": {"challenger", "default"}}
    assert bed.parameter("resource_name") == f"{MODEL}@1"
    assert bed.parameter("version_id") == "1"
    assert bed.parameter("aliases") == "challenger,default"
    (artifact,) = bed.output()["artifacts"]["registered"]["artifacts"]
    assert artifact["metadata"] == {"resourceName": f"{MODEL}@1"}
    assert artifact["uri"] == f"https://{LOCATION}-aiplatform.googleapis.com/v1/{MODEL}@1"


def test_what_is_uploaded_can_be_served_and_traced(register, service):
    assert register("run-1") == 0
    model = service.models[MODEL]["1"]
    assert (model.display_name, model.description) == ("llama", "A small llama")
    assert model.version_description == "first reason. second reason."
    assert model.artifact_uri == "gs://b/run-1/model"
    assert dict(model.labels) == {"penstock-run": "run-1"}
    container = model.container_spec
    assert container.image_uri == "us-docker.pkg.dev/p/r/vllm:1"
    assert "--model=$(AIP_STORAGE_URI)" in container.args
    assert f"--port={container.ports[0].container_port}" in container.args
    assert (container.predict_route, container.health_route) == ("/generate", "/ping")
    assert container.shared_memory_size_mb == 16384
    assert container.deployment_timeout.total_seconds() == 7200


def test_a_later_version_takes_challenger_and_leaves_champion_and_default(register, service):
    assert register("run-1", promote=True) == 0
    assert register("run-2", champion=f"{MODEL}@1") == 0
    assert service.aliases("llama") == {"1": {"champion", "default"}, "2": {"challenger"}}


def test_promotion_moves_champion_and_default_in_one_request(register, service):
    assert register("run-1", promote=True) == 0
    assert register("run-2", promote=True, champion=f"{MODEL}@1") == 0
    assert service.aliases("llama") == {"1": set(), "2": {"challenger", "champion", "default"}}
    assert service.merges[-1] == ["challenger", "champion", "default"]


def test_a_retry_adopts_the_version_of_its_run(bed, register, service):
    assert register("run-1", promote=True) == 0
    merges = len(service.merges)
    assert register("run-1", promote=True) == 0
    assert service.aliases("llama") == {"1": {"challenger", "champion", "default"}}
    assert len(service.merges) == merges
    assert bed.parameter("version_id") == "1"


def test_a_retry_after_the_upload_still_moves_the_aliases(register, service, open_registry):
    assert register("run-1", promote=True) == 0
    registry = open_registry(project=PROJECT, location=LOCATION)
    model = {"display_name": "llama", "artifact_uri": "gs://b/m", "labels": {"penstock-run": "run-2"}}
    registry.upload("llama", model)
    assert register("run-2", promote=True, champion=f"{MODEL}@1") == 0
    assert service.aliases("llama") == {"1": set(), "2": {"challenger", "champion", "default"}}


def test_a_champion_that_the_gate_has_not_seen_is_not_replaced(register, service, caplog):
    assert register("run-1", promote=True) == 0
    assert register("run-2", promote=True, champion=f"{MODEL}@1") == 0
    assert register("run-3", promote=True, champion=f"{MODEL}@1") == 0
    assert service.aliases("llama") == {"1": set(), "2": {"champion", "default"}, "3": {"challenger"}}
    assert (
        f"not promoted: the gate compared with champion '{MODEL}@1', by now it is '{MODEL}@2'" in caplog.text
    )


def test_a_refusal_of_the_service_is_told_without_a_traceback(register, service, capsys):
    service.refusal = PermissionDenied("no access")
    assert register("run-1") == 1
    error = capsys.readouterr().err
    assert error.startswith(f"RegistryError: listing the versions of {MODEL} failed: 403 no access.")
    assert "roles/aiplatform.user" in error


@pytest.mark.parametrize("model_id", ["", "Llama", "1llama", "a" * 64, "a/b"])
def test_an_impossible_model_id_is_told_before_anything_is_uploaded(register, service, capsys, model_id):
    assert register("run-1", model_id=model_id) == 1
    assert f"InputError: model_id = {model_id!r} is not valid" in capsys.readouterr().err
    assert not service.models


def test_an_alias_finds_its_version_and_nothing_finds_none(register, service):
    registry = Registry(service, project=PROJECT, location=LOCATION)
    assert registry.find_version("llama", "champion") is None
    assert register("run-1") == 0
    assert registry.find_version("llama", "champion") is None
    found = registry.find_version("llama", "challenger")
    assert found.resource_name == f"{MODEL}@1"
    assert found.artifact_uri == "gs://b/run-1/model"


@pytest.mark.parametrize("name", ["pretrain-20261121_1", "a" * 63])
def test_a_name_that_is_a_label_stays_as_it_is(name):
    assert label_value(name) == name


def test_names_that_must_change_stay_apart():
    names = ["Run.1", "Run-1", "run.1", "a" * 64, "a" * 65]
    labels = [label_value(name) for name in names]
    assert len(set(labels)) == len(names)
    assert all(len(label) <= 63 and label == label.lower() for label in labels)

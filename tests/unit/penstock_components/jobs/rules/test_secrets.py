"""Secrets are found by name and by shape, are never told, and what only looks like one is left alone."""

from __future__ import annotations

import json
import time

import pytest

from penstock_components.jobs.messages import CustomJobSpec, EnvVar
from penstock_components.jobs.rules.secrets import hides
from unit.penstock_components.jobs.rules.specs import (
    PACKAGE,
    container,
    findings,
    job,
    only,
    pool,
    refused,
    warned,
    with_command,
    with_env,
)

LETTERS = "aB3dE5gH7jK9mN1pQ2sT4vW6yZ8bC0dF2hJ4kL6nP8rS0tV2xY4"
"""Of which the made-up secrets below are cut."""
SHAPES = {
    "a Google API key": f"AIza{LETTERS[:35]}",
    "a Google OAuth token": f"ya29.{LETTERS}",
    "a GitHub token": f"ghp_{LETTERS[:36]}",
    "a Slack token": f"xoxb-{LETTERS[:24]}",
    "a Hugging Face token": f"hf_{LETTERS[:34]}",
    "an AWS access key": "AKIA" + "ABCDEFGH23456789",
    "an API key (sk-...)": f"sk-{LETTERS[:40]}",
    "a private key": "-----BEGIN RSA " + "PRIVATE KEY-----\nMII",
    "a service account's key": json.dumps({"type": "service_account", "project_id": "p"}),
    "a JSON web token": f"eyJ{LETTERS[:20]}.eyJ{LETTERS[:20]}.{LETTERS[:20]}",
    "a webhook's URL": f"https://hooks.slack.com/services/T0000/B0000/{LETTERS[:24]}",
    "a bearer token": f"Bearer {LETTERS[:24]}",
    "a password in a URL": f"postgres://user:{LETTERS[:12]}@10.0.0.5/db",
}


@pytest.mark.parametrize("kind", SHAPES)
def test_a_secret_is_known_by_its_shape_wherever_it_stands(kind: str) -> None:
    value = SHAPES[kind]
    for spec, path in (
        (with_env(SETTING=value), "env[0]"),
        (with_command("train", args=(f"--setting={value}",)), "args[0]"),
        (with_command("train", args=("--setting", value)), "args[1]"),
        (with_command("bash", "-c", f"A={value} exec train"), "command[2]"),
    ):
        finding = only(spec)
        assert (finding.path, finding.rule) == (f"worker_pool_specs[0].container_spec.{path}", "secret")
        assert kind in finding.reason
        assert value not in finding.told()
        assert LETTERS[:8] not in finding.told()


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "DB_PASSWORD",
        "db_password",
        "MY_SECRET",
        "clientSecret",
        "AWS_SECRET_ACCESS_KEY",
        "COMET_APIKEY",
        "SSH_PRIVATE_KEY",
        "CREDENTIALS",
        "MLFLOW_TRACKING_PASSWORD",
        "wandb-key",
        "OPENAI_KEY",
        "AZURE_STORAGE_KEY",
        "PGPASSWORD",
        "MYSQL_PWD",
        "GH_PAT",
    ],
)
def test_a_secret_is_known_by_its_name(name: str) -> None:
    spec = with_env(**{name: "s3cr3t-value"})
    path = "worker_pool_specs[0].container_spec.env[0]"
    refused(
        spec, path, "secret", f"{name} is a secret by its name (12 characters)", "Secret Manager", "projects/"
    )
    assert "s3cr3t" not in only(spec).told()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZER", "gpt2"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("MAX_TOKENS", "4096"),
        ("TOKENS_PER_STEP", "524288"),
        ("EOS_TOKEN", "<|endoftext|>"),
        ("PAD_TOKEN_ID", "0"),
        ("TOKEN_LIMIT", "1000"),
        ("USE_TOKEN", "true"),
        ("SECRET_NAME", "wandb"),
        ("SECRET_VERSION", "3"),
        ("TOKEN_FILE", "x"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/gcs/bucket/key.json"),
        ("API_KEY_PATH", "x"),
        ("CREDENTIALS_URI", "gs://b/c"),
        ("WANDB_API_KEY", "projects/1/secrets/wandb/versions/latest"),
        ("HF_TOKEN", "projects/my-project/secrets/hf"),
        ("HF_TOKEN", "sm://p/hf"),
        ("HF_TOKEN", "gcp-secretmanager://p/hf/latest"),
        ("SECRET_MANAGER_PROJECT", "p"),
        ("CREDENTIALS_MODE", "adc"),
        ("API_KEY_HEADER", "X-Key"),
        ("SORT_KEY", "date"),
        ("STORAGE_KEY", "runs/a.parquet"),
        ("COMET_EXPERIMENT_KEY", "run-1"),
        ("IMAGE_KEY", "png"),
        ("PWD", "app"),
        ("OLDPWD", "app"),
        ("LR_PAT", "plateau"),
        ("AUTH", "Bearer $TOKEN"),
        ("SCHEME", "bearer authentication"),
        ("PAGE", "https://slack.com/services/new-and-longer"),
        ("HF_TOKEN", ""),
        ("COMMIT", "9fceb02d0ae598e95dc970b74767f19372d61af8"),
        ("KEYBOARD", "qwerty"),
        ("PRIMARY_KEY", "id"),
        ("DATA", "https://example.org:8080/a@b"),
        ("MONKEY_TYPE", "x"),
        ("CONFIG", '{"tokenizer": "gpt2", "max_tokens": 3}'),
        ("CONFIG", '{"hf_token": "{{$.inputs.parameters[\'token\']}}", "lr": 1}'),
        ("TOKEN_DROPOUT", "0.1"),
        ("TOKEN_POOLING", "mean"),
        ("HF_TOKEN", "0"),
        ("ARGS", "--tokenizer gpt2 --eos-token </s>"),
        ("ARGS", "TOKEN=os.environ['HF_TOKEN']"),
    ],
)
def test_what_is_no_secret_is_left_alone(name: str, value: str) -> None:
    assert findings(with_env(**{name: value})) == []


@pytest.mark.parametrize(
    ("args", "place"),
    [
        (("--wandb-key=abcdef",), 0),
        (("--wandb_api_key", "abcdef"), 1),
        (("--lr=1", "--hf-token=abcdef"), 1),
        (("-password=abcdef",), 0),
        (('--config={"wandb": {"api_key": "abcdef"}}',), 0),
        (('--config={"api_key": "abcdef", "lr": {{$.inputs.parameters["lr"]}}}',), 0),
        ((r"--config={\"api_key\": \"abcdef\"}",), 0),
    ],
)
def test_a_secret_among_the_arguments_is_refused(args: tuple[str, ...], place: int) -> None:
    path = f"worker_pool_specs[0].container_spec.args[{place}]"
    refused(with_command("train", args=args), path, "secret", "by its name", "Secret Manager")
    assert "abcdef" not in only(with_command("train", args=args)).told()


@pytest.mark.parametrize(
    "line",
    [
        "export HF_TOKEN=abcdef; train",
        "train --api-key=abcdef",
        "train --token abcdef",
        "train --secret=abcdef",
        "gcloud secrets list; HF_TOKEN=abcdef train",
    ],
)
def test_a_secret_in_a_line_for_a_shell_is_refused(line: str) -> None:
    path = "worker_pool_specs[0].container_spec.command[2]"
    refused(with_command("bash", "-c", line), path, "secret", "it holds", "a secret by its name")


@pytest.mark.parametrize(
    "line",
    [
        "HF_TOKEN=$(gcloud secrets versions access latest --secret=hf) exec train",
        'train --token="$HF_TOKEN"',
        "train --tokenizer gpt2 --max-tokens=3 --secret-name=hf",
    ],
)
def test_a_line_that_fetches_its_secret_is_left_alone(line: str) -> None:
    assert findings(with_command("bash", "-c", line)) == []


def test_a_python_package_is_looked_through_as_well() -> None:
    package = PACKAGE.__class__(
        executor_image_uri=PACKAGE.executor_image_uri,
        package_uris=PACKAGE.package_uris,
        python_module="trainer.task",
        env=(EnvVar(name="HF_TOKEN", value="abcdef"),),
    )
    path = "worker_pool_specs[0].python_package_spec.env[0]"
    refused(job(pool(python_package_spec=package)), path, "secret", "HF_TOKEN")


@pytest.mark.parametrize("value", ["--wandb-key=abcdef --lr=1", '{"api_key": "abcdef"}'])
def test_a_secret_inside_a_variable_is_refused_under_the_variables_name(value: str) -> None:
    path = "worker_pool_specs[0].container_spec.env[0]"
    refused(with_env(EXTRA=value), path, "secret", "EXTRA holds", "a secret by its name")
    assert "abcdef" not in only(with_env(EXTRA=value)).told()


def test_a_secret_between_placeholders_is_found() -> None:
    path = "worker_pool_specs[0].container_spec.env[0]"
    value = f"{{{{$.inputs.parameters['a']}}}} {SHAPES['a GitHub token']}"
    refused(with_env(SETTING=value), path, "secret", "a GitHub token")


@pytest.mark.parametrize("part", ["eyJ-", "-eyJaaaaaaaaaa", "a://", '"a": "', "--a ", "type :", "projects/"])
def test_a_long_text_is_looked_through_in_one_pass(part: str) -> None:
    spec = with_command("bash", "-c", args=(part * (2**17 // len(part)),))
    started = time.process_time()
    findings(spec)
    assert (
        time.process_time() - started < 3
    )  # about 0.1 s; a pattern that starts over at each word takes minutes


def test_each_secret_of_a_job_is_told() -> None:
    env = (EnvVar(name="HF_TOKEN", value="abcdef"), EnvVar(name="DB_PASSWORD", value="abcdef"))
    spec = job(pool(container_spec=container(env=env, args=("--api-key=abcdef",))))
    assert [each.rule for each in findings(spec)] == ["secret"] * 3


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        (with_env(WANDB_API_KEY="{{$.inputs.parameters['key']}}"), "env[0]"),
        (with_env(HF_TOKEN="{{$.inputs.parameters['token']}}"), "env[0]"),
        (with_command("train", args=("--hf-token={{$.inputs.parameters['token']}}",)), "args[0]"),
        (with_command("train", args=("--hf-token", "{{$.inputs.parameters['token']}}")), "args[1]"),
    ],
)
def test_a_pipeline_parameter_for_a_secret_is_a_warning_that_it_stands_in_clear(
    spec: CustomJobSpec, path: str
) -> None:
    words = ("in clear", "pipeline", "Secret Manager")
    warned(spec, f"worker_pool_specs[0].container_spec.{path}", "secret-parameter", *words)


def test_a_pipeline_parameter_that_names_a_secret_is_left_alone() -> None:
    assert findings(with_env(WANDB_SECRET_NAME="{{$.inputs.parameters['name']}}")) == []
    assert findings(with_env(HF_TOKEN="projects/1/secrets/{{$.inputs.parameters['name']}}")) == []


def test_what_must_not_be_shown_is_told_by_name_or_by_shape() -> None:
    for name in ("HF_TOKEN", "--hf-token", "wandb_api_key"):
        assert hides(name, "abcdef")
        assert not hides(name, "projects/1/secrets/hf/versions/latest")
    assert hides("EXTRA", f"ghp_{LETTERS[:36]}")
    assert hides("config", '{"api_key": "abcdef"}')
    assert not hides("--lr", "0.1")
    assert not hides("TOKENIZER", "gpt2")

"""Scores, metrics and the report."""

import functools
import json
import re
import sys
from html.parser import HTMLParser

import pytest

from penstock_components.launchers import evaluate
from penstock_components.launchers.evaluation import Evaluation
from penstock_trainer.contract.checkpoint import CheckpointObject, Manifest
from penstock_trainer.contract.dataset import DatasetManifest, DatasetObject, Source, TokenizerInfo
from penstock_trainer.contract.events import EvaluationEvent, StepEvent, measurements_to_jsonl
from penstock_trainer.contract.export import ExportManifest
from unit.penstock_components.launchers.model_registry import LOCATION, PARENT, PROJECT

PLACES = {"outputs": ["metrics", "report", "evaluation"]}

# Stands in for torch: scores a model by the number in its weights file, like any scorer on the command line.
SCORER = """
import argparse, json, pathlib, urllib.parse
parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--model", action="append", required=True)
parser.add_argument("--output", required=True)
parser.add_argument("--max-bytes", type=int, default=0)
options = parser.parse_args()
models = []
for uri in options.model:
    bits = float(pathlib.Path(urllib.parse.urlsplit(uri).path, "weights").read_text())
    models.append({"uri": uri, "bits_per_byte": bits, "loss": bits, "perplexity": 2**bits, "tokens": 10, "documents": 3})
scores = {"documents": 3, "bytes": options.max_bytes or 100, "unigram": {"bits_per_byte": 4.0, "loss": 5.5}, "models": models}
print("scored", len(models))
pathlib.Path(options.output).write_text(json.dumps(scores))
"""


@pytest.fixture
def trained(bed):
    """A dataset, a checkpoint and an export that refers to them."""
    held_out = DatasetObject(
        name="eval/documents-00000.jsonl", size=9, crc32c="", documents=3, tokens=0, text_bytes=100
    )
    shard = DatasetObject(
        name="train/shard-00000.tokens", size=9, crc32c="", documents=8, tokens=1234, text_bytes=900
    )
    dataset = DatasetManifest(
        format_version=1,
        token_type="uint16",
        tokenizer=TokenizerInfo(sha256="ab" * 32, vocab_size=320, eos_id=0),
        train=(shard,),
        evaluation=(held_out,),
        token_counts=shard,
        sources=(Source(uri="gs://b/raw/a", generation=1, size=1, crc32c=""),),
        filters={"empty": 2},
    )
    bed.write("dataset/manifest.json", dataset.to_json())
    checkpoint = Manifest(
        format_version=1,
        step=20,
        samples_seen=1,
        tokens_seen=1280,
        config={},
        config_hash="c0ffee",
        tokenizer_sha256="ab" * 32,
        strategy="zero2",
        world_size=4,
        versions={"torch": "2.13.0", "deepspeed": "0.19.8"},
        attempt="a1",
        fencing_token=1,
        index="index.json",
        objects=(CheckpointObject(name="index.json", generation=1, size=1, crc32c="", sha256=""),),
    )
    bed.write("step-00000020/manifest.json", checkpoint.to_json())
    bed.write("scorer.py", SCORER)
    return bed


def export(bed, name, bits_per_byte, *, losses=(6.0, 5.0, 4.5), rate=0.003):
    """A model whose weights say how good it is."""
    manifest = ExportManifest(
        format_version=1,
        step=20,
        tokens_seen=1280,
        num_parameters=99_000,
        config={"optim": {"learning_rate": rate}, "steps": 20},
        config_hash="c0ffee",
        dataset_uri=bed.uri("dataset"),
        world_size=4,
        attempt="a1",
        checkpoint_uri=bed.uri("step-00000020"),
        objects=(),
    )
    bed.write(f"{name}/manifest.json", manifest.to_json())
    bed.write(f"{name}/weights", str(bits_per_byte))
    events = [
        StepEvent(
            step=10 * step, steps=20, loss=loss, learning_rate=1e-3, grad_norm=1.0, tokens_per_second=5e2
        )
        for step, loss in enumerate(losses)
    ]
    scored = EvaluationEvent(step=20, loss=5.1, accuracy=0.2, targets=64, best=True, seconds=0.5)
    bed.write(f"{name}/metrics.jsonl", measurements_to_jsonl([*events, scored]).decode())
    return bed.uri(name)


@pytest.fixture
def score(trained, open_registry):
    """Runs the task on a model's URI."""

    def run(model_uri, *, scorer=None, **change):
        parameters = {
            "dataset_uri": trained.uri("dataset"),
            "model_id": "llama",
            "max_bytes": 0,
            "project": PROJECT,
            "location": LOCATION,
            **change,
        }
        scorer = scorer or (sys.executable, str(trained.root / "scorer.py"))
        main = functools.partial(evaluate.main, scorer=scorer, open_registry=open_registry)
        return trained.run(main, parameters, inputs={"model": model_uri}, **PLACES)

    return run


def crown(service, uri):
    """Make the model at `uri` the registry's champion."""
    model = {"artifact_uri": uri, "version_aliases": ["champion"]}
    service.upload_model(request={"parent": PARENT, "model_id": "llama", "model": model})


def evaluation_of(bed):
    return Evaluation.from_json(bed.artifact("evaluation").read_bytes())


class Page(HTMLParser):
    """What the report shows and what it would load."""

    def __init__(self, html):
        super().__init__()
        self.text, self.loads, self.tags = "", [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        local = ("#", "data:")
        self.loads += [
            value
            for name, value in attributes
            if name in ("src", "href", "xlink:href") and not value.startswith(local)
        ]

    def handle_data(self, data):
        self.text += data


def page_of(bed):
    return Page(bed.artifact("report").read_text())


def test_without_a_champion_only_the_model_is_scored(trained, score):
    uri = export(trained, "model", 3.0)
    assert score(uri) == 0
    told = evaluation_of(trained)
    assert (told.challenger.uri, told.challenger.bits_per_byte) == (uri, 3.0)
    assert (told.champion, told.champion_name) == (None, "")
    assert trained.metadata("metrics") == {
        "bits_per_byte": 3.0,
        "loss": 3.0,
        "perplexity": 8.0,
        "unigram_bits_per_byte": 4.0,
        "improvement_over_unigram": 0.25,
    }


def test_the_champion_is_scored_beside_the_model(trained, score, service):
    crown(service, export(trained, "champion", 2.5))
    assert score(export(trained, "model", 3.0)) == 0
    told = evaluation_of(trained)
    assert (told.challenger.bits_per_byte, told.champion.bits_per_byte) == (3.0, 2.5)
    assert told.champion_name == f"{PARENT}/models/llama@1"
    assert trained.metadata("metrics")["champion_bits_per_byte"] == 2.5
    assert f"{PARENT}/models/llama@1" in page_of(trained).text


def test_the_limit_on_bytes_reaches_the_scorer(trained, score):
    assert score(export(trained, "model", 3.0), max_bytes=64) == 0
    assert evaluation_of(trained).bytes == 64


def test_a_score_that_is_not_finite_is_null_and_no_metric(trained, score):
    assert score(export(trained, "model", "nan")) == 0
    assert evaluation_of(trained).challenger.bits_per_byte is None
    assert trained.metadata("metrics") == {"unigram_bits_per_byte": 4.0}
    assert "not finite" in page_of(trained).text


def test_the_report_tells_where_everything_comes_from(trained, score):
    uri = export(trained, "model", 3.0)
    assert score(uri) == 0
    text = page_of(trained).text
    for told in (
        uri, "25.0% better", "no champion yet", "1,234 tokens in 1 shards", "320 ids", "dropped: empty",
        "optim.learning_rate", "0.003", "2.13.0", "0.19.8", trained.uri("step-00000020"), "c0ffee", "99,000 parameters",
    ):  # fmt: skip
        assert told in text, told


def test_the_report_draws_the_losses_and_the_baseline(trained, score):
    assert score(export(trained, "model", 3.0)) == 0
    page = page_of(trained)
    assert page.tags.count("svg") == 1
    assert "training loss" in page.text
    assert "held-out loss" in page.text
    assert "unigram baseline" in page.text
    assert "last: loss 4.5000" in page.text
    svg = re.search(r"<svg [^>]*>", trained.artifact("report").read_text()).group()
    assert "viewBox" in svg
    assert " width=" not in svg


def test_the_report_loads_nothing(trained, score):
    assert score(export(trained, "model", 3.0)) == 0
    page = page_of(trained)
    assert page.loads == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    html = trained.artifact("report").read_text()
    assert "@import" not in html
    assert all(match.startswith("#") for match in re.findall(r"url\(([^)]*)\)", html))


def test_the_report_escapes_what_it_shows(trained, score):
    assert score(export(trained, "model", 3.0, rate="<script>alert(1)</script>")) == 0
    page = page_of(trained)
    assert "<script>alert(1)</script>" in page.text
    assert "script" not in page.tags


def test_the_same_inputs_give_the_same_report(trained, score):
    uri = export(trained, "model", 3.0)
    reports = []
    for _ in range(2):
        assert score(uri) == 0
        reports.append(trained.artifact("report").read_bytes())
    assert reports[0] == reports[1]


def test_a_retry_adopts_the_scores_of_the_same_models_only(trained, score, service):
    uri = export(trained, "model", 3.0)
    assert score(uri) == 0
    broken = trained.root / "broken.py"
    broken.write_text("raise SystemExit(1)")
    (trained.root / "artifacts" / "report").unlink()
    assert score(uri, scorer=(sys.executable, str(broken))) == 0
    assert "25.0% better" in page_of(trained).text
    crown(service, export(trained, "champion", 2.5))
    assert score(uri) == 0
    assert evaluation_of(trained).champion.bits_per_byte == 2.5


def test_the_report_says_what_is_missing(trained, score):
    uri = export(trained, "model", 3.0)
    (trained.root / "model/metrics.jsonl").unlink()
    (trained.root / "step-00000020/manifest.json").unlink()
    assert score(uri) == 0
    text = page_of(trained).text
    assert "The export has no logged steps." in text
    assert "not recorded" in text


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise SystemExit(3)", "failed with exit code 3"),
        ("", "its output is not scores"),
        ("open(sys.argv[-1].split('=')[1], 'w').write('{}')", "its output is not scores"),
    ],
)
def test_a_scorer_that_fails_is_told_and_nothing_is_handed_back(trained, score, capsys, program, message):
    path = trained.root / "bad.py"
    path.write_text(f"import sys\n{program}\n")
    assert score(export(trained, "model", 3.0), scorer=(sys.executable, str(path))) == 1
    assert message in capsys.readouterr().err
    assert not trained.has_output()


def test_scores_of_other_models_are_refused(trained, score, capsys):
    other = json.dumps(
        {"documents": 1, "bytes": 1, "unigram": {"bits_per_byte": 4.0, "loss": 5.5}, "models": []}
    )
    path = trained.root / "other.py"
    path.write_text(f"import sys\nopen(sys.argv[-1].split('=')[1], 'w').write({other!r})\n")
    assert score(export(trained, "model", 3.0), scorer=(sys.executable, str(path))) == 1
    assert "asked for scores of" in capsys.readouterr().err


def test_a_model_without_its_manifest_is_told_by_its_uri(trained, score, capsys):
    assert score(trained.uri("nowhere")) == 1
    uri = trained.uri("nowhere", "manifest.json")
    assert f"ContractFileError: {uri} does not exist" in capsys.readouterr().err

"""The launchers around the real scorer: what is staged and exported can be evaluated and judged."""

import functools
import hashlib
import json
import random

import pytest

from penstock_components.launchers import evaluate, gate, stage_data
from penstock_components.launchers.evaluation import Evaluation
from penstock_components.launchers.sources import fingerprint_of, list_sources
from penstock_trainer.contract.config import JobConfig, ModelConfig
from penstock_trainer.contract.dataset import DatasetManifest
from penstock_trainer.contract.export import ExportManifest
from penstock_trainer.export import write_export
from penstock_trainer.model.decoder import Decoder
from unit.penstock_components.launchers.model_registry import LOCATION, PARENT, PROJECT


def staged(bed):
    words = ["turbine", "water", "pipe", "head", "gate", "<|endoftext|>"]
    draw = random.Random(0)
    rows = [json.dumps({"text": " ".join(draw.choices(words, k=30))}) for _ in range(60)]
    bed.write("raw/a.jsonl", "\n".join(rows))
    source_uri = bed.uri("raw") + "/"
    parameters = {
        "source_uri": source_uri,
        "fingerprint": fingerprint_of(list_sources(source_uri)),
        "vocab_size": 300,
        "tokenizer_uri": "",
        "eval_fraction": 0.2,
        "required_tokens": 0,
    }
    places = {"outputs": ["dataset"], "returns": ["uri", "train_tokens"]}
    assert bed.run(stage_data.main, parameters, **places) == 0
    return bed.parameter("uri")


def exported(bed, name, dataset_uri, *, seed):
    """An untrained model, exported by the trainer's own code."""
    config = ModelConfig(dim=32, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=64)
    dataset = DatasetManifest.from_json(bed.artifact("dataset", "manifest.json").read_bytes())
    model = Decoder(config, dataset.tokenizer.vocab_size)
    model.initialize(seed)
    job = JobConfig(model=config, steps=30)
    write_export(
        bed.uri(name),
        weights=model.state_dict(),
        model=model,
        seq_len=32,
        dataset_uri=dataset_uri,
        dataset=dataset,
        metrics=b"",
        manifest_of=lambda objects: ExportManifest(
            format_version=1,
            step=0,
            tokens_seen=0,
            num_parameters=1,
            config=json.loads(job.to_json()),
            config_hash=job.hash,
            dataset_uri=dataset_uri,
            world_size=1,
            attempt="a",
            checkpoint_uri=bed.uri("step-00000000"),
            objects=objects,
        ),
        check_owner=lambda: None,
    )
    return bed.uri(name)


@pytest.fixture
def evaluated(bed, service, open_registry):
    """The evaluation of an untrained model against a champion that is its equal, bit for bit."""
    dataset_uri = staged(bed)
    champion = exported(bed, "champion", dataset_uri, seed=1)
    model = {"artifact_uri": champion, "version_aliases": ["champion"]}
    service.upload_model(request={"parent": PARENT, "model_id": "llama", "model": model})
    parameters = {
        "dataset_uri": dataset_uri,
        "model_id": "llama",
        "max_bytes": 0,
        "project": PROJECT,
        "location": LOCATION,
    }
    status = bed.run(
        functools.partial(evaluate.main, open_registry=open_registry),
        parameters,
        inputs={"model": exported(bed, "model", dataset_uri, seed=1)},
        outputs=["metrics", "report", "evaluation"],
    )
    assert status == 0
    return bed


def test_the_real_scorer_scores_both_models_and_the_gate_does_not_promote_an_equal_one(evaluated):
    told = Evaluation.from_json(evaluated.artifact("evaluation").read_bytes())
    weights = [(evaluated.root / name / "model.safetensors").read_bytes() for name in ("model", "champion")]
    assert len({hashlib.sha256(data).digest() for data in weights}) == 1
    assert told.challenger.bits_per_byte == told.champion.bits_per_byte > 0
    assert told.unigram.bits_per_byte > 0
    thresholds = {
        "min_improvement_over_unigram": -10.0,
        "max_bits_per_byte": 0.0,
        "min_improvement_over_champion": 0.0,
    }
    status = evaluated.run(
        gate.main,
        thresholds,
        inputs={"evaluation": evaluated.uri("artifacts", "evaluation")},
        outputs=["verdict"],
        returns=["register", "promote"],
    )
    assert status == 0
    assert (evaluated.parameter("register"), evaluated.parameter("promote")) == ("true", "false")

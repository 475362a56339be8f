"""Exports as transformers loads them, and their score against a direct computation with transformers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)

from distributed.tiny_dataset import EOS, VOCAB_SIZE, build_dataset
from distributed.tiny_run import tiny_config
from penstock_trainer.contract.checkpoint import Manifest
from penstock_trainer.contract.config import EvaluationConfig, ModelConfig
from penstock_trainer.contract.events import ProgressEvent, parse_event
from penstock_trainer.contract.export import ExportManifest
from penstock_trainer.data.held_out import windows_of
from penstock_trainer.data.shards import read_manifest
from penstock_trainer.errors import ExportError, ModelError
from penstock_trainer.evaluate import main, read_documents
from penstock_trainer.export import read_export
from penstock_trainer.rank import run_rank
from penstock_trainer.rank_env import RankEnv

SEQ_LEN = 32


class Trained:
    """Models of every kind that can be exported, and the report on them.

    The first two are the built-in decoder, trained for a few steps and for none to speak of.
    """

    def __init__(self, directory: Path) -> None:
        self.dataset = directory / "dataset"
        self.data_uri = build_dataset(self.dataset)
        gpt2 = GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
        )
        GPT2LMHeadModel(gpt2).save_pretrained(directory / "gpt2")
        bigram = ModelConfig(source="numerics.user_models:bigram", options={"vocab_size": VOCAB_SIZE})
        self.models = [
            self._train(directory / "long", 20),
            self._train(directory / "short", 4, tie_embeddings=True),
            self._train(directory / "transformers", 4, ModelConfig(source=str(directory / "gpt2"))),
            self._train(directory / "function", 4, bigram),
        ]
        report = directory / "report.json"
        uris = [f"--model={model.as_uri()}" for model in self.models]
        arguments = [f"--data={self.data_uri}", *uris, f"--output={report}", "--batch=3"]
        assert main(arguments) == 0
        self.report: dict[str, Any] = json.loads(report.read_text())
        self.documents = read_documents(self.data_uri, read_manifest(self.data_uri), max_bytes=None)
        self.num_bytes = sum(len(text.encode()) for text in self.documents)

    def _train(self, directory: Path, steps: int, model: ModelConfig | None = None, **shape: Any) -> Path:
        config = tiny_config(self.data_uri, (directory / "checkpoints").as_uri(), steps=steps)
        evaluation = EvaluationConfig(interval=steps, max_samples=0)
        config = replace(config, model=model or replace(config.model, **shape), evaluation=evaluation)
        env = RankEnv(
            omp_num_threads=1,
            model_dir=(directory / "model").as_uri(),
            result_file=directory.with_suffix(".json"),
        )
        assert run_rank([f"--config={config.to_json()}"], env) == 0
        end = json.loads(directory.with_suffix(".json").read_text())
        assert end == {"outcome": "done", "step": steps, "error": "", "traceback": ""}
        return directory / "model"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("evaluate"))


@pytest.mark.parametrize("index", [0, 1])
def test_transformers_loads_the_export_and_computes_the_same(trained: Trained, index: int) -> None:
    directory = trained.models[index]
    theirs, report = LlamaForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ours: Any = read_export(directory.as_uri()).model
    tokens = torch.randint(ours.vocab_size, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_the_exported_tokenizer_is_the_datasets_and_knows_its_end(trained: Trained) -> None:
    directory = trained.models[0]
    assert (directory / "tokenizer.json").read_bytes() == (trained.dataset / "tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = trained.documents[-1]
    assert tokenizer.eos_token == EOS
    assert (
        tokenizer(text)["input_ids"]
        == Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids
    )
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_manifest_names_all_that_is_there(trained: Trained) -> None:
    directory = trained.models[0]
    manifest = ExportManifest.from_json((directory / "manifest.json").read_text())
    files = {path.name for path in directory.iterdir()}
    assert {entry.name for entry in manifest.objects} | {"manifest.json"} == files
    theirs = LlamaForCausalLM.from_pretrained(directory)
    assert manifest.num_parameters == sum(weight.numel() for weight in theirs.parameters())
    assert (manifest.step, manifest.tokens_seen) == (20, 20 * 12 * SEQ_LEN)
    assert Path(manifest.checkpoint_uri.removeprefix("file://"), "manifest.json").exists()


def test_a_changed_export_is_refused(trained: Trained, tmp_path: Path) -> None:
    for path in trained.models[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(ExportError, match=r"model\.safetensors is not what was exported"):
        read_export(tmp_path.as_uri())
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ExportError, match="is not an exported model"):
        read_export(tmp_path.as_uri())


@pytest.mark.parametrize("index", range(4))
def test_the_last_evaluation_inside_of_training_says_the_same_of_the_export(
    trained: Trained, index: int
) -> None:
    directory = trained.models[index]
    export = ExportManifest.from_json((directory / "manifest.json").read_text())
    uri = f"{export.checkpoint_uri}/manifest.json"
    best = Manifest.from_json(Path(uri.removeprefix("file://")).read_text()).best
    assert best is not None
    # Other batches: fp32 sums in another order.
    assert trained.report["models"][index]["loss"] == pytest.approx(best.value, rel=1e-6)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_bits_per_byte_are_those_of_a_direct_computation(trained: Trained, index: int) -> None:
    nll, tokens = direct_nll(trained.models[index], trained.documents)
    score = trained.report["models"][index]
    assert score["uri"] == trained.models[index].as_uri()
    assert (score["documents"], score["bytes"], score["tokens"]) == (3, trained.num_bytes, tokens)
    # Sums of thousands of fp32 losses that differ by 1e-6 each.
    assert score["bits_per_byte"] == pytest.approx(nll / math.log(2) / trained.num_bytes, rel=1e-5)
    assert score["loss"] == pytest.approx(nll / tokens, rel=1e-5)
    assert score["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-4)


def direct_nll(directory: Path, documents: list[str]) -> tuple[float, int]:
    """One window after another, unbatched, by the rule in evaluate's docstring."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    nll, count = 0.0, 0
    for text in documents:
        eos = tokenizer.eos_token_id
        tokens = [eos, *tokenizer(text)["input_ids"], eos]
        for start in range(0, len(tokens) - 1, SEQ_LEN):
            window = torch.tensor([tokens[start : start + SEQ_LEN + 1]])
            with torch.no_grad():
                log_probabilities = model(window[:, :-1]).logits.double().log_softmax(-1)
            chosen = log_probabilities.gather(-1, window[:, 1:, None])
            nll -= chosen.sum().item()
            count += chosen.numel()
    return nll, count


def test_the_longer_trained_model_scores_better_and_the_baseline_is_the_unigram_entropy(
    trained: Trained,
) -> None:
    long, short, *_ = trained.report["models"]
    assert long["bits_per_byte"] < short["bits_per_byte"]
    counts = np.fromfile(trained.dataset / "train/token_counts.u64", dtype="<u8").tolist()
    tokenizer = Tokenizer.from_file(str(trained.dataset / "tokenizer.json"))
    ids = [
        token
        for text in trained.documents
        for token in [*tokenizer.encode(text).ids, tokenizer.token_to_id(EOS)]
    ]
    total = sum(counts) + len(counts)
    nll = -sum(math.log((counts[token] + 1) / total) for token in ids)
    unigram = trained.report["unigram"]
    assert unigram["loss"] == pytest.approx(nll / len(ids))
    assert unigram["bits_per_byte"] == pytest.approx(nll / math.log(2) / trained.num_bytes)


@pytest.mark.parametrize(("length", "expected"), [(1, []), (2, [2]), (5, [5]), (6, [5, 2]), (9, [5, 5])])
def test_windows_score_every_token_but_the_first_once(length: int, expected: list[int]) -> None:
    tokens = list(range(length))
    windows = list(windows_of(tokens, 4))
    assert [len(window) for window in windows] == expected
    assert [token for window in windows for token in window[1:]] == tokens[1:]


def test_a_limit_takes_whole_documents_and_at_least_one(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [len(text.encode()) for text in trained.documents]
    for limit, documents in ((1, 1), (sizes[0] + sizes[1], 2), (sum(sizes) - 1, 2)):
        output = tmp_path / "report.json"
        arguments = [
            f"--data={trained.data_uri}",
            f"--model={trained.models[1].as_uri()}",
            f"--output={output}",
        ]
        assert main([*arguments, f"--max-bytes={limit}"]) == 0
        report = json.loads(output.read_text())
        assert (report["documents"], report["bytes"]) == (documents, sum(sizes[:documents]))
    events = [parse_event(line) for line in capsys.readouterr().out.splitlines()]
    assert [isinstance(event, ProgressEvent) and event.done == event.total for event in events] == [True] * 3


def test_what_is_not_a_model_is_exit_code_1(trained: Trained, tmp_path: Path) -> None:
    arguments = [
        f"--data={trained.data_uri}",
        f"--model={tmp_path.as_uri()}",
        f"--output={tmp_path / 'report.json'}",
    ]
    assert main(arguments) == 1
    assert not (tmp_path / "report.json").exists()


def test_a_function_that_returns_another_model_by_now_is_refused(trained: Trained, tmp_path: Path) -> None:
    for path in trained.models[3].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["config"]["model"]["options"]["vocab_size"] += 1
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match=r"bigram returns a model of other weights .*: first\.weight differ"):
        read_export(tmp_path.as_uri())

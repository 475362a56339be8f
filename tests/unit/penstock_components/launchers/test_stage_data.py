"""From raw text to a dataset."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer

from penstock_components.launchers import stage_data
from penstock_components.launchers.documents import document_of
from penstock_components.launchers.series import ObjectSeries
from penstock_components.launchers.sources import fingerprint_of, list_sources
from penstock_components.launchers.tokenizer import Sample, train_tokenizer
from penstock_trainer.contract.dataset import DatasetManifest
from penstock_trainer.contract.events import ProgressEvent, parse_event
from penstock_trainer.storage import crc32c

PLACES = {"outputs": ["dataset"], "returns": ["uri", "train_tokens"]}
TEXTS = [
    f"Document {number} tells of {number % 7} foxes and <|endoftext|> dogs.\n" * 5 for number in range(200)
]


@pytest.fixture
def raw(bed):
    rows = [json.dumps({"text": text}) for text in TEXTS]
    bed.write("raw/a.jsonl", "\n".join(rows[:100]))
    bed.write("raw/b.jsonl", "\n".join([*rows[100:], rows[3], rows[3], '{"text": " "}']) + "\n")
    bed.write("raw/readme.txt", "One object, one document.\n")
    return bed


def given(bed, **change):
    source_uri = change.get("source_uri", bed.uri("raw") + "/")
    return {
        "source_uri": source_uri,
        "fingerprint": fingerprint_of(list_sources(source_uri)),
        "vocab_size": 320,
        "tokenizer_uri": "",
        "eval_fraction": 0.1,
        "required_tokens": 0,
        **change,
    }


def stage(bed, **change):
    return bed.run(stage_data.main, given(bed, **change), **PLACES)


def manifest_of(bed):
    return DatasetManifest.from_json(bed.artifact("dataset", "manifest.json").read_bytes())


def files_of(bed):
    top = bed.artifact("dataset")
    return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}


def train_texts(bed):
    """Documents of the train split, read back through the manifest alone."""
    manifest = manifest_of(bed)
    reader = Tokenizer.from_buffer(bed.artifact("dataset", "tokenizer.json").read_bytes())
    texts = []
    for shard in manifest.train:
        ids = np.frombuffer(bed.artifact("dataset", shard.name).read_bytes(), dtype="<u2")
        ends = np.flatnonzero(ids == manifest.tokenizer.eos_id)
        assert len(ids) == shard.tokens
        assert len(ends) == shard.documents
        assert ends[-1] == len(ids) - 1
        texts += [
            reader.decode(part.tolist(), skip_special_tokens=False)
            for part in np.split(ids[ids != manifest.tokenizer.eos_id], ends[:-1] - np.arange(len(ends) - 1))
        ]
    return texts


def eval_texts(bed):
    (entry,) = manifest_of(bed).evaluation
    lines = bed.artifact("dataset", entry.name).read_text().splitlines()
    return [json.loads(line)["text"] for line in lines]


def test_every_document_is_staged_once_and_on_the_side_of_its_hash(raw):
    assert stage(raw) == 0
    expected = [*TEXTS, TEXTS[3], TEXTS[3], "One object, one document.\n"]
    held_out = [text for text in expected if document_of(text).is_held_out(0.1)]
    assert eval_texts(raw) == held_out
    assert train_texts(raw) == [text for text in expected if text not in held_out]
    assert 5 <= len(held_out) <= 40
    assert manifest_of(raw).filters == {"empty": 1}


def test_the_manifest_pins_every_object_and_counts_every_token(raw):
    assert stage(raw) == 0
    manifest, files = manifest_of(raw), files_of(raw)
    entries = [*manifest.train, *manifest.evaluation, manifest.token_counts]
    assert {entry.name for entry in entries} == set(files) - {"manifest.json", "tokenizer.json"}
    for entry in entries:
        assert (entry.size, entry.crc32c) == (len(files[entry.name]), crc32c(files[entry.name]))
    counts = np.frombuffer(files["train/token_counts.u64"], dtype="<u8")
    ids = np.frombuffer(files["train/shard-00000.tokens"], dtype="<u2")
    assert counts.tolist() == np.bincount(ids, minlength=manifest.tokenizer.vocab_size).tolist()
    assert counts.sum() == manifest.train_tokens
    assert sum(entry.text_bytes for entry in manifest.evaluation) == len("".join(eval_texts(raw)).encode())
    assert [source.uri for source in manifest.sources] == [raw.uri("raw", name) for name in ("a.jsonl", "b.jsonl", "readme.txt")]  # fmt: skip


def test_the_outputs_describe_the_dataset(raw):
    assert stage(raw) == 0
    manifest = manifest_of(raw)
    assert raw.parameter("uri") == raw.uri("artifacts", "dataset")
    assert raw.parameter("train_tokens") == str(manifest.train_tokens)
    assert raw.metadata("dataset") == {
        "train_tokens": manifest.train_tokens,
        "train_documents": len(train_texts(raw)),
        "eval_documents": len(eval_texts(raw)),
        "eval_bytes": manifest.evaluation[0].text_bytes,
        "vocab_size": 320,
        "tokenizer_sha256": manifest.tokenizer.sha256,
        "fingerprint": given(raw)["fingerprint"],
    }


def test_two_processes_stage_the_same_bytes(raw):
    results = []
    for threads, seed in (("1", "1"), ("2", "2")):
        message = raw.message(given(raw), **PLACES)
        subprocess.run(
            [sys.executable, "-m", "penstock_components.launchers.stage_data", "--executor-input", message],
            check=True,
            env={**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed},
        )
        results.append(files_of(raw))
        raw.artifact("dataset").rename(raw.root / f"dataset-{threads}")
    assert results[0] == results[1]


def test_a_retry_adopts_the_finished_dataset(raw, capsys):
    assert stage(raw) == 0
    first = {path: path.stat().st_mtime_ns for path in raw.artifact("dataset").rglob("*")}
    tokens = raw.parameter("train_tokens")
    assert stage(raw) == 0
    assert {path: path.stat().st_mtime_ns for path in raw.artifact("dataset").rglob("*")} == first
    assert raw.parameter("train_tokens") == tokens


def test_a_retry_finishes_what_stopped_before_the_manifest(raw):
    assert stage(raw) == 0
    first = files_of(raw)
    raw.artifact("dataset", "manifest.json").unlink()
    raw.artifact("dataset", "train", "shard-00000.tokens").write_bytes(b"half")
    assert stage(raw) == 0
    assert files_of(raw) == first


@pytest.mark.parametrize(
    ("name", "damage"),
    [("manifest.json", b"{"), ("train/shard-00000.tokens", b"other"), ("eval/documents-00000.jsonl", b"")],
)
def test_a_damaged_dataset_is_made_again(raw, name, damage):
    assert stage(raw) == 0
    first = files_of(raw)
    raw.artifact("dataset", name).write_bytes(damage)
    assert stage(raw) == 0
    assert files_of(raw) == first


def test_the_tokenizer_learns_from_no_held_out_document(raw):
    assert stage(raw) == 0
    sample = Sample()
    for text in train_texts(raw):
        sample.add(document_of(text))
    expected = train_tokenizer(sample.texts(), vocab_size=320).data
    assert raw.artifact("dataset", "tokenizer.json").read_bytes() == expected
    for text in eval_texts(raw):
        sample.add(document_of(text))
    assert train_tokenizer(sample.texts(), vocab_size=320).data != expected


def test_a_dataset_of_other_sources_is_not_adopted(raw):
    assert stage(raw) == 0
    raw.write("raw/c.txt", "One more document.\n")
    assert stage(raw) == 0
    assert "One more document.\n" in [*train_texts(raw), *eval_texts(raw)]


def test_a_given_tokenizer_is_used_and_kept(raw):
    assert stage(raw) == 0
    data = raw.artifact("dataset", "tokenizer.json").read_bytes()
    raw.artifact("dataset").rename(raw.root / "first")
    uri = raw.write("given/tokenizer.json", data)
    assert stage(raw, tokenizer_uri=uri, vocab_size=4096) == 0
    assert raw.artifact("dataset", "tokenizer.json").read_bytes() == data
    assert manifest_of(raw).tokenizer.vocab_size == 320


def test_progress_ends_at_the_total(raw, capsys):
    assert stage(raw) == 0
    events = [parse_event(line) for line in capsys.readouterr().out.splitlines()]
    last = [event for event in events if isinstance(event, ProgressEvent)][-1]
    size = sum(source.size for source in list_sources(raw.uri("raw") + "/"))
    assert (last.done, last.total, last.unit) == (2 * size, 2 * size, "bytes read")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"required_tokens": 10**6}, "one batch needs 1,000,000"),
        ({"eval_fraction": 1e-9}, "none of them is held out"),
        ({"eval_fraction": 0.999999999}, "all of them are held out"),
        ({"eval_fraction": 0.0}, "it must be between 0 and 1"),
        ({"vocab_size": 256}, "at least 257 ids"),
        ({"fingerprint": "0" * 64}, "the source changed in between"),
        (
            {"tokenizer_uri": "file:///nowhere/tokenizer.json"},
            "file:///nowhere/tokenizer.json does not exist",
        ),
    ],
)
def test_what_cannot_be_staged_is_told_and_nothing_is_published(raw, capsys, change, message):
    assert stage(raw, **change) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not raw.artifact("dataset", "manifest.json").exists()
    assert not raw.has_output()


def test_a_bad_line_is_told_and_nothing_is_published(raw, capsys):
    uri = raw.write("raw/c.jsonl", '{"text": "fine"}\n{"text": broken}\n')
    assert stage(raw) == 1
    assert f"DocumentError: {uri}, line 2 (byte offset 17) is not JSON" in capsys.readouterr().err
    assert not raw.artifact("dataset").exists()


def test_a_series_starts_a_new_object_before_it_outgrows_its_limit_and_never_divides_a_document(bed):
    series = ObjectSeries(bed.uri("d"), "train/shard-{:05d}.tokens", max_bytes=10)
    documents = [b"d" * 25, b"aaaa", b"bbbbbb", b"c", b"e" * 10]
    for data in documents:
        series.add(data, tokens=len(data) // 2, text_bytes=len(data))
    written = series.close()
    assert [entry.name for entry in written] == [f"train/shard-0000{number}.tokens" for number in range(4)]
    content = [(bed.root / "d" / entry.name).read_bytes() for entry in written]
    assert content == [b"d" * 25, b"aaaabbbbbb", b"c", b"e" * 10]
    assert [entry.documents for entry in written] == [1, 2, 1, 1]
    assert [entry.tokens for entry in written] == [12, 5, 0, 5]
    assert [entry.text_bytes for entry in written] == [entry.size for entry in written] == [25, 10, 1, 10]

"""The dataset's tokenizer."""

import json
import random

import pytest
from tokenizers import AddedToken, Tokenizer, models

from penstock_components.launchers.documents import document_of
from penstock_components.launchers.errors import DatasetError
from penstock_components.launchers.tokenizer import (
    EOS,
    DocumentTokenizer,
    Sample,
    load_tokenizer,
    train_tokenizer,
)

TEXTS = [f"the quick brown fox {number} jumps over the lazy dog {EOS} zwölf 漢字\n" for number in range(200)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=400)


def test_every_document_ends_in_the_end_id_and_decodes_to_itself(tokenizer):
    reader = Tokenizer.from_buffer(tokenizer.data)
    texts = ["fox", "", "zwölf 漢字\x00\r\n", *TEXTS[:3]]
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert ids[-1] == tokenizer.info.eos_id
        assert reader.decode(ids[:-1].tolist(), skip_special_tokens=False) == text


def test_a_special_token_that_a_document_spells_out_is_ordinary_text(tokenizer):
    (ids,) = tokenizer.encode([f"a {EOS} b{EOS}"])
    assert list(ids).count(tokenizer.info.eos_id) == 1
    assert len(ids) > 5


def test_the_vocabulary_keeps_to_its_size_and_its_type(tokenizer):
    assert tokenizer.info.vocab_size == 400
    (ids,) = tokenizer.encode(["fox"])
    assert ids.dtype.str == "<u2"


def test_a_given_tokenizer_is_kept_byte_for_byte(tokenizer, bed):
    uri = bed.write("tokenizer.json", tokenizer.data)
    assert load_tokenizer(uri).data == tokenizer.data


def test_truncation_and_padding_of_a_given_tokenizer_do_not_touch_documents(tokenizer):
    told = Tokenizer.from_buffer(tokenizer.data)
    told.enable_truncation(4)
    told.enable_padding(length=50)
    cut = DocumentTokenizer(told.to_str().encode(), origin="test")
    assert [ids.tolist() for ids in cut.encode(TEXTS[:2])] == [
        ids.tolist() for ids in tokenizer.encode(TEXTS[:2])
    ]


def test_ids_with_holes_still_fit_the_vocabulary():
    told = Tokenizer(models.BPE(vocab={"a": 0, "b": 70_000}, merges=[]))
    told.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer = DocumentTokenizer(told.to_str().encode(), origin="test")
    (ids,) = tokenizer.encode(["ab"])
    assert ids.tolist()[:2] == [0, 70_000]
    assert tokenizer.info.vocab_size == 70_001
    assert ids.dtype.str == "<u4"


def test_a_tokenizer_without_an_end_token_is_refused(tokenizer):
    told = json.loads(tokenizer.data)
    told["added_tokens"][0]["special"] = False
    with pytest.raises(DatasetError, match="no special token that ends a document"):
        DocumentTokenizer(json.dumps(told).encode(), origin="x")


def test_what_is_not_a_tokenizer_is_refused_by_its_uri(bed):
    uri = bed.write("tokenizer.json", "{}")
    with pytest.raises(DatasetError, match=r"file://.*tokenizer.json is not a tokenizer.json"):
        load_tokenizer(uri)


def test_the_sample_is_bounded_and_does_not_depend_on_the_order():
    found = [document_of(f"{number} " * 50) for number in range(300)]
    samples = []
    for seed in range(3):
        random.Random(seed).shuffle(found)
        sample = Sample(max_chars=5000, max_chars_per_document=100)
        for document in [*found, *found[:50]]:
            sample.add(document)
        samples.append(sample.texts())
    assert samples[0] == samples[1] == samples[2]
    assert 4800 < sum(map(len, samples[0])) <= 5000
    assert len(set(samples[0])) == len(samples[0])

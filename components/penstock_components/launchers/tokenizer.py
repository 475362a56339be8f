"""The dataset's tokenizer: trained on a sample of the documents or taken from a tokenizer.json, then used to encode."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock_components.launchers.documents import Document
from penstock_components.launchers.errors import DatasetError
from penstock_trainer.contract.dataset import TokenizerInfo, token_type_for
from penstock_trainer.storage import storage_for

EOS = "<|endoftext|>"
EOS_NAMES = (EOS, "<|end_of_text|>", "</s>", "<eos>")
"""How known tokenizers call the token that ends a document, in order of preference."""
SMALLEST_VOCAB = 257
"""256 bytes and the end of a document."""


class Sample:
    """Documents to train a tokenizer on: those with the smallest keys that fit, so the order they come in is no matter.

    Of a long document only the beginning is taken, so that none becomes the whole sample.
    """

    def __init__(self, *, max_chars: int = 4_000_000, max_chars_per_document: int = 32_768) -> None:
        self._max_chars = max_chars
        self._max_chars_per_document = max_chars_per_document
        self._chars = 0
        self._heap: list[tuple[int, str]] = []
        self._keys: set[int] = set()

    def add(self, document: Document) -> None:
        """Consider a document; one that is in already is not taken twice."""
        key = document.sample_key
        if key in self._keys:
            return
        text = document.text[: self._max_chars_per_document]
        heapq.heappush(self._heap, (-key, text))
        self._keys.add(key)
        self._chars += len(text)
        while self._chars > self._max_chars:
            key, text = heapq.heappop(self._heap)
            self._keys.remove(-key)
            self._chars -= len(text)

    def texts(self) -> list[str]:
        """By key."""
        return [text for _, text in sorted(self._heap, reverse=True)]


class DocumentTokenizer:
    """Turns documents into token ids that end with the end-of-document id, which nothing inside a document can produce."""

    def __init__(self, data: bytes, *, origin: str) -> None:
        """`data` is a tokenizer.json and `origin` says where it comes from. Raises DatasetError if it cannot serve."""
        self.data = data
        try:
            self._tokenizer = Tokenizer.from_buffer(data)
        except ValueError as exc:
            raise DatasetError(f"{origin} is not a tokenizer.json: {exc}") from exc
        # A tokenizer.json may carry the settings of its last use; both would change documents without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Special tokens spelt out in a document are ordinary text.
        self._tokenizer.encode_special_tokens = True
        self.info = TokenizerInfo(
            sha256=hashlib.sha256(data).hexdigest(),
            vocab_size=max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
            eos_id=self._find_eos(origin),
        )
        self._dtype = np.dtype(token_type_for(self.info.vocab_size)).newbyteorder("<")

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[np.unsignedinteger]]:
        """Token ids of each text, its end included, in the dataset's type. Uses all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([*encoding.ids, self.info.eos_id], dtype=self._dtype) for encoding in encodings]

    def _find_eos(self, origin: str) -> int:
        special = {
            token.content: index
            for index, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        for name in EOS_NAMES:
            if name in special:
                return int(special[name])
        raise DatasetError(
            f"{origin} has no special token that ends a document: one of {', '.join(EOS_NAMES)} must be among its added "
            f"tokens with special = true. Its special tokens: {', '.join(special) or 'none'}."
        )


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> DocumentTokenizer:
    """A byte-level BPE of at most `vocab_size` ids. The same texts in the same order give the same bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return DocumentTokenizer(tokenizer.to_str().encode(), origin="the trained tokenizer")


def load_tokenizer(uri: str) -> DocumentTokenizer:
    """The tokenizer.json at a gs:// or file:// URI. Raises DatasetError if it cannot serve, StorageError from below."""
    return DocumentTokenizer(storage_for(uri).read(uri), origin=uri)

"""Component `stage_data`: from raw text to a dataset of token shards and held-out documents."""
# ruff: noqa: ARG001 # kfp reads the signature; the launcher reads the executor input

from typing import Any

from kfp import dsl

from penstock_components.container import launcher_spec


def stage_data(image: str) -> Any:
    """The component, running in `image` (the components image)."""

    def stage_data(
        source_uri: str,
        fingerprint: str,
        dataset: dsl.Output[dsl.Dataset],
        uri: dsl.OutputPath(str),  # type: ignore[valid-type]  # kfp reads the call
        train_tokens: dsl.OutputPath(int),  # type: ignore[valid-type]  # kfp reads the call
        vocab_size: int = 4096,
        tokenizer_uri: str = "",
        eval_fraction: float = 0.02,
        required_tokens: int = 0,
    ) -> dsl.ContainerSpec:
        """Tokenize JSONL or plain text into shards, and hold documents out for evaluation.

        Args:
            source_uri: gs:// URI of one object, of a prefix that ends in a slash, or a pattern with * in the name. Objects that end in .jsonl have one document a line in the column "text"; any other object is one document of plain text.
            fingerprint: Output of the fingerprint task; staging fails if the source is in another state by now.
            vocab_size: Ids of the byte-level BPE that is trained on a sample of the documents; at least 257. Not used with tokenizer_uri.
            tokenizer_uri: gs:// URI of a tokenizer.json to use instead of training one. Empty: train one.
            eval_fraction: Share of the documents that is held out, chosen by a hash of their text; between 0 and 1.
            required_tokens: Tokens that one global batch needs; a train split with fewer is an error. 0: any number will do.
            dataset: The dataset's directory; its manifest.json is written last.
            uri: URI of the dataset, as a string.
            train_tokens: Token ids in the train split.
        """
        return launcher_spec(image, "stage_data")

    return dsl.container_component(stage_data)

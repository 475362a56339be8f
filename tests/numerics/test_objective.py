"""The loss of a batch, and that masked targets weigh nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from numerics.parity_run import VOCAB_SIZE, parity_config
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.model.objective import IGNORED, Batch, Objective


def masked_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB_SIZE, (4, 13), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, 5:] = IGNORED
    labels[2] = IGNORED
    return {"input_ids": ids[:, :-1], "labels": labels}


def decoder() -> Decoder:
    model = Decoder(parity_config().model, VOCAB_SIZE)
    model.initialize(0)
    return model


@pytest.mark.parametrize("chunk_tokens", [0, 7])
def test_the_loss_is_summed_over_targets_and_over_nothing_else(chunk_tokens: int) -> None:
    batch, model = masked_batch(), decoder()
    kept = batch["labels"] != IGNORED
    expected = cross_entropy(model(batch["input_ids"])[kept], batch["labels"][kept], reduction="sum")
    loss = Objective(model, chunk_tokens=chunk_tokens)(batch)
    assert loss.shape == (1,)
    # fp32 sums of 29 losses near 4.6.
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert int(kept.sum()) == 29


def test_micro_batches_of_unequal_targets_add_up_to_the_whole() -> None:
    batch, objective = masked_batch(), Objective(decoder())
    parts = [
        dict(zip(batch, tensors, strict=True))
        for tensors in zip(*(tensor.split(1) for tensor in batch.values()), strict=True)
    ]
    total = sum(objective(part).item() for part in parts)
    assert total == pytest.approx(objective(batch).item(), rel=1e-6)


def test_in_eval_mode_predicted_targets_are_counted_too() -> None:
    batch, model = masked_batch(), decoder()
    with torch.no_grad():
        loss, correct = Objective(model).eval()(batch)
        predicted = model(batch["input_ids"]).argmax(-1)
    assert int(correct) == int((predicted == batch["labels"]).sum())
    assert loss.item() == pytest.approx(Objective(model)(batch).item(), rel=1e-6)


def test_a_classifier_has_the_same_contract() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(image)
            return out

    batch = {"image": torch.randn(5, 2, 3), "labels": torch.tensor([0, 1, 2, IGNORED, 1])}
    expected = cross_entropy(
        model(batch["image"])[[0, 1, 2, 4]], batch["labels"][[0, 1, 2, 4]], reduction="sum"
    )
    assert Objective(Classifier())(batch).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_model_without_a_head_apart_cannot_have_its_logits_chunked() -> None:
    with pytest.raises(TypeError, match="Linear has no head apart"):
        Objective(nn.Linear(2, 2), chunk_tokens=8)

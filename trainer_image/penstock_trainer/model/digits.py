"""An example of a user's model and data: scikit-learn's handwritten digits and a small convolutional classifier.

    ModelConfig(source="penstock_trainer.model.digits:digits_classifier", options={"channels": 16})
    DataConfig(source="penstock_trainer.model.digits:digits")

Shape suffixes: B images, C channels, H and W pixels, L classes.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

NUM_CLASSES = 10
SIDE = 8
"""Pixels."""
_EVALUATION_EVERY = 5
_LARGEST_PIXEL = 16.0


class DigitsClassifier(nn.Module):
    """Two convolutions, a pooling and a linear layer."""

    def __init__(self, *, channels: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(2 * channels * (SIDE // 2) ** 2, NUM_CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        """Logits [B, L] of images [B, 1, H, W]."""
        logits_BL: Tensor = self.head(self.features(image))
        return logits_BL


class Digits:
    """A part of the digits as a map-style dataset."""

    def __init__(self, images_BCHW: Tensor, labels_B: Tensor) -> None:
        self._images_BCHW = images_BCHW
        self._labels_B = labels_B

    def __len__(self) -> int:
        return len(self._labels_B)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """{"image": fp32 [1, H, W] in [0, 1], "labels": int64 []}."""
        return {"image": self._images_BCHW[index], "labels": self._labels_B[index]}


def digits_classifier(*, channels: int = 16) -> DigitsClassifier:
    """A classifier of 8 x 8 images; its first weights are torch's."""
    return DigitsClassifier(channels=channels)


def digits(split: Literal["train", "evaluation"], **_: Any) -> Digits:
    """One split of scikit-learn's 1797 digits: every fifth is for evaluation, the others are for training.

    Raises ValueError for another split. The images come with scikit-learn; nothing is downloaded.
    """
    if split not in ("train", "evaluation"):
        raise ValueError(f"split = {split!r} is not valid: it must be 'train' or 'evaluation'.")
    # Imported here: only this example needs it.
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().div(_LARGEST_PIXEL).reshape(-1, 1, SIDE, SIDE)
    labels = torch.from_numpy(classes).long()
    is_evaluation = torch.arange(len(labels)) % _EVALUATION_EVERY == _EVALUATION_EVERY - 1
    chosen = is_evaluation if split == "evaluation" else ~is_evaluation
    return Digits(images[chosen], labels[chosen])

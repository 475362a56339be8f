"""torch's profiler over a few steps of every rank, where the config asks for it.

<checkpoint root>/profile/<attempt>-rank<rank>-step<first step>.json.gz   a trace for Perfetto or chrome://tracing
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from penstock_trainer.contract.config import ObserveConfig
from penstock_trainer.storage import join, storage_for

logger = logging.getLogger(__name__)


class ProfileWindow:
    """Records steps [profile_start, profile_start + profile_steps) of an attempt that comes past profile_start."""

    def __init__(
        self, config: ObserveConfig, *, root_uri: str, attempt: str, rank: int, device: torch.device
    ) -> None:
        self._first = config.profile_start
        self._end = self._first + config.profile_steps
        self._uri = join(root_uri, "profile", f"{attempt}-rank{rank}-step{self._first}.json.gz")
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profile: profile | None = None

    def begin_step(self, step: int) -> None:
        """To be called before each step, numbered from 1; starts or ends the recording, or does nothing."""
        if self._first and step == self._first:
            self._profile = profile(activities=self._activities)
            self._profile.start()
        elif self._profile is not None and step >= self._end:
            self.close()

    def close(self) -> None:
        """End a recording that is under way and upload it. Blocks on storage; what fails is warned about."""
        if self._profile is None:
            return
        recorded, self._profile = self._profile, None
        try:
            recorded.stop()
            with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
                path = Path(directory) / "trace.json.gz"
                recorded.export_chrome_trace(str(path))
                storage_for(self._uri).upload(path, self._uri)
            logger.info("the profile of steps %d to %d is in %s", self._first, self._end - 1, self._uri)
        except Exception:
            logger.warning("the profile was not written to %s", self._uri, exc_info=True)

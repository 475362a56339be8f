"""A tiny training job on a stand-in, undisturbed and with faults, and the judgement that `penstock run --faults` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from google.auth.credentials import AnonymousCredentials
from google.cloud.storage import Client

from contract.vertex.stand_in import BUCKET, IMAGE, Rest, StandIn
from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import tiny_config
from penstock_pipelines.fault_evidence import Evidence, Row, judge, lines_of, losses_of
from penstock_pipelines.faults import OrderedFault, read_faults
from penstock_pipelines.logs import LogLine
from penstock_pipelines.rehearsal import saved_below
from penstock_trainer.checkpoint_root import CheckpointRoot
from penstock_trainer.contract.config import CheckpointConfig, EngineConfig, JobConfig
from penstock_trainer.storage.gcs import GcsStorage

JOBS = "v1/projects/demo/locations/us-central1/customJobs"
UPLOAD = """
from pathlib import Path
from google.cloud import storage
bucket, root = storage.Client().bucket({bucket!r}), Path({root!r})
result = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*")) if path.is_file()]
for name in result:
    bucket.blob(f"dataset/{{name}}").upload_from_filename(root / name)
"""
STEPS, INTERVAL = 40, 5


def config() -> JobConfig:
    """A rank that hangs is noticed when its collectives time out, after 5 s."""
    tiny = tiny_config(
        f"gs://{BUCKET}/dataset",
        steps=STEPS,
        checkpoint=CheckpointConfig(interval=INTERVAL),
        engine=EngineConfig(strategy="fsdp-full", timeout_seconds=5),
        preflight=False,
    )
    # Big enough for a fault that strikes at a step to be felt before the last one.
    return replace(tiny, model=replace(tiny.model, dim=64, num_layers=4))


@dataclass
class FaultJobs:
    """Jobs of two nodes on one stand-in. They differ in nothing but their faults."""

    stand_in: StandIn
    rest: Rest
    directory: Path
    _clean: list[LogLine] = field(default_factory=list)

    def stage(self) -> None:
        data = self.directory / "dataset"
        data.mkdir()
        build_dataset(data)
        assert "manifest.json" in self.stand_in.client(UPLOAD.format(bucket=BUCKET, root=str(data)))

    def rows(self, name: str, faults: Sequence[Mapping[str, Any]]) -> tuple[str, list[Row]]:
        """The state of a job with these faults, and what became of each."""
        ordered = self.read(name, faults)
        if not self._clean:
            job, state = self.run("clean", ())
            assert state["state"] == "JOB_STATE_SUCCEEDED", state
            self._clean = self.entries(job)
        job, ended = self.run(name, ordered)
        [states] = [
            order["faults"]
            for order in self.rest.control("GET", "faults")["orders"]
            if order["labels"] == {"rehearsal": name}
        ]
        evidence = Evidence(
            lines=lines_of(self.entries(job)),
            clean_losses=losses_of(lines_of(self._clean)),
            saved=tuple(saved_below(self.root(name))),
            succeeded=ended["state"] == "JOB_STATE_SUCCEEDED",
            error=ended.get("error", {}).get("message", ""),
        )
        return ended["state"], judge(ordered, states, evidence)

    def read(self, name: str, faults: Sequence[Mapping[str, Any]]) -> tuple[OrderedFault, ...]:
        path = self.directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"faults": [dict(fault) for fault in faults]}))
        return read_faults(path)

    def run(self, name: str, faults: Sequence[OrderedFault]) -> tuple[str, Any]:
        if faults:
            orders = [dict(fault.order) for fault in faults]
            self.rest.control("POST", "faults", {"labels": {"rehearsal": name}, "faults": orders})
        container = {
            "imageUri": IMAGE,
            "command": ["python", "-m", "penstock_trainer"],
            "args": [f"--config={config().to_json()}"],
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        }
        pool = {
            "machineSpec": {"machineType": "n1-highcpu-16"},
            "replicaCount": "1",
            "containerSpec": container,
        }
        spec = {
            "workerPoolSpecs": [pool, pool],
            "baseOutputDirectory": {"outputUriPrefix": f"gs://{BUCKET}/{name}"},
            "scheduling": {"restartJobOnWorkerRestart": True},
        }
        job = {"displayName": name, "labels": {"rehearsal": name}, "jobSpec": spec}
        created: str = self.rest.call("POST", JOBS, job)["name"]
        return created, self.rest.wait_until(created, "SUCCEEDED", "FAILED", seconds=240)

    def entries(self, job: str) -> list[LogLine]:
        """Everything that a job's replicas wrote."""
        body = {
            "resourceNames": ["projects/demo"],
            "filter": f'resource.labels.job_id="{job.rpartition("/")[2]}"',
            "pageSize": 100_000,
        }
        told = self.rest.call("POST", "v2/entries:list", body, api="logging")
        return [
            LogLine(
                insert_id=entry["insertId"],
                timestamp=entry["timestamp"],
                severity=entry.get("severity", ""),
                replica=entry["resource"]["labels"]["task_name"],
                payload=entry.get("jsonPayload", entry.get("textPayload", "")),
            )
            for entry in told["entries"]
        ]

    def root(self, name: str) -> CheckpointRoot:
        client = Client(project="demo", credentials=AnonymousCredentials(), _http=self.rest.session)
        return CheckpointRoot(f"gs://{BUCKET}/{name}/checkpoints", GcsStorage(client, obstore_bytes=None))

"""Send a signal to a replica of a run's training once it has logged a step.

Run:  python disturb.py FRONT_PORT RUN_ID STEP REPLICA SIGNAL
"""

import sys
import time

import google.auth
from google.auth.transport.requests import AuthorizedSession
from google.cloud import aiplatform

from penstock_pipelines.logs import LogReader
from penstock_trainer.contract.events import StepEvent, parse_event

port, run_id, step, replica, signal_name = sys.argv[1:]
credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
control = AuthorizedSession(credentials)
aiplatform.init(project="demo", location="us-central1")
logs, deadline = LogReader("demo"), time.monotonic() + 120


def reached(job: aiplatform.CustomJob) -> bool:
    events = (parse_event(line.payload) for line in logs.new_lines(job.name))
    return any(isinstance(event, StepEvent) and event.step >= int(step) for event in events)


while time.monotonic() < deadline:
    for job in aiplatform.CustomJob.list(filter=f'labels.penstock-run="{run_id}"'):
        if reached(job):
            fault = {"customJob": job.resource_name, "replica": replica, "signal": signal_name}
            control.post(f"http://127.0.0.1:{port}/penstock/faults:signal", json=fault).raise_for_status()
            sys.exit(0)
    time.sleep(0.05)
sys.exit(f"{run_id} did not reach step {step}")

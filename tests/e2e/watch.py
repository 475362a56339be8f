"""Print the name of a run's CustomJob once its training has logged a step: `python watch.py RUN_ID STEP`."""

import sys
import time

from google.cloud import aiplatform

from penstock_pipelines.logs import LogReader
from penstock_trainer.contract.events import StepEvent, parse_event

run_id, step = sys.argv[1], int(sys.argv[2])
aiplatform.init(project="demo", location="us-central1")
logs, deadline = LogReader("demo"), time.monotonic() + 120
while time.monotonic() < deadline:
    for job in aiplatform.CustomJob.list(filter=f'labels.penstock-run="{run_id}"'):
        for line in logs.new_lines(job.name):
            event = parse_event(line.payload)
            if isinstance(event, StepEvent) and event.step >= step:
                print(job.resource_name)
                sys.exit(0)
    time.sleep(0.1)
sys.exit(f"{run_id} did not reach step {step}")

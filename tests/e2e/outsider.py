"""What a stranger's script sees, with nothing but the stock SDK and the exported environment."""

import json

from google.cloud import aiplatform

seen = {}
for transport in ("grpc", "rest"):
    aiplatform.init(project="demo", location="us-central1", api_transport=transport)
    seen[transport] = {
        "pipelines": [job.name for job in aiplatform.PipelineJob.list()],
        "custom_jobs": [job.display_name for job in aiplatform.CustomJob.list()],
        "models": [model.display_name for model in aiplatform.Model.list()],
    }
print(json.dumps(seen))

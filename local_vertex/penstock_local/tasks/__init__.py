"""Container tasks of pipelines as processes."""

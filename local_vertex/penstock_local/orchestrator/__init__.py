"""Interpreter of the compiled pipeline: runs a KFP `PipelineSpec` the way Vertex AI Pipelines does.

A pure engine. It knows no gRPC, HTTP, client library or process: containers run behind `executor.Executor`, cached
outputs live behind `cache.Cache`, and every change of a task is told to an `engine.Listener`.
"""

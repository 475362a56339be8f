"""Typed specs of distributed training jobs: checked where they are written, turned into what the API takes."""

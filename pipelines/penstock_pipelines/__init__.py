"""How components are joined into pipelines, compiled, checked and submitted."""

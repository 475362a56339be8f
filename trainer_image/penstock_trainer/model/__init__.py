"""The built-in model."""

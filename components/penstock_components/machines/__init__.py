"""The machines that Vertex AI trains on: a catalogue with sources and a date, read from a file beside it."""

"""The verbs of the `penstock` command, by what they are about. Heavy libraries are imported where they are needed."""

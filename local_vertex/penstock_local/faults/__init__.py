"""Faults on order: what goes wrong with the processes of a job, with its nodes and with storage, and when."""

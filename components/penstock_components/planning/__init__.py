"""What a run will need before it runs: bytes on each rank and bytes on the wire, from the job config alone."""

"""What a run tells about itself: where its time and memory go, to whom it is shown, and what is left of one that hung.

Nothing here is imported with torch unless it needs it: the launcher uses `structured_logs` and starts without.
"""

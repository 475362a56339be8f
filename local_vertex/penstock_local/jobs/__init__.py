"""CustomJobs as processes: images, addresses, the environment of a replica, restarts."""

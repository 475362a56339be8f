"""What a job must satisfy before it is worth sending: one module for each subject, each rule a generator of findings.

A rule sees the typed spec and the context, and names fields in snake_case from the job spec on
(`worker_pool_specs[0].replica_count`). It raises nothing, whatever it is given. `whole_job` has all of them.
"""

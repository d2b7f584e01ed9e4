"""The worker process: one rank of one job. Started by the supervisor as `python -m distensor.node`."""

"""Code of both programs: what trainer and sidecar exchange, weights, and the records of a run."""

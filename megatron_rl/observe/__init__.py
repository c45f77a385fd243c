"""Shows a run to people: progress, metrics, samples, traces, the report, the summary at its end. For rank 0 only."""

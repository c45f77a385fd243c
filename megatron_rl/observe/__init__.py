"""The output of a run while it lives: metrics, progress, samples, traces, and the summary at its end."""

"""What a person sees of a run: progress, metrics, samples, the summary at its end. Used on rank 0 only."""

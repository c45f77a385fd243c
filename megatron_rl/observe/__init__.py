"""What a person sees of a run: progress, metrics, samples, the report at its end. Used on rank 0 only."""

"""What a person sees of a run: progress, metrics, samples, the report at its end. Only rank 0 uses it."""

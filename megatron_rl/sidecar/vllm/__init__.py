"""vLLM as an engine: its server, its workers, and the proof of which weights they hold."""

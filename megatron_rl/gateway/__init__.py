"""An endpoint with the interfaces of OpenAI and Anthropic: agents act through it, and it keeps their tokens."""

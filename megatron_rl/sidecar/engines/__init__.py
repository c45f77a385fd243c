"""What the sidecar asks of an engine, the scripted one, and which engine samples which group."""

"""The process that runs the rollout service and supervises the engines."""

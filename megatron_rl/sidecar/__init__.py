"""The process that supervises the engines and is the rollout service."""

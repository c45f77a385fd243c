"""The agent of a host: starts and ends engines there for a rollout service on another host, and forwards requests."""

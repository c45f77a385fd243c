"""The common ground of trainer and sidecar: messages, client, plans, seeds, and the checks of groups."""

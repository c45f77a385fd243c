"""What trainer and sidecar share: the wire format, the client, plans, seeds, and what makes a group on-policy."""

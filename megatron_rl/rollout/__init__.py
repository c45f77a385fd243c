"""What trainer and sidecar share: the wire format, seeds, rewards, the journal and the audit log."""

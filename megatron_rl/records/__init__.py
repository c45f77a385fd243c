"""What a run writes so that it can go on and be checked: the journal and the audit log."""

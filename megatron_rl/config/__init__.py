"""Our own configuration: one frozen dataclass a subject, one field a flag. Nothing here needs torch."""

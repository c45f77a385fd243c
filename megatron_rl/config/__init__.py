"""Our own configuration: one frozen dataclass a subject, one field a flag. Only `command_line` needs torch."""

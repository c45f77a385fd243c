"""Every number that the documentation states, each with the command that measures it."""

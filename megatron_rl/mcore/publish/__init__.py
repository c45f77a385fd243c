"""The trainer's half of a publish."""

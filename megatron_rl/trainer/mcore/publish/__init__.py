"""The trainer's half of a publish, through files or from device to device."""

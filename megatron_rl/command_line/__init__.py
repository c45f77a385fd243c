"""The settings of a run from the words of its command line: flags, their resolution and their checks."""

"""From the words of a command line to the settings of a run: flags, what they come to, and what is wrong with them."""

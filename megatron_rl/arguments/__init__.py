"""From the words of a command line to the settings of a run: flags, their resolution, and checks of them."""

"""One page of HTML about runs, with all that it shows inside: what is in it, how it is made, how it follows a run."""

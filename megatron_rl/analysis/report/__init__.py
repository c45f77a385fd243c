"""The report: a page of HTML about runs that holds all of its data, or follows live runs through a server."""

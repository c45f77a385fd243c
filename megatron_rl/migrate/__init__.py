"""Translation of other projects' command lines. No run imports this package."""

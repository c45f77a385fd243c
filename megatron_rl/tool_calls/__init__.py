"""Tools that a policy calls: their schemas, and the parts of what it said."""

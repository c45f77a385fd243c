"""Engines on other hosts: which hosts there are, and the service's side of their agents."""

"""The implementations of shared-prompt attention, one a module."""

"""The smallest changes that other projects' source trees need, and how they are made and taken back."""

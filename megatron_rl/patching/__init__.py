"""The smallest changes that trees of others need, and how they are made and taken back."""

"""A tiny model that learns a mixture of reasoning-gym's tasks."""

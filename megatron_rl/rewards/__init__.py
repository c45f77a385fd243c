"""Rewards: functions of people, run in confined processes, and the ready-made ones."""

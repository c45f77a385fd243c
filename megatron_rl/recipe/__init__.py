"""Recipes of Megatron-LM as they are: their script, their arguments, their model; our data, loss and loop.

Nothing else imports `megatron.training`.
"""

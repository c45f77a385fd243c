"""Runs recipes of Megatron-LM unchanged: their script, arguments and model, with our data, loss and loop.

Nothing else imports `megatron.training`.
"""

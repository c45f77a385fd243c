"""The loop: what is made of settings, the trainer, and what keeps ranks from waiting for one that is gone."""

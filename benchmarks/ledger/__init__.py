"""The ledger of a training step: operators, launches and bytes, counted without a device, and the predicted time."""

"""The kernels beside attention, each with a twin in torch's operations: what is checked and timed on a GPU."""

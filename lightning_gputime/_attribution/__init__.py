"""Causes of slow steps outside of the loop's code: the machine, the batch and the GPU's clock."""

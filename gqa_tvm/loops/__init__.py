"""The loops that carry state around the tensor expressions of `definitions`."""

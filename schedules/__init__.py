"""One file per CPU family, the same function names in each; shared steps and sizes beside them."""

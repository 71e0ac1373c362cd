"""Scratch memory is poisoned with NaN in all tests, so that a kernel reading what it did not write shows."""

import os

os.environ.setdefault("GQA_TVM_POISON_SCRATCH", "1")

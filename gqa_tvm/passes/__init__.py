"""Compiler passes of our own, between the schedule and LLVM: `lowering` has their order."""

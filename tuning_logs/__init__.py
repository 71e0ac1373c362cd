"""Tuned sizes per target; empty until a target is tuned."""

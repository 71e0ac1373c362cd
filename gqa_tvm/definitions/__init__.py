"""The operator's math as tensor expressions: no target, no schedule, no loop that carries state."""

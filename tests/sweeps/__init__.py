"""Sweeps: one property, checked over a whole range of rates, sizes, lock holders or errors."""

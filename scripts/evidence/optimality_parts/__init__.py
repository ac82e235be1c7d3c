"""What scripts/evidence/optimality.py alone uses."""

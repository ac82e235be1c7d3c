"""What scripts/evidence/accuracy.py alone uses."""

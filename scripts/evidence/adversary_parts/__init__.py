"""What scripts/evidence/adversary.py alone uses."""

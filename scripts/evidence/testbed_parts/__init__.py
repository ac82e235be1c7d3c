"""What scripts/evidence/testbed.py alone uses."""

"""What scripts/evidence/memory.py alone uses."""

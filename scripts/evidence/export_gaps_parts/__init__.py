"""What scripts/evidence/export_gaps.py alone uses."""

"""From published measurements to the profiles that are shipped: machines.py is the data, the rest reads and scales."""

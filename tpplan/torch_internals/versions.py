"""The releases of torch that tpplan is tested with, in one place for Python and for the shell.

scripts/ reads this file without importing the package (`runpy.run_path`): it imports nothing.
"""

OLDEST = "2.11.0"
NEWEST = "2.14.1"
TESTED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1")

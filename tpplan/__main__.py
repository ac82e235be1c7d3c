"""`python -m tpplan`."""

import sys

from tpplan.commands import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m calc`: the answers without a browser."""

import sys

from calc.cli import main

if __name__ == "__main__":
    sys.exit(main())

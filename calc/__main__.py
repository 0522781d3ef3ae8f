"""`python -m calc`: the answers without a browser."""

import sys


def main() -> int:
    """Answer the command. Ctrl-C while modules are still read ends it without a traceback too."""
    try:
        from calc.cli import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

"""``python -m mainspring``: the command line."""

import sys

from mainspring.cli import main

if __name__ == "__main__":
    sys.exit(main())

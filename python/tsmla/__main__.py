"""`python -m tsmla` is the command `tsmla`."""

import sys

from .tools.cli import main

sys.exit(main())

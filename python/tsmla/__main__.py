"""`python -m tsmla` is the command `tsmla`."""

import sys

from .cli import main

sys.exit(main())

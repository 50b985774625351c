"""``python -m distembed.doctor``: the doctor where the rest of the package does not load."""

import sys

from distembed.doctor import main

sys.exit(main())

"""On the path of a server's processes: those that would measure behave as a test asks instead, and need no torch.

STAND_IN names the behaviour in tests/measure/misbehaving.py.
"""

import os
import sys
from pathlib import Path

_SCRIPT = Path(__file__).parents[2] / "measure" / "misbehaving.py"

if sys.orig_argv[1:3] == ["-m", "measure.child"]:
    os.execv(sys.executable, [sys.executable, str(_SCRIPT), os.environ["STAND_IN"], "child", *sys.orig_argv[3:]])

"""How a command ends: its exit code, and one line on standard error for a complaint."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

from calc.errors import InputError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a full disk answers


def guarded(action: Callable[[], object]) -> int:
    """Do it; a complaint becomes one line on standard error and its exit code. PLUMBLINE_DEBUG=1 shows tracebacks."""
    if sys.stdout is None:  # the caller closed it: `>&-`
        print("standard output: it is closed, so that no answer can be written", file=sys.stderr)
        return 1
    try:
        action()
        sys.stdout.flush()
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader closed the pipe: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of the answer goes nowhere
            print(f"standard output: it cannot be written ({error.strerror}); the answer is cut", file=sys.stderr)
            return 1
        if os.environ.get("PLUMBLINE_DEBUG"):
            raise
        print(f"internal error: {type(error).__name__}: {error} (PLUMBLINE_DEBUG=1 shows where)", file=sys.stderr)
        return 1
    return 0

"""The user's program, run as `python script.py args` would run it, on the make-believe GPU, and how it ended."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calc.errors import InputError
from calc.hardware import Gpu
from measure.script.device_calls import WrongGpu
from measure.script.lines import raising_line
from measure.script.pretrained import NoConfig
from measure.script.recorder import ScriptRecorder
from measure.script.result import answer_of, limit_of
from measure.script.session import EnoughSteps, NeedsNetwork, Session, StartsProcess, on_make_believe_gpu

_NO_RULE = ("UnsupportedOperatorException", "DynamicOutputShapeException", "DataDependentOutputException")
_OFFLINE = ("OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectionError", "ConnectError")


def trace_program(script: str, args: Sequence[str], gpu: Gpu | None, steps: int = 2, ranks: int = 1) -> dict[str, Any]:
    """Run it to its optimizer step number `steps` and tell what it held. It is the user's own code, run with the user's rights.

    InputError, with the line of the script, when it raises, ends without a step or does what a trace cannot follow.
    """
    session = Session(ScriptRecorder(limit_of(gpu, ranks)), steps)
    try:
        with _as_main(script, args) as (code, names), on_make_believe_gpu(session, gpu, ranks):
            exec(code, names)
    except EnoughSteps:
        return answer_of(session, gpu, ranks)
    except InputError:
        raise
    except SystemExit as ended:
        if session.done == 0:
            line = raising_line(ended.__traceback__)
            raise InputError(
                f"--script: {line} ended the program (status {ended.code}) before any optimizer step"
            ) from None
    except Exception as error:
        raise _told(script, error) from error
    if session.done == 0:
        raise InputError(
            f"--script: {Path(script).name} ended without an optimizer step; a trace follows the steps of a torch.optim optimizer"
        )
    return answer_of(session, gpu, ranks)


@contextlib.contextmanager
def _as_main(script: str, args: Sequence[str]) -> Any:
    """The compiled script and its names, with sys.argv, sys.path and __main__ as Python sets them; put back afterwards."""
    path = Path(script).resolve()
    try:
        code = compile(path.read_bytes(), str(path), "exec")
    except OSError as error:
        raise InputError.of("--script", script, f"it must be a file that can be read ({error.strerror})") from None
    except (SyntaxError, ValueError) as error:
        raise InputError(f"--script: {path.name} is not a Python program: {error}") from None
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    kept = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv, sys.path[0:0], sys.modules["__main__"] = [script, *args], [str(path.parent)], module
    try:
        yield code, vars(module)
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = kept


def _told(script: str, error: BaseException) -> InputError:
    """What went wrong, on which line, and what to do."""
    chain, each = [], error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__ or each.__context__  # type: ignore[assignment]
    line = next((found for cause in chain if (found := raising_line(cause.__traceback__)).file), None)
    where = f"{line} ({line.text[:80]})" if line else Path(script).name
    return InputError(f"--script: {where}: {_cause(chain)}", "--script")


def _cause(chain: list[BaseException]) -> str:
    kinds = {type(each).__name__ for each in chain}
    first = chain[0]
    text = f"{type(first).__name__}: {str(first)[:300]}"
    for each in chain:
        if isinstance(each, NoConfig):
            return f"{each}; give a local folder with its config.json"
        if isinstance(each, WrongGpu):
            return str(each)
    if any(isinstance(each, NeedsNetwork) for each in chain) or kinds & set(_OFFLINE):
        return f"it needs the network, which a traced program has not got; give it local files, or data made up by code ({text})"
    if any(isinstance(each, StartsProcess) for each in chain):
        return "it starts another process; a trace follows one: run the part that trains in this one (--ranks N for many GPUs)"
    if kinds & set(_NO_RULE) or "no fake impl" in str(first) or "No fake" in str(first):
        return (
            f"an operator without a rule for fake tensors ({text}); use PyTorch's own operator there (attention: sdpa), "
            "or register one with torch.library.register_fake"
        )
    if isinstance(first, ModuleNotFoundError):
        return f"{first}; install it in this environment, or leave out what needs it"
    return text

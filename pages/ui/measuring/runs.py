"""Starts `python -m measure` for the page and listens to it. No torch here: what measures is another process.

A run belongs to this server, not to a browser: it goes on when a tab is closed, every tab sees it, and it ends with the server
(whose end closes the run's standard input).
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import streamlit as st
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from calc.child_environment import child_environment
from calc.errors import InputError
from calc.measurements.records import as_csv
from calc.quantities import left_out
from pages.ui.server import ACCOUNT, OTHER

MEASURE: Final = (sys.executable, "-m", "measure")
_MOST = 24  # runs at once in this server, the waiting ones counted: each is two small processes
_KEPT = 20  # ended runs that the server remembers; their rows are in the store in any case
_PATIENCE_SECONDS = 10.0  # for a run to end in order, once cancelled
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_ANYONE: Final = "MEASURE=anyone: everyone who reaches this page may start and end runs here and take results in."
_TOKEN: Final = "token of what acts"

Workload = Literal[
    "decoder-states", "saved-activations", "checkpointing", "amp", "lora", "optimizer-temporaries", "logits-peak",
    "attention-memory", "kv-cache-growth", "paged-decode", "prefill-decode", "matmul-rate", "memory-bandwidth",
    "fused-kernels", "pcie",
    "context-and-workspace", "quantisation-error", "flops", "collectives", "ddp-states", "zero1-states", "fsdp2-states",
    "tensor-parallel", "pipeline-schedules", "standard", "several-devices",
]  # fmt: skip


class MeasurePlan(BaseModel):
    """What the page asks for; the flags of `python -m measure run`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workload: Workload = Field("decoder-states", description="What to measure; standard: all of them, one by one.")
    size: Literal["small", "medium"] = Field(
        "small", description="How large a model or tensor; rates on a GPU take medium always."
    )
    device: Literal["auto", "cuda", "cpu"] = Field(
        "auto", description="auto: the GPU where there is one, else the CPU."
    )
    own_model: bool = Field(
        False, description="Measure the sidebar's model in place of a small Llama, where the workload takes one."
    )
    ranks: Annotated[int | None, BeforeValidator(left_out)] = Field(
        None,
        ge=1,
        le=16,
        description="Processes of a workload for several devices, one a GPU; left out: every GPU, or 2 on the CPU.",
    )
    seconds: float = Field(120.0, ge=1, le=3600, description="Time limit in seconds, from having the device.")
    memory_fraction: float = Field(
        0.8, ge=0.05, le=1, description="Share of the device's free memory that the run may take."
    )

    def arguments(self, model: str = "") -> tuple[str, ...]:
        """The plan as arguments of `python -m measure`, about this model where it asks for one; what has its default is left out."""
        given = {
            name: value for name, value in self.model_dump().items() if value != type(self).model_fields[name].default
        }
        given.pop("workload", None)
        if given.pop("own_model", False):
            given["model"] = model
        flags = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        return ("run", self.workload, *flags)


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known of a run. `fraction` is 0 to 1; `outcome` is "" until it ends; `ahead` are the runs that it waits for."""

    key: str
    title: str
    began: float  # time.monotonic() when it got its device, 0 before
    fraction: float = 0.0
    left: float | None = None  # seconds, as the run itself guesses
    message: str = "starting"
    ahead: tuple[Mapping[str, Any], ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Mapping[str, Any], ...] = ()
    outcome: str = ""
    answer: Mapping[str, Any] | None = None  # of a trace, once it has ended

    @property
    def seconds_left(self) -> float | None:
        """The run's own guess, or one from the fraction that is done; None before there is one."""
        if self.outcome or not self.began or self.fraction <= 0:
            return None
        if self.left is not None:
            return self.left
        return (time.monotonic() - self.began) * (1 - self.fraction) / self.fraction

    def csv(self) -> str:
        """The rows as CSV, exact numbers."""
        return as_csv(self.rows)

    def after(self, event: Mapping[str, Any]) -> Progress:
        """The progress once this event is known."""
        kind = event["event"]
        if kind == "queued":
            return replace(self, began=0.0, ahead=tuple(event["ahead"]), message=f"waiting for {event['device']}")
        if kind == "started":
            return replace(self, began=time.monotonic(), ahead=(), message="starting PyTorch")
        if kind == "ready":
            return replace(self, environment=event["environment"], message=f"on {event['environment']['device']}")
        if kind == "progress":
            left = event.get("seconds_left")
            return replace(self, fraction=event["fraction"], message=event["message"], left=left)
        if kind == "row":
            return replace(self, rows=(*self.rows, {name: value for name, value in event.items() if name != "event"}))
        if kind == "answer":
            return replace(self, answer=event["answer"])
        if kind == "done":
            done = 1.0 if event["outcome"] == "finished" else self.fraction
            return replace(self, outcome=event["outcome"], message=event["message"], fraction=done, ahead=())
        return self


class Handle:
    """A process of `python -m measure` that tells events, and the thread that listens to it. `given` goes to its standard input."""

    def __init__(self, title: str, arguments: Sequence[str], command: Sequence[str], given: bytes = b"") -> None:
        self.progress = Progress(uuid.uuid4().hex, title, 0.0)
        self._process = subprocess.Popen(
            [*command, *arguments, "--format", "jsonl", "--attached"],
            stdin=subprocess.PIPE,  # its end, with this server's or by `cancel`, ends the run
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # one pipe, so that neither can fill unread
            start_new_session=True,  # Ctrl-C in the terminal is for the server alone
            env=child_environment(),
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        if given and self._process.stdin:
            with suppress(BrokenPipeError):  # it has ended already; the listener knows why
                self._process.stdin.write(given)
                self._process.stdin.flush()

    def _listen(self) -> None:
        complaint = ""
        with self._process as process:  # closes the pipes at the end
            for line in process.stdout or ():
                if line.startswith(b'{"event"') and line.endswith(b"}\n"):
                    self.progress = self.progress.after(json.loads(line))
                elif not line.startswith(b"{"):  # an event that a kill cut says nothing
                    complaint = line.decode(errors="replace").strip() or complaint
        if not self.progress.outcome:
            why = complaint or f"it ended with status {self._process.returncode}"
            self.progress = self.progress.after({"event": "done", "outcome": "failed", "message": why})

    def cancel(self) -> None:
        """Ask the run to end; end it if it has not soon."""
        if self._process.stdin:
            self._process.stdin.close()
        threading.Thread(target=self._end, daemon=True).start()

    def _end(self) -> None:
        self._listener.join(_PATIENCE_SECONDS)
        if self._process.poll() is None:
            self._process.kill()


_runs: dict[str, Handle] = {}
_lock = threading.Lock()


def start(plan: MeasurePlan, command: Sequence[str] = MEASURE, model: str = "") -> str:
    """Start a run, about this model where the plan asks for one; returns its key. InputError when this server has as many as it takes."""
    with _lock:
        ended = [key for key, handle in _runs.items() if handle.progress.outcome]
        if len(_runs) - len(ended) >= _MOST:
            raise InputError(f"measure: {_MOST} runs are waiting or running already; let some end first")
        for key in ended[:-_KEPT]:
            del _runs[key]
        handle = Handle(f"{plan.workload}, {plan.size}", plan.arguments(model), command)
        _runs[handle.progress.key] = handle
    return handle.progress.key


def cancel(key: str) -> None:
    """End a run; its finished rows are kept. Nothing happens when it has ended or is not known."""
    handle = _runs.get(key)
    if handle and not handle.progress.outcome:
        handle.cancel()


def progress(key: str) -> Progress | None:
    """What is known of a run; None for one that this server does not know (any more)."""
    handle = _runs.get(key)
    return handle.progress if handle else None


def runs() -> list[Progress]:
    """Every run that this server knows, the oldest first."""
    with _lock:
        return [handle.progress for handle in _runs.values()]


def ask(*arguments: str, seconds: float = 60.0) -> Any:
    """The JSON answer of `python -m measure ...`. InputError with its complaint, or when it takes too long."""
    try:
        done = subprocess.run(
            [*MEASURE, *arguments, "--format", "json"],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
            env=child_environment(),
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"measure {arguments[0]}: no answer within {seconds:g} s; does the GPU's driver hang?"
        ) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise InputError(lines[-1] if lines else f"measure {arguments[0]}: ended with status {done.returncode}")
    return json.loads(done.stdout)


def is_offered() -> bool:
    """Whether measuring shows at all: MEASURE=off hides it, for servers that are open to others."""
    return os.environ.get("MEASURE", "").lower() != "off"


def is_open() -> bool:
    """Whether MEASURE=anyone lets everyone who reaches the page measure."""
    return os.environ.get("MEASURE", "").lower() == "anyone"


def hindrance() -> str:
    """Why the browser of this session may not start or end runs, nor take results in; "" when it may."""
    return refusal(st.context.headers, st.context.ip_address)


def check() -> None:
    """What acts asks this again when it acts: a client can send the click of a button that the page shows as disabled. InputError."""
    if refused := hindrance():
        raise InputError(refused, "MEASURE")


def action_key(name: str) -> str:
    """The key of a button that acts, with this session's secret in it: only who was sent the page can name the button."""
    return f"{name} {st.session_state.setdefault(_TOKEN, secrets.token_hex(16))}"


def openness() -> None:
    """A line that says what MEASURE=anyone opens, where it is set."""
    if is_open():
        st.caption(_ANYONE)


def refusal(headers: Mapping[str, str], address: str | None) -> str:
    """Why the browser with these request headers may not start a run; "" when it may.

    Only a browser on this machine may, unless MEASURE=anyone. `address` is its IP, None for this machine's own (Streamlit's
    convention). A proxy on this machine would make everyone look local, so what it forwards counts as from elsewhere; the Host
    header must name this machine, lest another site's name be pointed here.
    """
    if not is_offered():
        return "Measuring is switched off on this server (MEASURE=off)."
    if is_open():
        return ""
    known = {name.lower(): value for name, value in headers.items()}
    if known.get(ACCOUNT) == OTHER:
        return "Only the account that serves this page may start a run (MEASURE=anyone lets all)."
    forwarded = any(name in known for name in ("forwarded", "x-forwarded-for", "x-real-ip"))
    host = known.get("host", "localhost").lower()
    named = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if address not in (None, "127.0.0.1", "::1") or forwarded or named not in _LOCAL_HOSTS:
        return "Only a browser on the machine that serves this page may start a run (MEASURE=anyone lets all)."
    return ""


def why_not_installed() -> str:
    """What keeps this Python from measuring, and what to do; "" when PyTorch is there. Imports nothing."""
    folder = Path(sys.prefix)
    if _is_installing(folder / ".measuring-installing"):
        return "PyTorch is being installed in the background; this page can measure once that has ended (minutes)."
    if (folder / ".measuring-failed").exists():
        return f"Installing PyTorch failed; {folder / 'runs.log'} says why. `make run` tries again."
    invalidate_caches()  # a package that was installed a moment ago must be seen
    if find_spec("torch") is None:
        return "PyTorch is not installed in this Python; `make run` installs it in the background."
    return ""


def _is_installing(status: Path) -> bool:
    """Whether the process that the status file names still runs."""
    try:
        os.kill(int(status.read_text(encoding="ascii")), 0)
    except PermissionError:
        return True  # another user's: it lives
    except (OSError, ValueError):
        return False
    return True

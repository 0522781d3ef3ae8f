"""The Hugging Face Hub: a model's config, and the headers of its weights by range requests.

All goes through huggingface_hub: its endpoint (HF_ENDPOINT), token (HF_TOKEN), cache (HF_HOME) and offline switch. Every call
ends within its time, reads no more than its limit, and fails with one InputError. No code of a repository is ever run.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Final, NamedTuple, TypeVar

from calc.errors import InputError
from calc.model.config import LARGEST_CONFIG

Result = TypeVar("Result")
SECONDS: Final = 15.0  # for the config
STORED_SECONDS: Final = 45.0  # for the headers of all shards
_PATIENCE = 0.7  # of the time left, for the first answer: what remains is for the cache
_CREDENTIALS = re.compile(r"//[^/\s]*@")  # of an address, that is of HF_ENDPOINT or a proxy
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_ID = re.compile(rf"(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{{0,127}}))?", re.ASCII)
_FILE = re.compile(
    rf"(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._-]{{0,127}}))?"
    r"/(?P<file>[A-Za-z0-9][A-Za-z0-9._/-]{0,200}\.(?:gguf|safetensors))",
    re.ASCII,
)


class NotThere(InputError):
    """The repository is there, and the file is not in it."""


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository on the Hub, a revision (a branch, a tag or a commit), and a file in it where one was named."""

    repo: str
    revision: str = "main"
    file: str = ""


@dataclass(frozen=True, slots=True)
class Hub:
    """Where the Hub is and where answers are kept ("": as huggingface_hub has it), and how long a call may take."""

    endpoint: str = ""
    cache: str = ""
    seconds: float = SECONDS
    stored_seconds: float = STORED_SECONDS


class Fetched(NamedTuple):
    """A file of a repository: its bytes, the commit it is from, and why it is from the cache ("" when it is not)."""

    data: bytes
    commit: str
    remark: str = ""


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE is set: what the cache holds answers, and nothing else is asked."""
    return bool(_constants().is_offline_mode())


def _constants() -> Any:
    """huggingface_hub's settings. InputError where HF_ENDPOINT is no address at all: then it does not even start."""
    try:
        from huggingface_hub import constants
    except ValueError as error:
        raise InputError(
            f"HF_ENDPOINT: it is no web address ({error}); leave it unset, or give one", "HF_ENDPOINT"
        ) from None
    return constants


def parse_id(text: str) -> HubId | None:
    """`owner/name`, `owner/name@revision`, or either with `/path/to/file.gguf`; None when it is not such an id."""
    found = _FILE.fullmatch(text) or _ID.fullmatch(text)
    if not found or ".." in text or "--" in found["repo"] or found["repo"].endswith((".git", ".", "-")):
        return None
    if len(found["repo"]) > 96 or found["repo"].split("/")[0].endswith((".", "-")):
        return None
    return HubId(found["repo"], found["revision"] or "main", found.groupdict().get("file") or "")


def needed_id(text: str) -> HubId:
    """The id. InputError where the text is none: nothing else is ever looked up by it."""
    found = parse_id(text)
    if found is None:
        raise InputError.of("hub_id", text, "it must be owner/name or owner/name@revision, as on the model's page")
    return found


@dataclass(slots=True)
class Call:
    """One question to the Hub and the time it has left."""

    hub: Hub
    hub_id: HubId
    file: str
    seconds: float
    end: float = field(init=False)

    def __post_init__(self) -> None:
        self.end = monotonic() + self.seconds

    def left(self) -> float:
        """Seconds left. TimeoutError when there are none."""
        left = self.end - monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    @property
    def place(self) -> str:
        return (self.hub.endpoint or str(_constants().ENDPOINT)).rstrip("/")

    @property
    def shown(self) -> str:
        """The repository and its place for messages, without a password that the address may hold."""
        return f"{self.hub_id.repo} on {_CREDENTIALS.sub('//', self.place)}"

    def run(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, or one InputError: within the time even when a server sends a byte now and then."""
        _quiet()
        done: list[Result] = []
        failed: list[BaseException] = []

        def guarded() -> None:
            try:
                done.append(work())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        thread.join(self.seconds)
        if done:
            return done[0]
        error = failed[0] if failed else TimeoutError()
        try:
            raise error if isinstance(error, InputError) else self.complaint(error)
        finally:
            failed.clear()
            del error  # the traceback of an error that is kept holds sockets open

    def complaint(self, error: BaseException) -> InputError:
        """The one line about an error: what happened and what to do."""
        names = {kind.__name__ for kind in type(error).__mro__}
        status = status_of(error)
        what = next((text for name, text in _BY_NAME if name in names), None) or next(
            (text for codes, text in _BY_STATUS if status in codes), None
        )
        otherwise = "{error}" if status is None else "it answers {status}; try again later"
        kind = NotThere if names & {"RemoteEntryNotFoundError"} else InputError
        known = {
            "error": f"{type(error).__name__}: {str(error)[:200]}",
            "repo": self.hub_id.repo,
            "revision": self.hub_id.revision,
            "file": self.file,
            "place": self.shown.partition(" on ")[2],
            "status": status,
            "seconds": f"{self.seconds:g}",
        }
        return kind(f"MODEL: {self.shown}: {_CREDENTIALS.sub('//', (what or otherwise).format_map(known))}", "MODEL")


_REFUSED = (
    "access is refused ({status}): the model is gated or private, or there is none of that name; accept its terms on "
    "{place}/{repo} and set HF_TOKEN to a token that may read it"
)
_LOCAL = "give a catalogue name or the path to a config.json"
# an error of huggingface_hub or httpx by the name of its class or a base of it, the most telling first
_BY_NAME = (
    ("GatedRepoError", _REFUSED),
    ("RevisionNotFoundError", "it has no revision {revision!r}; leave @{revision} out for the newest"),
    ("RemoteEntryNotFoundError", "it has no {file} at revision {revision}"),
    ("OfflineModeIsEnabled", f"HF_HUB_OFFLINE is set and {{file}} is not in the cache; unset it, or {_LOCAL}"),
    ("LocalEntryNotFoundError", f"{{file}} is not in the cache and the Hub cannot be asked; {_LOCAL}"),
    ("TimeoutError", f"{{file}} was not read within {{seconds}} s; try again, or {_LOCAL}"),
    ("TimeoutException", f"{{file}} was not read within {{seconds}} s; try again, or {_LOCAL}"),
    ("TooManyRedirects", "it redirects without end; check HF_ENDPOINT"),
    ("UnsupportedProtocol", "that is no web address; HF_ENDPOINT must be one, such as https://huggingface.co"),
    ("InvalidURL", "that is no web address; HF_ENDPOINT must be one, such as https://huggingface.co"),
    ("FileMetadataError", "its answer lacks what the Hub sends with a file; check HF_ENDPOINT and any proxy"),
    ("ProxyError", "the proxy cannot be reached; check HTTPS_PROXY"),
    ("RemoteProtocolError", "the answer broke off before its end; try again"),
    ("DecodingError", "the answer is garbled; check HF_ENDPOINT and any proxy"),
    ("NetworkError", f"it cannot be reached; check the network and HF_ENDPOINT, or {_LOCAL}"),
)
_BY_STATUS = (
    ((401, 403), _REFUSED),
    ((404,), "there is no such model; check the name, and set HF_TOKEN if it is private"),
    ((429,), "too many requests (429); wait a few minutes, or set HF_TOKEN for a higher limit"),
    (range(500, 600), f"the server has a problem ({{status}}); try again later, or {_LOCAL}"),
)


def _quiet() -> None:
    """huggingface_hub asks for the file and nothing else: no telemetry, which costs a request of its own, and no log lines."""
    _constants().HF_HUB_DISABLE_TELEMETRY = True
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error tells, if any."""
    status: int | None = getattr(getattr(error, "response", None), "status_code", None)
    return status


def fetch(hub_id: HubId, file: str, largest: int = LARGEST_CONFIG, hub: Hub = Hub()) -> Fetched:
    """A small file of a repository, through huggingface_hub's cache.

    Where the Hub cannot be asked, what the cache holds answers, and `remark` says so. InputError when it is larger than
    `largest` bytes or cannot be had; NotThere when the repository lacks it.
    """
    call = Call(hub, hub_id, file, hub.seconds)
    return call.run(lambda: _fetch(call, largest))


def _fetch(call: Call, largest: int) -> Fetched:
    if is_offline():
        return _read(call, _cached(call, None), largest, "HF_HUB_OFFLINE is set: read from the cache")
    try:
        _check(call, largest)
        path = _download(call, largest)
    except Exception as error:
        complaint = error if isinstance(error, InputError) else call.complaint(error)
        if isinstance(error, InputError) or status_of(error) in (401, 403, 404):
            raise complaint from None
        return _read(call, _cached(call, complaint), largest, f"read from the cache, because {complaint.args[0]}")
    return _read(call, path, largest, "")


def metadata_of(call: Call) -> tuple[str, int | None]:
    """The commit that the file is of, and its size in bytes where the server says it, before anything of it is read."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import FileMetadataError

    url = hf_hub_url(call.hub_id.repo, call.file, revision=call.hub_id.revision, endpoint=call.place)
    told = get_hf_file_metadata(url, timeout=call.left() * _PATIENCE, endpoint=call.place)
    if not told.commit_hash:
        raise FileMetadataError("no commit")
    return told.commit_hash, told.size


def _check(call: Call, largest: int) -> None:
    """InputError unless the server says that the file is small enough."""
    size = metadata_of(call)[1]
    if size is None or size > largest:
        told = "of unknown size" if size is None else f"{size:,} bytes"
        raise InputError(
            f"MODEL: {call.shown}: {call.file} is {told}; at most {largest:,} bytes are read",
            "MODEL",
        )


def _download(call: Call, largest: int) -> str:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import tqdm

    class Meter(tqdm):
        """Shows nothing, and ends a download that is larger or longer than it may be."""

        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **{**options, "disable": True})  # type: ignore[no-untyped-call]
            self.read = 0

        def update(self, n: float | None = 1) -> bool | None:
            self.read += int(n or 0)
            if self.read > largest:
                raise InputError(f"MODEL: {call.hub_id.repo}: {call.file} is larger than its size says", "MODEL")
            call.left()
            return None

    path: str = hf_hub_download(
        call.hub_id.repo,
        call.file,
        revision=call.hub_id.revision,
        endpoint=call.place,
        cache_dir=call.hub.cache or None,
        etag_timeout=call.left(),
        tqdm_class=Meter,
    )
    return path


def _cached(call: Call, complaint: InputError | None) -> str:
    """The file in the cache; the complaint, or that it is not there, when it is not."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        path: str = hf_hub_download(
            call.hub_id.repo,
            call.file,
            revision=call.hub_id.revision,
            cache_dir=call.hub.cache or None,
            local_files_only=True,
        )
        return path
    except LocalEntryNotFoundError:
        raise (complaint or OfflineModeIsEnabled()) from None


def _read(call: Call, path: str, largest: int, remark: str) -> Fetched:
    """The cached file's bytes; the commit is the name of its snapshot's folder."""
    with open(path, "rb") as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise InputError(f"MODEL: {path!r} is larger than {largest:,} bytes", "MODEL")
    return Fetched(data, Path(path).parents[call.file.count("/")].name, remark)

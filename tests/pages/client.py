"""A browser's side of Streamlit's WebSocket without a browser: many sessions in one process, and what no browser would send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from streamlit.proto.WidgetStates_pb2 import WidgetState
from websockets.sync.client import ClientConnection, connect

PATIENCE = 60.0  # seconds for one redraw


@dataclass(slots=True)
class Client:
    """One session. `widgets` are the ids of the widgets that its page has, by kind and label; `texts` what the page says."""

    socket: ClientConnection
    widgets: dict[tuple[str, str], str] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    values: dict[str, WidgetState] = field(default_factory=dict)
    fragments: dict[str, str] = field(default_factory=dict)  # by the widget's id
    seen: dict[str, ForwardMsg] = field(default_factory=dict)

    def redraw(self, query: str = "", page: str = "", clicked: str = "", fragment: str = "") -> None:
        """Send the widgets' values, one button clicked, and read until the script has ended."""
        message = BackMsg()
        state = message.rerun_script
        state.query_string, state.page_name, state.fragment_id = query, page, fragment
        state.widget_states.widgets.extend(self.values.values())
        if clicked:
            state.widget_states.widgets.append(WidgetState(id=clicked, trigger_value=True))
        self.socket.send(message.SerializeToString())
        self.until_finished()

    def put(self, label: str, text: str) -> None:
        """Type into a text field, and read until the page is drawn again."""
        name = self.widgets["text_input", label]
        self.values[name] = WidgetState(id=name, string_value=text)
        self.redraw(fragment=self.fragments.get(name, ""))

    def until_finished(self) -> None:
        while True:
            message = ForwardMsg.FromString(bytes(self.socket.recv(timeout=PATIENCE)))
            if message.WhichOneof("type") == "ref_hash":
                message = self.seen[message.ref_hash]
            elif message.hash:
                self.seen[message.hash] = message
            kind = message.WhichOneof("type")
            if kind == "delta":
                self._note(message.delta)
            elif kind == "script_finished":
                return

    def _note(self, delta: Any) -> None:
        if delta.WhichOneof("type") != "new_element":
            return
        element = delta.new_element
        kind = element.WhichOneof("type")
        part = getattr(element, kind)
        if hasattr(part, "label") and hasattr(part, "id"):
            self.widgets[kind, part.label] = part.id
            self.fragments[part.id] = delta.fragment_id
        elif hasattr(part, "body"):
            self.texts.append(part.body)


@contextmanager
def session(url: str, headers: Mapping[str, str] = {}) -> Iterator[Client]:
    """A session of the server at that address; `headers` are sent with the request that opens it."""
    address = f"{url.replace('http', 'ws', 1)}/_stcore/stream"
    with connect(address, subprotocols=["streamlit"], additional_headers=dict(headers), max_size=None) as socket:  # type: ignore[list-item]
        yield Client(socket)

"""A server that answers requests with the bytes it was given, and then does what it was told."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

MODELS = json.dumps({"object": "list", "data": [{"id": "m"}]}).encode()


def response(body: bytes, *, status: str = "200 OK", kind: str = "application/json", head: str = "") -> bytes:
    start = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{head}"
    return start.encode() + b"Connection: close\r\n\r\n" + body


def stream(body: bytes, *, length: int | None = None) -> bytes:
    """An answer of server-sent events; without `length` it ends when the connection does."""
    size = f"Content-Length: {length}\r\n" if length is not None else ""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{size}Connection: close\r\n\r\n"
    return head.encode() + body


def events(*data: object, length: int | None = None) -> bytes:
    """An answer of events that have JSON in them; text is taken as it is."""
    bodies = (item if isinstance(item, str) else json.dumps(item, ensure_ascii=False) for item in data)
    return stream("".join(f"data: {body}\n\n" for body in bodies).encode(), length=length)


def chunk(text: str | None, *, finish: str | None = None, chat: bool = True) -> dict[str, object]:
    choice: dict[str, object] = {"index": 0, "finish_reason": finish}
    choice |= {"delta": {"content": text}} if chat else {"text": text or ""}
    return {"choices": [choice], "usage": None}


def usage(prompt: object, output: object) -> dict[str, object]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}}


@dataclass
class HostileServer:
    """What a test knows of a server."""

    url: str
    requests: list[tuple[str, bytes]] = field(default_factory=list)
    """path and body of each but those for models, in the order in which they came"""
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, count: int) -> None:
        """Return when `count` requests have come."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.requests) >= count, timeout=60)


@contextmanager
def hostile_server(
    answer: bytes, *, hang: float = 0.0, models: bytes | None = None, first: Sequence[bytes] = ()
) -> Iterator[HostileServer]:
    """A server that gives `first` answers in turn, then `answer` to everyone, and hangs for some seconds.

    Asked for models it is polite, unless told how to answer.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    server = HostileServer(f"http://127.0.0.1:{listener.getsockname()[1]}")
    stop = threading.Event()

    def serve(connection: socket.socket) -> None:
        # A client that has had enough closes the connection while the answer is under way.
        with connection, suppress(OSError):
            request = b""
            while b"\r\n\r\n" not in request:
                if not (data := connection.recv(1 << 16)):
                    return
                request += data
            path = request.split()[1].decode()
            if path == "/v1/models":
                connection.sendall(response(MODELS) if models is None else models)
                return
            head, _, body = request.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            while len(body) < length:
                body += connection.recv(1 << 16)
            with server.arrived:
                number = len(server.requests)
                server.requests.append((path, body))
                server.arrived.notify_all()
            if number < len(first):
                connection.sendall(first[number])
                return
            connection.sendall(answer)
            stop.wait(hang)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()

"""A server that answers each request with the bytes it was given, and then does what it was told."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MODELS = json.dumps({"object": "list", "data": [{"id": "m"}]}).encode()


def response(body: bytes, *, status: str = "200 OK", kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body


def events(*data: object, length: int | None = None) -> bytes:
    """A stream of server-sent events; without `length` it ends when the connection does."""
    body = b"".join(b"data: " + json.dumps(item).encode() + b"\n\n" for item in data)
    size = f"Content-Length: {length}\r\n" if length is not None else ""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{size}Connection: close\r\n\r\n"
    return head.encode() + body


def chunk(text: str | None, *, finish: str | None = None, chat: bool = True) -> dict[str, object]:
    choice: dict[str, object] = {"index": 0, "finish_reason": finish}
    choice |= {"delta": {"content": text}} if chat else {"text": text or ""}
    return {"choices": [choice], "usage": None}


@contextmanager
def hostile_server(answer: bytes, *, hang: float = 0.0) -> Iterator[str]:
    """The URL of a server. Asked for models it is polite; anything else gets `answer`."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection:
            request = b""
            while b"\r\n\r\n" not in request:
                if not (data := connection.recv(1 << 16)):
                    return
                request += data
            if b" /v1/models" in request.splitlines()[0]:
                connection.sendall(response(MODELS))
                return
            head, _, body = request.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            while len(body) < length:
                body += connection.recv(1 << 16)
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
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()

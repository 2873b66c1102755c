"""An HTTP server that fails as it is told; what it serves looks like objects of S3, too."""

from __future__ import annotations

import hashlib
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = (
    "reset",  # half the body, then the connection is reset
    "short",  # half the body, then the end
    "lying",  # half the body, and a Content-Length that agrees
    "silent",  # half the body, then nothing
    "mute",  # nothing at all
    "whole",  # the Range is ignored
    "other",  # another part
    "500",
    "503",
    "429",
)


class FaultyServer(ThreadingHTTPServer):
    """Serves ``objects``, by path.

    Attributes:
        faults: what goes wrong with the next requests for parts of each path, one after the other.
        always: what goes wrong with every request for a path.
        etags: of paths whose ETag is not the MD5 of the content; "" for none.
        headers: more headers of answers.
        ranges: whether there are parts.
        asked: how often parts of each path were asked for, leaving out what only looks it up.
        on_part: called when a part is asked for.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.faults: dict[str, list[str]] = {}
        self.always: dict[str, str] = {}
        self.etags: dict[str, str] = {}
        self.headers: dict[str, str] = {}
        self.ranges = True
        self.asked: Counter[str] = Counter()
        self.on_part: Callable[[], None] = lambda: None
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: object) -> None:
        """Says nothing: clients go away in the middle."""


class _Handler(BaseHTTPRequestHandler):
    server: FaultyServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        server, path = self.server, self.path.partition("?")[0]
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(found[1]), int(found[2])) if found else (0, 1 << 62)
        fault = server.always.get(path, "")
        if self.command == "GET" and (first, last) != (0, 0):
            server.asked[path] += 1
            server.on_part()
            if server.faults.get(path):
                fault = fault or server.faults[path].pop(0)
        if fault == "mute":
            server.ended.wait(2)
            self.close_connection = True
            return
        content = server.objects.get(path)
        if fault.isdigit() or content is None:
            self._answer(int(fault) if fault else 404, b"")
            return
        if fault == "whole" or not server.ranges or not found:
            self._answer(200, content, len(content), fault, content)
        elif first >= len(content):
            self._answer(416, b"", 0, "", content, f"bytes */{len(content)}")
        else:
            if fault == "other":
                first += 1
            body = content[first : last + 1]
            told = f"bytes {first}-{first + len(body) - 1}/{len(content)}"
            self._answer(206, body, len(body), fault, content, told)

    def _answer(
        self,
        status: int,
        body: bytes,
        length: int = 0,
        fault: str = "",
        content: bytes = b"",
        told: str = "",
    ) -> None:
        if fault == "lying":
            length //= 2
        self.send_response_only(status)
        self.send_header("Content-Length", str(length))
        path = self.path.partition("?")[0]
        etag = self.server.etags.get(path)
        if etag is None:
            etag = hashlib.md5(content).hexdigest()
        if etag and status < 400:
            self.send_header("ETag", f'"{etag}"')
        if told:
            self.send_header("Content-Range", told)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        half = fault in ("reset", "short", "lying", "silent")
        self.wfile.write(body[: len(body) // 2] if half else body)
        self.wfile.flush()
        if fault == "silent":
            self.server.ended.wait(2)
        if fault == "reset":
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        if half:
            self.close_connection = True


@contextmanager
def serving() -> Iterator[FaultyServer]:
    """A server, in threads of this process."""
    server = FaultyServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()

"""A web server on this machine, which may hang up in the middle."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Serves bytes by path, and of a folder links to what is in it.

    Attributes:
        cuts: how many bytes it sends before it hangs up, one an answer; when there are none left,
            all.
        asked: the ranges that were asked for.
        sent: how many bytes it sent before the other side hung up.
        more: how many bytes it sends besides a range that was asked for.
    """

    def __init__(self, files, ranges):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.ranges, self.cuts, self.asked, self.sent = files, ranges, [], [], 0
        self.more = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        content = self.server.files.get(self.path, self._links())
        if not content:
            self.send_error(404)
            return
        asked = self.headers.get("Range")
        self.server.asked.append(asked)
        begin, end = 0, len(content)
        if asked and self.server.ranges:
            first, last = asked.split("=")[1].split("-")
            begin, end = int(first), int(last) + 1 if last else end
        part = content[begin:end] + bytes(self.server.more if asked else 0)
        self.send_response(206 if asked and self.server.ranges else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Accept-Ranges", "bytes")
        if asked and self.server.ranges:
            self.send_header(
                "Content-Range", f"bytes {begin}-{begin + len(part) - 1}/{len(content)}"
            )
        self.end_headers()
        if self.command == "GET":
            part = (
                memoryview(part)[: self.server.cuts.pop(0)]
                if self.server.cuts
                else memoryview(part)
            )
            with contextlib.suppress(ConnectionError):
                for first in range(0, len(part), 2**16):
                    self.wfile.write(part[first : first + 2**16])
                    self.server.sent += 2**16

    do_HEAD = do_GET

    def _links(self):
        folder = self.path.rstrip("/") + "/"
        below = [
            name.removeprefix(folder).partition("/")
            for name in self.server.files
            if name.startswith(folder)
        ]
        names = sorted({name + slash for name, slash, _ in below})
        return "".join(f'<a href="{name}">' for name in names).encode()

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(files, ranges=True):
    server = Server(files, ranges)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

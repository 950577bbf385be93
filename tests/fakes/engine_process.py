"""A program that behaves like an engine process: it loads, answers /health, and dies when told to.

`python engine_process.py PORT FOLDER`: writes a line, serves, and leaves `FOLDER/pid-<n>` for each start. If
`FOLDER/broken` exists it ends with status 3 instead; if `FOLDER/deaf` exists it ignores SIGTERM; if `FOLDER/forks`
exists it starts a process, as a vLLM does, which has its output and would outlive it: `FOLDER/forked-<n>`.
"""

import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def main(port: int, folder: Path) -> None:
    print("2026-01-01T00:00:00.000Z info fourhop.service.progress loading percent=50", flush=True)
    if (folder / "broken").exists():
        print("no weights here", file=sys.stderr, flush=True)
        sys.exit(3)
    if (folder / "deaf").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    HTTPServer.allow_reuse_address = True
    server = HTTPServer(("127.0.0.1", port), Health)
    starts = len(list(folder.glob("pid-*")))
    if (folder / "forks").exists():
        forked = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        (folder / f"forked-{starts}").write_text(str(forked.pid))
    (folder / f"pid-{starts}.partial").write_text(f"{os.getpid()} {sorted(os.sched_getaffinity(0))}")
    (folder / f"pid-{starts}.partial").rename(folder / f"pid-{starts}")
    print("up", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

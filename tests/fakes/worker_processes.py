"""`python worker_processes.py FOLDER NUM`: processes of `run_processes` that write their ids into FOLDER and wait.

A file `refused` in the folder makes them refuse to start, a file `broken` makes them end without a word.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from fourhop.service.processes import run_processes
from fourhop.service.siblings import Siblings
from fourhop.wire.errors import StartError


def main(folder: Path, num_processes: int) -> None:
    def work(siblings: Siblings | None, serves: Callable[[], None]) -> None:
        if (folder / "refused").exists():
            raise StartError("no vocabulary here")
        if (folder / "broken").exists():
            os._exit(7)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        serves()
        (folder / f"pid-{os.getpid()}").touch()
        number = signal.sigwait({signal.SIGINT, signal.SIGTERM})
        (folder / f"end-{os.getpid()}").write_text(signal.Signals(number).name)

    try:
        run_processes(work, num_processes, drain_timeout_s=20.0)
    except StartError as error:
        sys.exit(f"one line: {error}")


if __name__ == "__main__":
    logging.basicConfig(level="INFO", stream=sys.stderr)
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""`python child.py PARENT_PID CORES COMMAND...`: become COMMAND, pinned to cores, and die when the parent dies.

The command hears SIGINT and SIGTERM even where the parent does not: what a shell script starts in the background
ignores SIGINT, and hands that on.

It runs between fork and exec as a program of its own, since code may not run there in a process that has threads.
Affinity and the death signal both survive exec.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(parent: int, cores: str, command: list[str]) -> None:
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # A parent that died before the line above has left this process to another one already.
    if os.getppid() != parent:
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])

"""Run a command that the kernel kills when its parent ends: `python die_with_parent.py <parent pid> <command>...`

The launcher starts every rank through this file, so that no rank outlives a launcher that was itself killed. It is a
program of its own because the wish (PR_SET_PDEATHSIG) has to be made by the child: Popen's preexec_fn would run Python
between fork and exec, which can deadlock in a process with threads. The wish survives exec. The kernel takes the death
of the *thread* that forked for the death of the parent, so a launcher starts its ranks from its main thread.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(parent_pid: int, command: list[str]) -> None:
    """Become `command`. Raises OSError when it cannot be run, SystemExit when the parent has ended meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the wish was made
        raise SystemExit(f"the launcher (pid {parent_pid}) has ended; not starting {command[0]}.")
    # The interpreter ignores SIGPIPE, and what is ignored stays ignored over exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(command[0], command)  # noqa: S606  # the command line is the launcher's user's own


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

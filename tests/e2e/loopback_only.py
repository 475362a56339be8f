"""Run a program where there is no network but loopback: `python loopback_only.py PROGRAM [ARG ...]`.

Started under `unshare -rn`: a new network namespace has a loopback interface that is down, and no program to bring it
up is needed, only one ioctl.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys

SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1


def bring_loopback_up() -> None:
    """ifconfig lo up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


if __name__ == "__main__":
    bring_loopback_up()
    os.execv(sys.argv[1], sys.argv[1:])

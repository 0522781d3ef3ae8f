"""Bytes that this process has sent over TCP, by the kernel's own count: what a collective really moves, whatever its algorithm.

Linux only, and gloo only: NCCL's shared memory, NVLink and InfiniBand pass no socket.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

# struct tcp_info (linux/tcp.h) from Linux 4.19 on: tcpi_bytes_sent, payload without headers, and tcpi_bytes_retrans of it
_SENT_OFFSET, _LONG_ENOUGH = 200, 216


def bytes_sent() -> int | None:
    """Payload bytes sent so far (none counted twice) over the TCP connections that are open now; None where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        info = _tcp_info(int(name))
        if info is None:
            continue
        if len(info) < _LONG_ENOUGH:
            return None
        sent, again = struct.unpack_from("=QQ", info, _SENT_OFFSET)
        total += sent - again
    return total


def _tcp_info(descriptor: int) -> bytes | None:
    """The kernel's record of a connection; None when the descriptor is no TCP socket."""
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return None
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            if copy.type != socket.SOCK_STREAM or copy.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            return copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:  # closed in between
        return None

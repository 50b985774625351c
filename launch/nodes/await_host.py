"""Waits, not for ever, until a job's first node can be reached.

On Kubernetes the name of the first node's pod resolves only some time after the others have started, and what it runs
listens later still, when its image has been pulled. ``torch.distributed.run`` gives up after a minute, or at once.
"""

import socket
import sys
import time

_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
POLL_SECONDS = 1.0


def await_host(host: str, port: int, seconds: float) -> str:
    """Waits until ``port`` of ``host`` accepts connections; does not wait where the host is this one.

    Args:
        host: Name or address.
        port: TCP port.
        seconds: How long to wait at most.

    Returns:
        "" once it accepts connections, else what was wrong last.
    """
    if host in _LOCAL_HOSTS:
        return ""
    deadline = time.monotonic() + seconds
    printed = ""
    while True:
        reason = unreachable(host, port)
        if not reason or time.monotonic() >= deadline:
            return reason
        if reason != printed:
            print(f"waiting up to {seconds:g} s for {host}:{port}: {reason}", file=sys.stderr, flush=True)
            printed = reason
        time.sleep(min(POLL_SECONDS, max(deadline - time.monotonic(), 0)))


def unreachable(host: str, port: int) -> str:
    """Returns why a port accepts no connections; "" where it does."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except socket.gaierror as error:
        return f"the name does not resolve ({error.strerror})"
    except OSError as error:
        return f"it takes no connections ({error.strerror or error})"
    return ""

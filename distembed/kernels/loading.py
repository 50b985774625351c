"""Compiles the CPU kernels once for all processes of a machine, and says why where that is impossible.

Numba compiles a kernel at its first use, in a few seconds, and keeps it in a file next to the module or, where that
folder is read-only, in the user's cache folder. Ranks of one machine that need it at the same time wait for the first
one, which compiles it.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from distembed.base.errors import UserError

_log = logging.getLogger(__name__)

INSTALL = "pip install numba"
_LONGEST_WAIT = 180.0
"""Seconds that a process waits for another one to compile, which takes a few."""
_ONE_THREAD = threading.Lock()
"""Held by the thread that compiles, since numba's settings are global."""
_NOT_COMPILED = ("__init__", "operation", "tables", "triton")
"""Beginnings of the names of files that hold no code of the CPU kernels."""


class Kernels(NamedTuple):
    """The two passes, compiled."""

    compose: Callable[[int, int, int, int], None]  # the forward pass, ``(job, share, num_shares, scratch)``
    # the backward pass, ``(job, tables, num_tables, scratch, scratch_bytes)``
    update: Callable[[int, int, int, int, int], int]


class Dots(NamedTuple):
    """The kernels of pairs' dot products, compiled; both take ``(job, first_row, end_row, scratch)``."""

    multiply: Callable[[int, int, int, int], int]
    gradients: Callable[[int, int, int, int], int]


@cache
def reason_unavailable() -> str | None:
    """Returns why the kernels are unavailable here, in a sentence with a remedy; None where they are available."""
    _source_stamp()  # cached now, so that it describes the sources as imported and not as edited later
    try:
        import_module("distembed.kernels.compose")
    except ImportError as error:
        return f"numba cannot be imported ({error}); {INSTALL}"
    except Exception as error:  # numba refuses versions of NumPy and of Python in many ways
        return f"numba cannot be loaded ({type(error).__name__}: {error}); install versions of it and NumPy that fit"
    if platform.machine() in ("x86_64", "AMD64") and not _has_halves():
        return "the processor, or the one that numba is set to compile for, cannot convert float16 (f16c)"
    return None


def _has_halves() -> bool:
    """Returns whether numba compiles for an x86 processor that converts float16; LLVM would abort without it."""
    from llvmlite import binding
    from numba.core import config

    cpu_features: str | None = getattr(config, "CPU_FEATURES")  # noqa: B009  # set as numba is imported
    return "+f16c" in (binding.get_host_cpu_features().flatten() if cpu_features is None else cpu_features).split(",")


@cache
def load_kernels(lanes: int) -> Kernels:
    """Returns the kernels for rows whose number of columns is a multiple of ``lanes``: 4, 8 or 16.

    The first call compiles them, or loads them from a file of an earlier process, and may wait minutes for a process
    that compiles. Raises a :class:`UserError` where numba or the processor does not suit.
    """
    reason = reason_unavailable()
    if reason is not None:
        raise UserError(f"the fused lookup: {reason}.")
    compose: Any = getattr(import_module("distembed.kernels.compose"), f"compose_{lanes}")
    update: Any = getattr(import_module("distembed.kernels.update"), f"update_{lanes}")
    with _one_at_a_time(), _optimised_once():
        for kernel, num_arguments in ((compose, 4), (update, 5)):
            _compile(kernel, "(" + ", ".join(["int64"] * num_arguments) + ")")
    return Kernels(compose, update)


@cache
def load_dots() -> Dots | None:
    """Returns the kernels of dot products; None where they cannot be compiled, and then logs why, as a warning."""
    reason = reason_unavailable()
    if reason is None:
        dots = import_module("distembed.kernels.dots")
        kernels = Dots(dots.multiply_pairs, dots.gradients_of_pairs)
        try:
            with _one_at_a_time(), _optimised_once():
                for kernel in kernels:
                    _compile(kernel, "(int64, int64, int64, int64)")
            return kernels
        except Exception as error:  # whatever a compiler may raise, torch can multiply without it
            reason = f"{type(error).__name__}: {error}"
    _log.warning("The kernels of dot products cannot be compiled (%s).", reason)
    return None


@cache
def load_identities() -> tuple[Callable[..., Any], Callable[..., None]]:
    """Returns ``admit`` and ``insert`` of the hash table of identities; raises a UserError as :func:`load_kernels`."""
    reason = reason_unavailable()
    if reason is not None:
        raise UserError(f"training with managed ids: {reason}.")
    identities = import_module("distembed.kernels.identities")
    with _one_at_a_time():
        _compile(identities.admit, identities.ADMIT)
        _compile(identities.insert, identities.INSERT)
    return identities.admit, identities.insert


@cache
def reason_not_compiled(lanes: int) -> str | None:
    """Compiles the kernels; returns None on success, else the reason, which is logged as a warning."""
    try:
        load_kernels(lanes)
    except Exception as error:  # whatever a compiler may raise, tables can be looked up without it
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        _log.warning("The kernels of the fused lookup cannot be compiled (%s).", reason)
        return f"its kernels cannot be compiled ({reason})"
    return None


@contextlib.contextmanager
def _optimised_once() -> Iterator[None]:
    """Has LLVM optimise at its first level: the third takes twice as long and gains nothing for explicit vectors."""
    from numba.core import config

    with _ONE_THREAD:
        before: Any = getattr(config, "OPT")  # noqa: B009  # set as numba is imported
        setattr(config, "OPT", type(before)(1))  # noqa: B010
        try:
            yield
        finally:
            setattr(config, "OPT", before)  # noqa: B010


def _compile(kernel: Any, signature: str) -> None:
    """Compiles a kernel for one signature, or loads it from numba's cache file.

    numba would trust the cache while the kernel's own file is unchanged; the stamp makes it look at all sources.
    """
    try:
        kernel.enable_caching()
    except RuntimeError:  # no folder can be written, and each process compiles for itself
        kernel.compile(signature)
        return
    files = kernel._cache
    files._cache_file._source_stamp = _source_stamp()
    try:
        kernel.compile(signature)
    except Exception:  # the file is damaged, or the disk full: it is emptied for the next process
        with contextlib.suppress(OSError):
            files.flush()
        files.disable()
        kernel.compile(signature)


@cache
def _source_stamp() -> str:
    """Returns a checksum of all sources of the kernels; any change of one compiles all of them again."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    sources = [path for path in files if not path.name.startswith(_NOT_COMPILED)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Holds a lock file in the block, so that one process of this user compiles and others load its result."""
    # the operating system releases the lock of a process that dies
    file = -1
    try:
        path = Path(tempfile.gettempdir()) / f"distembed-kernels-{os.getuid()}.lock"
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _lock(file)
    except OSError as error:  # where no file can be made or locked, each process compiles for itself
        _log.debug("The fused lookup's kernels are compiled without a lock (%s).", error)
    try:
        yield
    finally:
        if file >= 0:
            os.close(file)


def _lock(file: int) -> None:
    """Locks a file; after :data:`_LONGEST_WAIT` warns and returns without the lock, whose owner may be suspended."""
    until = time.monotonic() + _LONGEST_WAIT
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                _log.warning("Another process compiles the fused lookup's kernels for too long: it is not waited for.")
                return
            time.sleep(0.05)
        else:
            return

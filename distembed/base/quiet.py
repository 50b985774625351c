"""What TorchRec and torch log that no user can act on, and how it is kept out of the output."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_NOISY_LOGGERS = ("torchrec", "torch.fx._symbolic_trace")


def silence_loggers() -> None:
    """Keeps such records out for the rest of the process, as a command does, whose logging is its own."""
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger().addFilter(_concerns_user)


@contextmanager
def silenced_loggers() -> Iterator[None]:
    """Keeps such records out within the block, after which the process logs as it did before."""
    levels = {name: logging.getLogger(name).level for name in _NOISY_LOGGERS}
    was_filtered = _concerns_user in logging.getLogger().filters
    silence_loggers()
    try:
        yield
    finally:
        if not was_filtered:
            logging.getLogger().removeFilter(_concerns_user)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _concerns_user(record: logging.LogRecord) -> bool:
    """Returns False for what goes to the root logger and can be met with nothing.

    TorchRec tells it of each data-parallel table that it needs no shards; FBGEMM 1.6, as it is imported, that its list
    of the torch releases that it fits ends with its predecessor.
    """
    message = str(record.msg)
    return not (message.startswith("Sharding spec not found") or "_fbgemm_torch_compat_table has no entry" in message)

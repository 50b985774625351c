"""What libraries log is kept out while it is asked for, and the process logs afterwards as it did before."""

import logging

import pytest

from distembed.base.process import silenced_loggers


def test_the_block_alone_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    fx, root = logging.getLogger("torch.fx._symbolic_trace"), logging.getLogger()
    caplog.set_level(logging.WARNING, fx.name)  # a command that ran in this process has left it silent
    before = fx.level, list(root.filters)
    with silenced_loggers():
        fx.warning("is_fx_tracing will return true")
        root.warning("Sharding spec not found for C1")
        fx.error("heard within")
    fx.warning("heard afterwards")
    assert [record.message for record in caplog.records] == ["heard within", "heard afterwards"]
    assert (fx.level, list(root.filters)) == before


def test_an_error_leaves_the_logging_as_it_was() -> None:
    fx = logging.getLogger("torch.fx._symbolic_trace")
    level = fx.level
    with pytest.raises(KeyError), silenced_loggers():
        raise KeyError
    assert fx.level == level

"""What differs between the tested trios (:mod:`distembed.reports.doctor.trio`), where a test cannot do without knowing.

The only module that asks for a version, of tests and product alike: the product itself is written so that it need not.
Each difference stands here with its reason.
"""

from importlib.metadata import version

_TORCH = tuple(map(int, version("torch").split("+")[0].split(".")[:2]))
_TORCHREC = tuple(map(int, version("torchrec").split("+")[0].split(".")[:2]))

HARNESS_MAKES_OFFSETS = _TORCHREC >= (1, 8)
"""Whether TorchRec's own test harness makes sound batches with offsets.

That of torchrec 1.6.1 strings together the offsets of each feature, each from 0 on and with one number too many: such
a batch means nothing.
"""

SPARSE_ONLY_LACKS = set() if _TORCHREC >= (1, 8) else {"test_initialize_torch_state_error_includes_table_name"}
"""Which tests TorchRec's suite of a model that is one collection of bags does not have yet.

torchrec 1.6.1 lacks this one, with the error that it is about.
"""

PROGRAMS_HOLD_OPAQUE_CONSTANTS = _TORCH >= (2, 13)
"""Whether torch's loader of exported programs knows constants of a type of their own, which it unpickles.

That of torch 2.11 does not, and leaves such a record alone: a test that shows that torch runs it would show nothing.
"""

PREFETCH_ON_THE_CPU = "PrefetchPipelinedForward" if _TORCHREC >= (1, 8) else "unknown parameter type"
"""What TorchRec's prefetch pipeline says on the CPU, of stock modules as of others.

That of torchrec 1.6.1 gets no further than to a stream, which there is none of.
"""

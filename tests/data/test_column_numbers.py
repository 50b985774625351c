"""Few texts are read one by one, and many together, with the same result."""

import numpy as np
import pyarrow as pa

from distembed.data.prepare.column_numbers import hexadecimal_keys

TEXTS = ["0", "ffffffff", "FfFfFfFf", "0000000a", "a", "123456789", "", "g", "0x1", " 1", "1 ", "1_0", "1\n", "é", "٣"]


def test_few_texts_are_hexadecimal_numbers_as_many_are() -> None:
    many = pa.array(TEXTS * 10)
    keys, malformed = hexadecimal_keys(many)
    digits = set("0123456789abcdefABCDEF")
    good = [0 < len(text) <= 8 and set(text) <= digits for text in TEXTS]
    assert malformed.tolist() == [not each for each in good] * 10
    assert keys.tolist() == [int(text, 16) if each else 0 for text, each in zip(TEXTS, good, strict=True)] * 10
    for start in range(len(TEXTS)):
        few, few_malformed = hexadecimal_keys(many.slice(start, 3))
        assert few.dtype == np.uint32 and few.tolist() == keys[start : start + 3].tolist()
        assert few_malformed.tolist() == malformed[start : start + 3].tolist()
    assert [len(part) for part in hexadecimal_keys(many.slice(0, 0))] == [0, 0]

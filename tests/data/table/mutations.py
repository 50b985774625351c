"""Mutates the bytes of files, as damage, other programs and other people's habits do."""

import random

PIECES = [
    *(b"", b"\n", b"\r", b"\r\n", b"\0", b'"', b'""', b",", b"\t", b"|", b"\\", b"\xff", b"\xc3", b"\xef\xbb\xbf"),
    *(b"NaN", b"inf", b"-", b"1e999", b"0x1f", b"99999999999999999999", b"\xe2\x80\xa8", b"null", b"{}", b"[", b"'"),
    *(b'{"a":' * 40, b'"a\nb"', b"\n\n\n", b"   ", b"=1+1", b"x" * 300),
]


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Returns the content with some bytes or lines changed, taken out, doubled, swapped or put in."""
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        kind, place = rng.randrange(7), rng.randrange(len(content) + 1)
        end = min(len(content), place + rng.choice([0, 1, 1, 3, 40]))
        lines = content.split(b"\n")
        line, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        if kind == 0:
            content = content[:place] + rng.choice(PIECES) + content[end:]
        elif kind == 1:
            content = content[:place] + rng.randbytes(end - place) + content[end:]
        elif kind == 2:
            content = content[:place] + content[end:]
        elif kind == 3:
            lines[line], lines[other] = lines[other], lines[line]
            content = b"\n".join(lines)
        elif kind == 4:
            content = b"\n".join([*lines[:line], lines[other], *lines[line:]])
        elif kind == 5:
            content = b"\n".join([*lines[:line], *lines[line + 1 :]])
        else:
            content = content[:place] if rng.random() < 0.1 else content + content[place:end]
    return content

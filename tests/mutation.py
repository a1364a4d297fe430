"""Damage to files: random edits of bytes and of values, with how many bytes each one touched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

NASTY = (
    b"</script><script>alert(1)</script>",
    b"9" * 400,
    b"-1e999",
    b"18446744073709551616",
    b"[" * 3000,
    b'{"a":' * 3000,
    b"\x00" * 64,
    b"\xff\xfe\xfd",
    b"\\",
    b'"',
    b"\n",
    b"NaN",
    b"\x1b]0;x\x07",
    b"../../../../etc/passwd",
    b"__import__('os').system('true')",
)
# Values that stand where a number or text stood, most of them legal JSON.
_ODD_VALUES = (
    b"0", b"-1", b"1", b"null", b"true", b"1e308", b"1e-308", b"-0.0", b"9223372036854775807", b"9223372036854775808",
    b"18446744073709551616", b"1" + b"0" * 400, b"0.1", b"4294967296", b'""', b'"x"', b"[]", b"{}", b"[[]]", b"[1, 2]",
    b'{"a": 1}', b'"\\u001b[31mred\\u0007"', b'"\\u202etxt.exe"', b'"\\u009b31m"', b'"\\ud800"', b'"\\u0000"',
    b'"</script><script>alert(1)</script>"', b'"NaN"', b"NaN", b"Infinity", b'"' + b"A" * 5000 + b'"',
    b"[" + b"7," * 300 + b"7]",
)  # fmt: skip
_VALUE = re.compile(rb'"(?:[^"\\\n]|\\.){0,200}"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\bnull\b|\btrue\b|\bfalse\b')
_KEY = re.compile(rb'"([\w. ]{1,40})"\s*:')
_BYTES_OF_DIGITS = 4000
_LONGEST_EDIT = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """Damaged content.

    Attributes:
        data: what is left of a file.
        damaged_bytes: how many of its bytes were changed, taken away or put in; an upper bound where edits overlap.
        edits: names of what was done, in order.
    """

    data: bytes
    damaged_bytes: int
    edits: tuple[str, ...]


def mutate(data: bytes, rng: random.Random, *, only_values: bool = False) -> Mutation:
    """Return data after one to four edits: of any kind, or only of values, which leave most documents readable."""
    body = bytearray(data)
    damaged = 0
    edits = []
    for _ in range(rng.randint(1, 4)):
        if not body:
            break
        edit = rng.choice(_VALUE_EDITS if only_values else _EDITS)
        damaged += edit(body, rng)
        edits.append(edit.__name__)
    return Mutation(data=bytes(body), damaged_bytes=damaged, edits=tuple(edits))


def flip_bits(body: bytearray, rng: random.Random) -> int:
    """Flip up to 30 bits anywhere."""
    count = rng.randint(1, 30)
    for _ in range(count):
        body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
    return count


def cut_end(body: bytearray, rng: random.Random) -> int:
    """Take away everything from some place on."""
    at = rng.randrange(len(body))
    gone = len(body) - at
    del body[at:]
    return gone


def cut_beginning(body: bytearray, rng: random.Random) -> int:
    """Take away everything up to some place."""
    at = rng.randrange(len(body))
    del body[:at]
    return at


def cut_middle(body: bytearray, rng: random.Random) -> int:
    """Take away up to a third of the content."""
    at = rng.randrange(len(body))
    gone = len(body[at : at + rng.randint(1, max(2000, len(body) // 3))])
    del body[at : at + gone]
    return gone


def make_hole(body: bytearray, rng: random.Random) -> int:
    """Fill up to a third of the content with NUL bytes, as a disk does that lost blocks."""
    at = rng.randrange(len(body))
    size = len(body[at : at + rng.randint(1, max(512, len(body) // 3))])
    body[at : at + size] = bytes(size)
    return size


def overwrite(body: bytearray, rng: random.Random) -> int:
    """Replace up to 3,000 bytes by random ones."""
    at = rng.randrange(len(body))
    size = len(body[at : at + rng.randint(1, _LONGEST_EDIT)])
    body[at : at + size] = rng.randbytes(size)
    return size


def insert_nasty(body: bytearray, rng: random.Random) -> int:
    """Put in text that hurts careless readers."""
    at = rng.randrange(len(body))
    nasty = rng.choice(NASTY)
    body[at:at] = nasty
    return len(nasty)


def repeat_part(body: bytearray, rng: random.Random) -> int:
    """Put in a copy of another part."""
    at, other = rng.randrange(len(body)), rng.randrange(len(body))
    part = body[other : other + rng.randint(1, _LONGEST_EDIT)]
    body[at:at] = part
    return len(part)


def repeat_lines(body: bytearray, rng: random.Random) -> int:
    """Put in one line many times."""
    at = rng.randrange(len(body))
    begin, end = body.rfind(b"\n", 0, at) + 1, body.find(b"\n", at) + 1
    line = body[begin : end or len(body)][:_LONGEST_EDIT]
    count = rng.choice((1, 10, 200))
    body[begin:begin] = line * count
    return len(line) * count


def swap_parts(body: bytearray, rng: random.Random) -> int:
    """Exchange two equally long parts."""
    size = rng.randint(1, min(_LONGEST_EDIT, len(body)))
    first, second = (rng.randrange(len(body) - size + 1) for _ in range(2))
    one, other = bytes(body[first : first + size]), bytes(body[second : second + size])
    body[first : first + size] = other
    body[second : second + size] = one
    return 2 * size


def change_digits(body: bytearray, rng: random.Random) -> int:
    """Change some digits within 4,000 bytes."""
    at = rng.randrange(len(body))
    digits = [index for index in range(at, min(at + _BYTES_OF_DIGITS, len(body))) if 48 <= body[index] <= 57]
    changed = digits[:: rng.randint(1, 9)]
    for index in changed:
        body[index] = rng.choice(b"0123456789.-e")
    return len(changed)


def replace_byte(body: bytearray, rng: random.Random) -> int:
    """Replace one byte by any."""
    body[rng.randrange(len(body))] = rng.randrange(256)
    return 1


def end_lines_as_windows_does(body: bytearray, _: random.Random) -> int:
    """Put a carriage return before every line's end."""
    body[:] = body.replace(b"\n", b"\r\n")
    return 0


def replace_values(body: bytearray, rng: random.Random) -> int:
    """Replace up to 20 numbers or texts by odd ones."""
    at = rng.randrange(len(body))
    found = list(_VALUE.finditer(body, at, min(len(body), at + 20_000)))
    chosen = sorted(rng.sample(found, min(len(found), rng.randint(1, 20))), key=lambda match: match.start())
    return _substitute(body, [match.span() for match in chosen], lambda: rng.choice(_ODD_VALUES))


def replace_all_of_a_key(body: bytearray, rng: random.Random) -> int:
    """Replace all values of one key of JSON by the same odd one."""
    keys = sorted(set(_KEY.findall(body[:200_000])))
    if not keys:
        return 0
    pattern = re.compile(rb'"' + re.escape(rng.choice(keys)) + rb'"\s*:\s*(' + _VALUE.pattern + rb")")
    odd = rng.choice(_ODD_VALUES)
    return _substitute(body, [match.span(1) for match in pattern.finditer(body)], lambda: odd)


def _substitute(body: bytearray, spans: list[tuple[int, int]], new: Callable[[], bytes]) -> int:
    """Replace spans, which are in order; return how many bytes of them changed."""
    parts: list[bytes] = []
    end = damaged = 0
    for start, stop in spans:
        value = new()
        parts += [bytes(body[end:start]), value]
        damaged += max(len(value), stop - start)
        end = stop
    parts.append(bytes(body[end:]))
    body[:] = b"".join(parts)
    return damaged


_VALUE_EDITS = (replace_values, replace_all_of_a_key)
_EDITS = (
    flip_bits, cut_end, cut_beginning, cut_middle, make_hole, overwrite, insert_nasty, repeat_part, repeat_lines,
    swap_parts, change_digits, replace_byte, end_lines_as_windows_does, *_VALUE_EDITS, *_VALUE_EDITS,
)  # fmt: skip

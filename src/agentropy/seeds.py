"""Seeds by name: every random choice of a run hangs on (run seed, what for, which), never on what ran before."""

from __future__ import annotations

import hashlib


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for one purpose. The same names give the same seed on every machine and Python."""
    text = "/".join(str(n) for n in (seed, *names)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

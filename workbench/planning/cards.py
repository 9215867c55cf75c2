"""Cards that a plan may be for, by name: what each holds, computes and sends.

Products are dense, of halves with sums in float32, and of float32 without TF32. From the makers' data sheets: NVIDIA's
of T4, L4, A10, L40S, A100, H100, H200 and B200, its white papers on Ampere GA102 (3090), Ada (4090, and by its cores
and clock the 4060) and Blackwell (5090), and AMD's of MI300X. Memory is what the driver reports.
"""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

from workbench.errors import ConfigError

CONTEXT = 600 * 2**20
"""Bytes that a driver and torch's kernels take of a card before the first tensor, about."""


class DeviceCard(NamedTuple):
    """Its rates, at best."""

    name: str
    memory: int
    """Bytes that tensors may take."""
    half: float
    """Floating-point operations a second of products of halves."""
    single: float
    """The same in float32."""
    read: float
    """Bytes a second from its memory."""
    link: float
    """Bytes a second that it sends to its neighbours."""
    packs: bool = True
    """Whether torch's flash attention computes rows of any lengths at once there: on NVIDIA's, from Ampere on."""
    bfloat16: bool = True
    """Whether it has units for products in bfloat16; else a run computes in float32."""

    def products(self, *, single: bool) -> float:
        """Operations a second of the products of a run, which computes in float32 or in halves."""
        return self.single if single else self.half


def _card(name: str, mebibytes: int, half: float, single: float, read: float, link: float, **facts: bool) -> DeviceCard:
    """Of rates in TFLOP/s and GB/s; a link's as its maker states it, of both directions."""
    memory = mebibytes * 2**20 - CONTEXT
    return DeviceCard(name, memory, half * 1e12, single * 1e12, read * 1e9, link / 2 * 1e9, **facts)


CARDS = {
    card.name: card
    for card in (
        _card("t4", 15_360, 65, 8.1, 320, 32, packs=False, bfloat16=False),
        _card("4060", 8_188, 30.2, 15.1, 272, 32),
        _card("l4", 23_034, 121, 30.3, 300, 64),
        _card("a10", 23_028, 125, 31.2, 600, 64),
        _card("3090", 24_576, 71, 35.6, 936, 64),
        _card("4090", 24_564, 165.2, 82.6, 1008, 64),
        _card("5090", 32_607, 209.5, 104.8, 1792, 128),
        _card("l40s", 46_068, 362, 91.6, 864, 64),
        _card("a100-40gb", 40_960, 312, 19.5, 1555, 600),
        _card("a100-80gb", 81_920, 312, 19.5, 2039, 600),
        _card("h100", 81_559, 989, 67, 3350, 900),
        _card("h200", 143_771, 989, 67, 4800, 900),
        _card("b200", 183_359, 2250, 75, 8000, 1800),
        _card("mi300x", 196_592, 1307, 163.4, 5300, 896, packs=False),
    )
}


def find(name: str) -> DeviceCard:
    """The card of a name, such as `4090` or `NVIDIA GeForce RTX 4090`.

    Raises:
        ConfigError: none is known by it, or several are.

    Examples:
        >>> find("RTX 4090").name, find("A100 80GB").memory // 10**9
        ('4090', 85)
    """
    words = [word for word in re.findall(r"[a-z]*\d+[a-z]*", name.lower()) if not re.match("sxm|hbm", word)]
    plain = "-".join(words)
    known = [each for each in CARDS if f"{plain}-".startswith(f"{each}-")]  # with its memory, or without
    if known:
        return CARDS[known[0]]
    alike = [each for each in CARDS if plain and each.startswith(plain)]
    alike = alike or difflib.get_close_matches(plain, CARDS, n=2)
    hint = f"Write {' or '.join(alike)}" if alike else f"Write one of {', '.join(CARDS)}, or cpu"
    raise ConfigError(f"device: there is no card {name!r} in the table. {hint}; or leave it out, and write --memory.")

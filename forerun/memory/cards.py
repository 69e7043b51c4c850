"""Memory of common GPUs, as their drivers report it. No torch here."""

from __future__ import annotations

import difflib
import re

from forerun.errors import ConfigError

# MiB, of nvidia-smi and rocm-smi. Boards of one name differ by a few MiB, and so do drivers.
CARDS: dict[str, int] = {
    "A10": 23028,
    "A10G": 23028,
    "A100-40GB": 40960,
    "A100-80GB": 81920,
    "A40": 46068,
    "A6000": 49140,
    "B200": 183359,
    "GH200": 97871,
    "H100": 81559,
    "H200": 143771,
    "L4": 23034,
    "L40": 46068,
    "L40S": 46068,
    "MI300X": 196592,
    "RTX-3090": 24576,
    "RTX-4080": 16376,
    "RTX-4090": 24564,
    "RTX-5090": 32607,
    "RTX-6000-Ada": 49140,
    "T4": 15360,
    "V100-32GB": 32768,
}


def card_mib(name: str) -> int:
    """MiB of the GPU of that name; case, spaces and dashes do not count, nor does a maker's name before it.

    Raises:
        ConfigError: none of the table.
    """
    known = {_plain(card): card for card in CARDS}
    wanted = _plain(name)
    wanted = re.sub(r"^(nvidia|amd|geforce|tesla|instinct)+", "", wanted)
    if wanted in known:
        return CARDS[known[wanted]]
    sized = sorted(card for plain, card in known.items() if wanted and plain.startswith(wanted))
    near = difflib.get_close_matches(wanted, known, n=1)
    hint = f"; did you mean {' or '.join(sized) or known[near[0]]}?" if sized or near else ""
    raise ConfigError(
        f"--gpu {name!r} is unknown{hint}; known: {', '.join(CARDS)}; for another give --gpu-memory, such as 46068MiB"
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())

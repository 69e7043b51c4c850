"""Memory of common GPUs, as their drivers report it. No torch here."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from forerun.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU.

    Attributes:
        mib: its memory. Boards of one name differ by a few MiB, and so do drivers.
        capability: of CUDA; None: it is no NVIDIA GPU.
    """

    name: str
    mib: int
    capability: tuple[int, int] | None


CARDS = {
    card.name: card
    for card in (
        Card("A10", 23028, (8, 6)),
        Card("A10G", 23028, (8, 6)),
        Card("A100-40GB", 40960, (8, 0)),
        Card("A100-80GB", 81920, (8, 0)),
        Card("A40", 46068, (8, 6)),
        Card("A6000", 49140, (8, 6)),
        Card("B200", 183359, (10, 0)),
        Card("GH200", 97871, (9, 0)),
        Card("H100", 81559, (9, 0)),
        Card("H200", 143771, (9, 0)),
        Card("L4", 23034, (8, 9)),
        Card("L40", 46068, (8, 9)),
        Card("L40S", 46068, (8, 9)),
        Card("MI300X", 196592, None),
        Card("RTX-3090", 24576, (8, 6)),
        Card("RTX-4080", 16376, (8, 9)),
        Card("RTX-4090", 24564, (8, 9)),
        Card("RTX-5090", 32607, (12, 0)),
        Card("RTX-6000-Ada", 49140, (8, 9)),
        Card("T4", 15360, (7, 5)),
        Card("V100-32GB", 32768, (7, 0)),
    )
}


def find_card(name: str) -> Card:
    """The GPU of that name; case, spaces and dashes do not count, nor does a maker's name before it.

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

"""Memory for weights, which every step reads from end to end: in large pages where the system gives them.

With pages of 4 KB the look-up of their addresses takes a tenth to a third of a 1-row product's time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.kernels import native

PAGE = 2 << 20  # bytes of a large page on x86 and most of arm
BLOCK = 32 << 20  # bytes; small buffers share one, so that they too lie in large pages
ALIGNMENT = 64

_block = torch.empty(0, dtype=torch.uint8)  # what is left of the block in use


def allocate(num_bytes: int) -> Tensor:
    """A zeroed uint8 buffer, aligned to 64 bytes. It may be a view of a block that it shares with others: the block is
    freed when the last of them is."""
    global _block
    if num_bytes > BLOCK // 4:
        return _fresh(num_bytes).zero_()
    size = num_bytes + -num_bytes % ALIGNMENT
    if size > _block.numel():
        _block = _fresh(BLOCK)
    buffer, _block = _block[:num_bytes], _block[size:]
    return buffer.zero_()  # what nobody asks for is never touched, and takes no memory


def _fresh(num_bytes: int) -> Tensor:
    """Not written to yet: the system makes pages when they are, large ones after the advice."""
    memory = torch.empty(num_bytes + PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE
    buffer = memory[start : start + num_bytes]
    if native.available():
        native.extension().advise_large_pages(buffer.data_ptr(), num_bytes)
    return buffer

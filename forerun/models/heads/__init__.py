"""Draft heads: small networks that guess the next tokens from the target's hidden states. One network a file."""

from forerun.models.heads.head import Head, HeadOutput, Write
from forerun.models.heads.loading import load_head, read_head

__all__ = ["Head", "HeadOutput", "Write", "load_head", "read_head"]

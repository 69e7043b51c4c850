"""What changes logits before anything is drawn: one kind a file, each a function of the tokens before a row."""

from forerun.sampling.processors.interface import LogitsProcessor
from forerun.sampling.processors.pipeline import LogitsProcessors

__all__ = ["LogitsProcessor", "LogitsProcessors"]

"""The rules that decide which drafted tokens stand, as words: what each promises, and which a request may ask for.

Each rule is a class of `verifiers/`. No torch here.
"""

from __future__ import annotations

import itertools

from forerun.spec.refusal import refuse, show
from forerun.spec.spec_tree import MAX_TOKENS

PATH, LAW, NO = "path", "law", "no"
PROMISES = {PATH: "same seed, same text", LAW: "same distribution", NO: "another distribution"}
LOSSLESS = {"match": PATH, "standard": LAW, "block": LAW, "fly": NO, "synthetic": NO}
RATES = "synthetic_acceptance_rates"
NOTICES = {  # what every user must know at start
    "fly": 'rejection_sample_method "fly" is LOSSY: drafted tokens that the target would not have said may stand, and '
    'texts do not follow its distribution; a request may ask for "match" or "standard" in its speculative_config',
    "synthetic": 'rejection_sample_method "synthetic" is FOR BENCHMARKS ONLY: drafted tokens are accepted by chance, '
    "and texts are not the target's",
}
STRICT = ("match", "standard")  # a request may ask for these whatever the server's rule is


def available_rules(own: str) -> tuple[str, ...]:
    """What a request may ask for on a server with this rule: nothing that the server was not started with, unless it
    promises more."""
    return tuple(dict.fromkeys((own, *STRICT)))


def acceptance_rates(length: float, num_tokens: int) -> tuple[float, ...]:
    """Chances that the first 1, 2, ... `num_tokens` drafted tokens all stand, for a mean of `length` tokens a step.

    Ones, then the fraction that is left, then zeros: the same steps again and again, which is what a benchmark wants.
    """
    return tuple(min(1.0, max(0.0, length - 1 - place)) for place in range(num_tokens))


def read_rates(value: object) -> tuple[float, ...]:
    """`synthetic_acceptance_rates` as numbers.

    Raises:
        ConfigError: no list of numbers from 0 to 1, or one that is above the one before it.
    """
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_TOKENS:
        refuse(f"{RATES} must be a list of 1 to {MAX_TOKENS} numbers, one for each drafted token, got {show(value)}")
    for place, rate in enumerate(value):
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
            refuse(f"{RATES}[{place}] must be a number (0 to 1), got {show(rate)}")
    for place, (before, rate) in enumerate(itertools.pairwise(value), 1):
        if rate > before:
            refuse(f"{RATES}[{place}]={show(rate)} must not be above the entry before it, {show(before)}")
    return tuple(map(float, value))

"""Which class serves which method and rule."""

from __future__ import annotations

from collections.abc import Callable

from forerun.spec.config import SpeculativeConfig
from forerun.spec.proposer import Proposer
from forerun.spec.proposers.ngram import NgramProposer
from forerun.spec.proposers.none import EmptyProposer
from forerun.spec.proposers.suffix import SuffixProposer
from forerun.spec.verifier import Verifier
from forerun.spec.verifiers.match import MatchVerifier
from forerun.spec.verifiers.standard import StandardVerifier

PROPOSERS: dict[str, Callable[[SpeculativeConfig], Proposer]] = {
    "ngram": NgramProposer.from_config,
    "suffix": SuffixProposer.from_config,
}
VERIFIERS: dict[str, Callable[[], Verifier]] = {"match": MatchVerifier, "standard": StandardVerifier}


def make_proposer(config: SpeculativeConfig | None) -> Proposer:
    return EmptyProposer() if config is None else PROPOSERS[config.method](config)


def make_verifier(config: SpeculativeConfig | None) -> Verifier:
    return MatchVerifier() if config is None else VERIFIERS[config.rejection_sample_method]()

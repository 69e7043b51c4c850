"""Which class serves which method and rule."""

from __future__ import annotations

from collections.abc import Callable

from forerun.errors import ConfigError
from forerun.spec.config import MethodConfig, SpeculativeConfig
from forerun.spec.proposer import Proposer
from forerun.spec.proposers.ngram import NgramProposer
from forerun.spec.proposers.ngram_mod import NgramModProposer
from forerun.spec.proposers.none import EmptyProposer
from forerun.spec.proposers.suffix import SuffixProposer
from forerun.spec.verifier import Verifier
from forerun.spec.verifiers.match import MatchVerifier
from forerun.spec.verifiers.standard import StandardVerifier

PROPOSERS: dict[str, Callable[[MethodConfig], Proposer]] = {
    "ngram": NgramProposer.from_config,
    "ngram_mod": NgramModProposer.from_config,
    "suffix": SuffixProposer.from_config,
}
VERIFIERS: dict[str, Callable[[], Verifier]] = {"match": MatchVerifier, "standard": StandardVerifier}


def make_proposer(config: SpeculativeConfig | None) -> Proposer:
    """
    Raises:
        ConfigError: a method whose proposer is not there yet, or several methods.
    """
    if config is None:
        return EmptyProposer()
    if len(config.methods) > 1:
        raise ConfigError(f"several methods ({', '.join(config.method_names)}) cannot be combined yet: give one")
    method = config.methods[0]
    if method.method not in PROPOSERS:
        raise ConfigError(f"the proposer of method {method.method!r} is not there yet; there: {', '.join(PROPOSERS)}")
    return PROPOSERS[method.method](method)


def make_verifier(config: SpeculativeConfig | None) -> Verifier:
    return MatchVerifier() if config is None else VERIFIERS[config.rejection_sample_method]()

"""Which class serves which method and rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from forerun.spec.config import MethodConfig, SpeculativeConfig
from forerun.spec.proposer import Proposer, TargetInfo
from forerun.spec.proposers.draft_loading import load_draft_model
from forerun.spec.proposers.first import FirstOf, Member
from forerun.spec.proposers.head_loading import load_eagle
from forerun.spec.proposers.ngram import NgramProposer
from forerun.spec.proposers.ngram_mod import NgramModProposer
from forerun.spec.proposers.suffix import SuffixProposer
from forerun.spec.rules import available_rules
from forerun.spec.verifier import Verifier
from forerun.spec.verifiers.block import BlockVerifier
from forerun.spec.verifiers.by_request import RuleByRequest
from forerun.spec.verifiers.fly import FlyVerifier
from forerun.spec.verifiers.match import MatchVerifier
from forerun.spec.verifiers.standard import StandardVerifier
from forerun.spec.verifiers.synthetic import SyntheticVerifier

WEIGHTLESS: dict[str, Callable[[MethodConfig], Proposer]] = {
    "ngram": NgramProposer.from_config,
    "ngram_mod": NgramModProposer.from_config,
    "suffix": SuffixProposer.from_config,
}
WITH_WEIGHTS: dict[str, Callable[[MethodConfig, TargetInfo, str], Proposer]] = {
    "draft_model": load_draft_model,
    "eagle": load_eagle,
    "eagle3": load_eagle,
}
VERIFIERS: dict[str, type[MatchVerifier]] = {
    "match": MatchVerifier,
    "standard": StandardVerifier,
    "block": BlockVerifier,
    "fly": FlyVerifier,
    "synthetic": SyntheticVerifier,
}


def make_proposer(config: SpeculativeConfig | None, target: TargetInfo) -> FirstOf:
    """All proposers of a configuration, loaded. Without one: nothing is ever drafted."""
    members: list[Member] = []
    seen: Counter[str] = Counter()
    for method in config.methods if config else ():
        seen[method.method] += 1
        if method.method in WEIGHTLESS:
            proposer = WEIGHTLESS[method.method](method)
        else:
            number = f"-{seen[method.method]}" if seen[method.method] > 1 else ""
            proposer = WITH_WEIGHTS[method.method](method, target, method.method + number)
        members.append(Member(proposer, method.method, method.max_draft_tokens, method.min_draft_tokens))
    return FirstOf(members)


def make_verifier(config: SpeculativeConfig | None) -> Verifier:
    """The rule of a configuration, with those that a request may ask for instead."""
    if config is None:
        return MatchVerifier()
    own = config.rejection_sample_method
    rules = {name: VERIFIERS[name].from_config(config) for name in available_rules(own)}
    return RuleByRequest(rules[own], rules.values())

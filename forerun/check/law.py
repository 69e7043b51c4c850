"""The law of what a rule emits, beside the target's own, exactly, at contexts that are teacher-forced.

At a context the target's distributions of the next LENGTH tokens are computed by plain passes, each prefix standing as
output. The proposer's distributions are those that it gives there itself. The rows that the rule is given come from
passes with the drafted tokens on trial, as in any step. Then drafts are drawn from the proposer's distributions and the
rule judges them, thousands of times with seeds of their own, on rows that lie there: no model is run for it. What it
emits, gone on with by plain draws where it is shorter, must follow the target's law: its first token, and all LENGTH.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.check.chi_square import ChiSquare
from forerun.check.teacher import Context, Pass, passes
from forerun.engine.engine import Engine
from forerun.sampling.batch import SamplingRows
from forerun.sampling.distribution import processed_logprobs
from forerun.spec.proposer import Draft, RequestDraft
from forerun.spec.verifier import Verifier

TOP_K = 4  # of every law, so that its cells are few
MAX_DRAFTED = 2
LENGTH = MAX_DRAFTED + 1
MAX_WIDTH = 4  # tokens of a proposer's distribution that are looked at: any q will do, if drafts are drawn from it
BATCH = 512
SHARPER = 3  # power of the target's probabilities that rehearsed drafts are drawn from
FALSE_ALARM = 1e-4  # of all laws of a check together

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Law:
    """A distribution over few tokens: ids and their probabilities, above 0."""

    ids: list[int]
    probs: Tensor  # [n] float64

    @classmethod
    def of(cls, probs: Tensor, widest: int | None = None) -> Law:
        """Of a row [V]; of the `widest` likeliest tokens alone where there are more."""
        ids = probs.nonzero().squeeze(1)
        if widest is not None and len(ids) > widest:
            ids = probs.topk(widest).indices
        kept = probs[ids].double().cpu()
        return cls(ids.tolist(), kept / kept.sum())

    def draws(self, count: int, generator: torch.Generator) -> list[int]:
        places = torch.multinomial(self.probs, count, replacement=True, generator=generator)
        return [self.ids[place] for place in places.tolist()]


@dataclass
class Situation:
    """A context with all that the rule and the judgement of it need.

    Attributes:
        context: its output is not empty where drafts are looked at.
        target: tokens after the context -> the target's law there; for all that the target may say.
        drafts: drafted tokens -> the proposer's law after them; no entry where it does not draft.
        probabilistic: whether the proposer says what its tokens were drawn from.
        trials: each possible draft -> what the verifier is given with it.
        standing: tokens after the context -> the logits [V] there.
    """

    context: Context
    target: dict[Tokens, Law] = field(default_factory=dict)
    drafts: dict[Tokens, Law] = field(default_factory=dict)
    probabilistic: bool = False
    trials: dict[Tokens, Pass] = field(default_factory=dict)
    standing: dict[Tokens, Tensor] = field(default_factory=dict)

    def at(self, path: Tokens, draft: Tokens | None = None) -> Context:
        c = self.context
        return Context(c.prompt, c.params, (*c.output, *path), c.seed, c.choice, draft)

    @property
    def longest_drafts(self) -> list[Tokens]:
        """The drafts that the proposer may make, each as long as it goes."""
        paths = {(*path, token) for path, law in self.drafts.items() for token in law.ids}
        return sorted(path for path in paths if path not in self.drafts)


def situations(engine: Engine, contexts: Sequence[Context], method: str | None) -> list[Situation]:
    """All that is to be known at these contexts, by passes of the engine.

    Args:
        method: whose drafts; None: made from the target's own laws, see `_rehearse`.
    """
    found = [Situation(context) for context in contexts]
    fill_target(engine, found)
    depths = range(min(MAX_DRAFTED, engine.info().num_spec_tokens))
    if method is None:
        for place, situation in enumerate(found):
            _rehearse(situation, depths, reverse=place % 2 == 1)
    else:
        _fill_drafts(engine, found, depths, method)
    tried = [(s, draft) for s in found for draft in s.longest_drafts]
    results = passes(engine, [s.at((), draft) for s, draft in tried], speculation=True)
    for (s, draft), seen in zip(tried, results, strict=True):
        s.trials[draft] = seen
    return found


def _rehearse(situation: Situation, depths: range, *, reverse: bool) -> None:
    """Drafts that show faults, whatever the proposer: sharper than the target, as greedy minds are, or as likely as the
    target finds them unlikely."""
    situation.probabilistic = True
    for path, law in situation.target.items():
        if len(path) in depths:
            order = law.probs.argsort()
            probs = law.probs**SHARPER
            if reverse:
                probs = torch.empty_like(law.probs).scatter_(0, order, law.probs[order.flip(0)])
            situation.drafts[path] = Law(law.ids, probs / probs.sum())


def _fill_drafts(engine: Engine, found: Sequence[Situation], depths: range, method: str) -> None:
    """The proposer's laws, after all that the target may say."""
    for depth in depths:
        asked = [(s, path) for s in found for path in _after(s.drafts, depth) if path in s.target]
        results = passes(engine, [s.at(path) for s, path in asked], speculation=True, method=method)
        for (s, path), seen in zip(asked, results, strict=True):
            if len(seen.draft) and seen.draft.parents is None:
                s.probabilistic |= seen.draft.probs is not None
                s.drafts[path] = _law_of(seen.draft)


def fill_target(engine: Engine, found: Sequence[Situation]) -> None:
    """The target's laws of LENGTH tokens: breadth first, a batch a depth."""
    for depth in range(LENGTH):
        asked = [(s, path) for s in found for path in _after(s.target, depth)]
        results = passes(engine, [s.at(path) for s, path in asked])
        for (s, path), seen in zip(asked, results, strict=True):
            s.standing[path] = seen.logits[0]
            s.target[path] = Law.of(processed_logprobs(seen.logits[0], s.context.params).exp())


def _after(laws: dict[Tokens, Law], depth: int) -> list[Tokens]:
    """The paths of this depth that are possible by the laws of the depth before."""
    if depth == 0:
        return [()]
    return [(*path, token) for path, law in laws.items() if len(path) == depth - 1 for token in law.ids]


def _law_of(draft: RequestDraft) -> Law:
    if draft.probs is None:
        return Law([draft.tokens[0]], torch.ones(1, dtype=torch.float64))
    return Law.of(draft.probs[0], MAX_WIDTH)


def rows_apart(situation: Situation) -> float:
    """The largest total variation between a distribution after drafted tokens and the one after the same tokens as
    output, before temperature and filters: 0 where both are computed exactly and everything counts drafted tokens."""
    worst = 0.0
    for draft, seen in situation.trials.items():
        for depth in range(seen.rows.num_rows):
            standing = situation.standing.get(draft[:depth])
            if standing is not None:
                rows = (logits.double().softmax(dim=-1) for logits in (seen.logits[depth], standing))
                worst = max(worst, float((next(rows) - next(rows)).abs().sum()) / 2)
    return worst


@dataclass
class Evidence:
    """What speaks for or against a law, over several situations.

    Attributes:
        first, joint: of the first token, and of LENGTH tokens.
        apart: see `rows_apart`, the largest.
    """

    first: ChiSquare = field(default_factory=ChiSquare)
    joint: ChiSquare = field(default_factory=ChiSquare)
    num_drafted: int = 0
    num_accepted: int = 0
    apart: float = 0.0

    def join(self, other: Evidence) -> None:
        """Add what is known from other situations."""
        self.first.join(other.first)
        self.joint.join(other.joint)
        self.num_drafted += other.num_drafted
        self.num_accepted += other.num_accepted
        self.apart = max(self.apart, other.apart)


def judge(verifier: Verifier, situation: Situation, num_draws: int, seed: int, evidence: Evidence) -> None:
    """Have the rule judge `num_draws` drafts of a situation, and add what it emitted to the evidence."""
    generator = torch.Generator().manual_seed(seed)
    drafted = _drafts(situation, num_draws, generator)
    emitted: Counter[Tokens] = Counter()
    for tokens, num_accepted in _emitted(verifier, situation, drafted, seed):
        emitted[tokens] += 1
        evidence.num_accepted += num_accepted
    evidence.num_drafted += sum(map(len, drafted))
    evidence.apart = max(evidence.apart, rows_apart(situation))
    add_texts(evidence, situation, _completed(situation, emitted, generator))


def _drafts(situation: Situation, count: int, generator: torch.Generator) -> list[Tokens]:
    """Drafts as the proposer would make them: each token from its law after those before it."""
    groups: dict[Tokens, int] = {(): count}
    done: list[Tokens] = []
    while groups:
        longer: Counter[Tokens] = Counter()
        for path, number in groups.items():
            if (law := situation.drafts.get(path)) is None:
                done += [path] * number
            else:
                longer.update((*path, token) for token in law.draws(number, generator))
        groups = dict(longer)
    return done


class _Small:
    """A situation's rows over the few tokens that matter, so that a judgement costs little. Tokens that no
    distribution holds are left out: with `top_k` they have no part in any draw."""

    def __init__(self, situation: Situation) -> None:
        self.situation = situation
        laws = [*situation.target.values(), *situation.drafts.values()]
        ids = {token for law in laws for token in law.ids}
        for seen in situation.trials.values():
            ids.update(seen.logits.topk(min(32, seen.logits.shape[1])).indices.flatten().tolist())
        self.ids = sorted(ids)
        self._place = {token: place for place, token in enumerate(self.ids)}
        columns = torch.tensor(self.ids)
        self.drafts = {path: self._draft(path) for path in situation.trials}
        self.logits = {p: s.logits.cpu()[:, columns].contiguous() for p, s in situation.trials.items()}

    def _draft(self, path: Tokens) -> RequestDraft:
        rows = []
        for depth in range(len(path)):
            law = self.situation.drafts[path[:depth]]
            row = torch.zeros(len(self.ids))
            row[[self._place[token] for token in law.ids]] = law.probs.float()
            rows.append(row)
        probs = torch.stack(rows) if self.situation.probabilistic else None
        own = RequestDraft([self._place[token] for token in path], "check", probs=probs)
        return own.cut(len(self.situation.trials[path].draft))


def _emitted(
    verifier: Verifier, situation: Situation, drafted: Sequence[Tokens], seed: int
) -> Iterator[tuple[Tokens, int]]:
    """(tokens, how many of them were accepted) of each draft, with a seed of its own."""
    small, seeds = _Small(situation), itertools.count(seed << 32)
    for start in range(0, len(drafted), BATCH):
        batch: list[SamplingRows] = []
        draft = Draft()
        logits: list[Tensor] = []
        num_rows = 0
        for place, path in enumerate(drafted[start : start + BATCH]):
            own, params = small.drafts[path], situation.context.params
            draft.by_request[str(place)] = own
            position = len(situation.context.output)
            batch.append(SamplingRows(str(place), params, next(seeds), 0, num_rows, 1 + len(own), position))
            logits.append(small.logits[path])
            num_rows += 1 + len(own)
        verdict = verifier.verify(draft, torch.cat(logits), batch)
        for rows in batch:
            stands = verdict.by_request[rows.request_id]
            yield tuple(small.ids[token] for token in stands.token_ids), len(stands.accepted)


def _completed(situation: Situation, emitted: Counter[Tokens], generator: torch.Generator) -> Counter[Tokens]:
    """What was emitted, each gone on with to LENGTH by draws from the target's law. What the target cannot say stays
    as it is."""
    done: Counter[Tokens] = Counter()
    while emitted:
        longer: Counter[Tokens] = Counter()
        for path, number in emitted.items():
            law = situation.target.get(path)
            if law is None or len(path) == LENGTH:
                done[path] += number
            else:
                for token in law.draws(number, generator):
                    longer[(*path, token)] += 1
        emitted = longer
    return done


def add_texts(evidence: Evidence, situation: Situation, seen: Counter[Tokens]) -> None:
    """Texts of LENGTH tokens that were seen after a situation's context, beside the target's law."""
    probabilities: dict[Tokens, float] = {(): 1.0}
    for depth in range(LENGTH):
        probabilities = {
            (*path, token): p * own
            for path, p in probabilities.items()
            for token, own in zip(situation.target[path].ids, situation.target[path].probs.tolist(), strict=True)
        }
        if depth in (0, LENGTH - 1):
            heads = Counter[Tokens]()
            for path, number in seen.items():
                heads[path[: depth + 1]] += number
            impossible = sum(number for path, number in heads.items() if path not in probabilities)
            cells = [heads[path] for path in probabilities]
            (evidence.joint if depth else evidence.first).add(cells, list(probabilities.values()), impossible)

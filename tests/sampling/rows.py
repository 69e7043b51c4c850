"""Steps for processors without an engine: requests, drafts of any shape, and what stands before each row."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forerun.engine.plan import Plan, ScheduledRequest
from forerun.request import Request, SamplingParams
from forerun.sampling.processors import LogitsProcessor, LogitsProcessors
from forerun.spec.proposer import RequestDraft
from forerun.spec.verifier import RequestVerdict, Verdict

EOS = 1


@dataclass
class Steps:
    """Requests that go through steps with random drafts, of which a random path stands.

    Attributes:
        vocab_size: ids that are drawn; few, so that they repeat.
    """

    processors: Sequence[LogitsProcessor]
    params: Sequence[SamplingParams]
    seed: int
    vocab_size: int = 24
    trees: bool = False
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.pipeline = LogitsProcessors(self.processors)
        for place, params in enumerate(self.params):
            prompt = self.tokens(self.random.randint(1, 6))
            request = Request(f"r{place}", prompt, len(prompt), params, seed=0, eos_token_ids=frozenset({EOS}))
            self.pipeline.start(request)
            self.requests.append(request)

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.vocab_size) for _ in range(count)]

    def step(self) -> list[tuple[Request, list[int], Tensor, Tensor]]:
        """(request, output tokens before the row, raw logits, changed logits) of each row; then a path stands."""
        order = self.random.sample(self.requests, len(self.requests))
        plan = Plan([ScheduledRequest(r, r.num_tokens - 1, 1, self._draft(), samples=True) for r in order])
        generator = torch.Generator().manual_seed(self.random.randrange(2**31))
        raw = torch.randn(sum(1 + len(s.draft) for s in plan.scheduled), self.vocab_size, generator=generator) * 3
        changed = self.pipeline.apply(plan, raw.clone())
        seen, row = [], 0
        for s in plan.scheduled:
            for node in range(-1, len(s.draft)):
                before = s.request.output_token_ids + [s.draft.tokens[n] for n in path_to(s.draft, node)]
                seen.append((s.request, before, raw[row], changed[row]))
                row += 1
        self._commit(plan)
        return seen

    def _draft(self) -> RequestDraft:
        tokens = self.tokens(self.random.randint(0, 6))
        parents = [self.random.randint(-1, node - 1) for node in range(len(tokens))] if self.trees else None
        return RequestDraft(tokens, "test", parents)

    def _commit(self, plan: Plan) -> None:
        verdict = Verdict()
        for s in plan.scheduled:
            accepted = path_to(s.draft, self.random.randint(-1, len(s.draft) - 1))
            tokens = [s.draft.tokens[node] for node in accepted] + self.tokens(1)
            verdict.by_request[s.request.request_id] = RequestVerdict(accepted, tokens, len(s.draft))
        self.pipeline.accept(plan, verdict)
        for s in plan.scheduled:
            s.request.token_ids += verdict.by_request[s.request.request_id].token_ids


def path_to(draft: RequestDraft, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = draft.parent(node)
    return path


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 64} | fields))

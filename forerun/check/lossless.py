"""Whether an engine's speculation keeps its promise, checked on the user's own models."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.check.equality import REHEARSED, Case, Served, compare, is_exact, rehearsed, serve
from forerun.check.law import (
    FALSE_ALARM,
    LENGTH,
    TOP_K,
    Evidence,
    Situation,
    Tokens,
    add_texts,
    fill_target,
    judge,
    rows_apart,
    situations,
)
from forerun.check.parameters import PARAMETERS, Material, Parameter
from forerun.check.prompts import PROMPTS
from forerun.check.report import Check, Outcome, Report, Row, check_expectation
from forerun.check.summary import summary
from forerun.check.teacher import Context
from forerun.errors import ConfigError
from forerun.request import MAX_CHOICES, SamplingParams
from forerun.spec.control import FixedLength
from forerun.spec.rules import LAW, NO, PATH

if TYPE_CHECKING:
    from forerun.llm import LLM

LAW_TOKENS = 16  # more than a law looks at, so that drafts are not cut
ROW_DISTANCE = 0.02  # total variation that rows in 16 bits may be apart


@dataclass(frozen=True)
class Effort:
    """How much is looked at.

    Attributes:
        num_prompts: of the check's own.
        num_tokens: most tokens of an answer.
        num_contexts: of each law.
        num_draws: judged drafts of each context.
        num_texts: generated for the law of the whole engine.
    """

    num_prompts: int = 6
    num_tokens: int = 24
    num_contexts: int = 2
    num_draws: int = 500
    num_texts: int = 512


QUICK = Effort()
THOROUGH = Effort(num_prompts=len(PROMPTS), num_tokens=128, num_contexts=6, num_draws=10_000, num_texts=8192)


def check_lossless(
    llm: LLM,
    effort: Effort = QUICK,
    *,
    parameters: Sequence[Parameter] = PARAMETERS,
    expect_lossy: bool = False,
    tell: Callable[[str], object] = lambda doing: None,
) -> Report:
    """Compare what speculation says with plain decoding on the same engine.

    Args:
        parameters: those that are checked, beside plain greedy answers.
        expect_lossy: the rule is known to change the text: its differences are counted, not held against it.
        tell: is told what is under way.
    Raises:
        ConfigError: the engine does not speculate, or `expect_lossy` does not fit its rule.
    """
    engine, info = llm.engine, llm.info
    if info.speculative_config is None:
        raise ConfigError("nothing to check: this engine decodes without speculation; give --speculative-config")
    report = Report(info.model, info.speculative_config, engine.verifier.name, engine.verifier.lossless)
    started = time.perf_counter()
    check_expectation(report.rule, report.lossless, expect_lossy)
    with _always_drafting(llm):
        if report.lossless == NO and not expect_lossy:
            report.rows.append(_lossy_row(report.rule))
        else:
            _Checker(llm, effort, parameters, report, tell).run()
    report.seconds = time.perf_counter() - started
    report.words = summary(report, exact=is_exact(llm))
    return report


def _lossy_row(rule: str) -> Row:
    return Row(
        Check.RULE,
        "all",
        "rejection_sample_method",
        Outcome.FAILED,
        detail=f"{rule} changes the text by design: it is not lossless, and nothing else was checked; "
        "--expect-lossy counts what it changes instead",
    )


@contextmanager
def _always_drafting(llm: LLM) -> Iterator[None]:
    """Drafts of K tokens whatever the batch: the check's own is large."""
    engine = llm.engine
    control, engine.control = engine.control, FixedLength(llm.info.num_spec_tokens)
    try:
        yield
    finally:
        engine.control = control


class _Checker:
    """One run of the check."""

    def __init__(
        self,
        llm: LLM,
        effort: Effort,
        parameters: Sequence[Parameter],
        report: Report,
        tell: Callable[[str], object],
    ) -> None:
        self.llm = llm
        self.effort = effort
        self.parameters = parameters
        self.report = report
        self.tell = tell
        self.exact = is_exact(llm)
        room = llm.info.max_model_len - effort.num_tokens - LENGTH - 1
        if room < 1:
            raise ConfigError(f"max_model_len={llm.info.max_model_len} leaves no room for the check: give at least 256")
        texts = PROMPTS[: effort.num_prompts]
        self.prompts = [llm.tokenizer.encode(text)[-room:] for text in texts]

    def run(self) -> None:
        self.tell("answers without speculation")
        greedy = self._plain([self._greedy(seed, prompt) for seed, prompt in enumerate(self.prompts)])
        answers = [output.outputs[0].token_ids for output in greedy.outputs]
        self.material = Material.of(self.llm.tokenizer, self.prompts, answers)
        plain = self._plain([*greedy.cases, *self._cases(len(self.prompts))])
        methods = self.llm.info.spec_methods
        for method in methods:
            self._compare(plain, method, method)
        if len(methods) > 1:
            self._compare(plain, None, "all together")
        with rehearsed(self.llm, plain):
            self._compare(plain, None, REHEARSED)
        if self.report.lossless == PATH:
            self._rows([answer[:1] for answer in answers])
        if self.report.lossless == LAW:
            for drafter in (*methods, None):
                self._laws(drafter, [answer[:1] for answer in answers])
            for method in methods:
                self._judged("whole engine", method, self._generated(method))

    # -- tokens

    def _plain(self, cases: Sequence[Case]) -> Served:
        return serve(self.llm, cases, speculation=False)

    def _greedy(self, seed: int, prompt: list[int]) -> Case:
        params = SamplingParams(temperature=0, seed=seed, max_tokens=self.effort.num_tokens)
        return Case(Check.GREEDY, "temperature 0", prompt, params)

    def _cases(self, seed: int) -> Iterator[Case]:
        """Each parameter at each prompt: drawn where the rule keeps the path of a seed, else at temperature 0."""
        path = self.report.lossless != LAW
        for parameter in self.parameters:
            if not (path or parameter.at_zero):
                continue
            for prompt in self.prompts:
                params = parameter.params(self.material, seed=seed, max_tokens=self.effort.num_tokens)
                if not path:
                    params = dataclasses.replace(params, temperature=0)
                yield Case(Check.SEEDED if path else Check.GREEDY, parameter.name, prompt, params)
                seed += 1

    def _compare(self, plain: Served, method: str | None, name: str) -> None:
        self.tell(f"the same with drafts: {name}")
        drafted = serve(self.llm, plain.cases, method)
        self.report.rows += compare(self.llm, plain, drafted, name, lossy=self.report.lossless == NO)

    def _rows(self, roots: Sequence[Sequence[int]]) -> None:
        """Whether a parameter counts drafted tokens as it counts output: at one context each, teacher-forced."""
        for number, parameter in enumerate(p for p in self.parameters if p.shapes):
            self.tell(f"distributions after drafted tokens: {parameter.name}")
            place = number % len(self.prompts)
            context = self._context(parameter, self.prompts[place], roots[place])
            (situation,) = situations(self.llm.engine, [context], None)
            apart = rows_apart(situation)
            row = Row(Check.ROWS, REHEARSED, parameter.name, Outcome.SAME)
            row.num_tokens = sum(seen.rows.num_rows for seen in situation.trials.values())
            row.num_drafted = row.num_tokens - len(situation.trials)
            if apart > self._row_distance:
                row.outcome, row.detail = Outcome.FAILED, _rows_fault(apart)
            self.report.rows.append(row)

    @property
    def _row_distance(self) -> float:
        """How far rows may be apart that should be the same."""
        return 0.0 if self.exact else ROW_DISTANCE

    # -- laws

    @property
    def _level(self) -> float:
        """Of each test: two a row, a row for each parameter, one for all of them and one for the whole engine."""
        num_rows = sum(parameter.shapes for parameter in self.parameters) + 2
        return FALSE_ALARM / (2 * num_rows * (len(self.llm.info.spec_methods) + 1))

    def _laws(self, method: str | None, roots: Sequence[Sequence[int]]) -> None:
        """A row a parameter, and one for all of them together, which finds what is wrong everywhere soonest. method:
        None for rehearsed drafts."""
        name, whole = method or REHEARSED, Evidence()
        for number, parameter in enumerate(p for p in self.parameters if p.shapes):
            self.tell(f"the law of {self.report.rule}: {parameter.name}, drafts {name}")
            places = _spread(number, self.effort.num_contexts, len(self.prompts))
            contexts = [self._context(parameter, self.prompts[place], roots[place]) for place in places]
            evidence = Evidence()
            for place, situation in zip(places, situations(self.llm.engine, contexts, method), strict=True):
                if situation.trials:
                    seed = number * len(self.prompts) + place
                    judge(self.llm.engine.verifier, situation, self.effort.num_draws, seed, evidence)
            whole.join(evidence)
            self._judged(parameter.name, name, evidence)
        self._judged("all of these", name, whole)

    def _generated(self, method: str) -> Evidence:
        """Texts that the engine generates, the proposer drawing its drafts itself, beside the target's law."""
        self.tell(f"the law of {self.report.rule}: whole engine, drafts {method}")
        prompt = self.prompts[len(self.prompts) // 2]
        params = SamplingParams(
            temperature=1.0,
            top_k=TOP_K,
            ignore_eos=True,
            max_tokens=LENGTH + 1,  # a draft is one token shorter than what is left
            n=min(MAX_CHOICES, self.effort.num_texts),
            speculative_config={"method": method},
        )
        situation = Situation(Context(prompt, params))
        fill_target(self.llm.engine, [situation])
        seeds = range(-(-self.effort.num_texts // params.n))
        results = self.llm.generate([prompt for _ in seeds], [dataclasses.replace(params, seed=s) for s in seeds])
        evidence, texts = Evidence(), Counter[Tokens]()
        for answer in (answer for result in results for answer in result.outputs):
            texts[tuple(answer.token_ids[:LENGTH])] += 1
            assert answer.metrics is not None
            spec = answer.metrics.speculative_decoding
            assert spec is not None
            evidence.num_drafted += spec["num_draft_tokens"]
            evidence.num_accepted += spec["num_accepted_draft_tokens"]
        add_texts(evidence, situation, texts)
        return evidence

    def _context(self, parameter: Parameter, prompt: list[int], root: Sequence[int]) -> Context:
        params = parameter.params(
            self.material,
            top_k=TOP_K,
            temperature=1.0,
            ignore_eos=True,
            max_tokens=LAW_TOKENS + self.llm.info.num_spec_tokens,
        )
        return Context(prompt, params, tuple(root))

    def _judged(self, parameter: str, proposer: str, evidence: Evidence) -> None:
        level, first, joint = self._level, evidence.first, evidence.joint
        row = Row(Check.LAW, proposer, parameter, Outcome.HOLDS, joint.num_draws)
        row.num_drafted, row.num_accepted = evidence.num_drafted, evidence.num_accepted
        row.p_value = min(1.0, 2 * min(first.p_value, joint.p_value))
        row.detectable = joint.detectable(level)
        self.report.rows.append(row)
        if fault := _fault(evidence, level, self._row_distance):
            row.outcome, row.detail = Outcome.FAILED, fault
        elif not evidence.num_drafted:
            row.outcome, row.detail = Outcome.NOTHING, "0 tokens drafted: nothing was shown by this row"
        elif row.detectable is None:
            row.outcome, row.detail = Outcome.NOTHING, "the target leaves one token: nothing was shown by this row"


def _rows_fault(apart: float) -> str:
    return f"a distribution after drafted tokens is not the one after the same tokens as output: TV {apart:.2g}"


def _fault(evidence: Evidence, level: float, allowed: float) -> str | None:
    """What speaks against a law, in words. allowed: see `_Checker._row_distance`."""
    first, joint = evidence.first, evidence.joint
    if evidence.apart > allowed:
        return _rows_fault(evidence.apart)
    if impossible := max(first.impossible, joint.impossible):
        return f"{impossible} times a token that the target cannot say"
    if min(first.p_value, joint.p_value) < level:
        which = "the first token" if first.p_value <= joint.p_value else f"{LENGTH} tokens"
        return f"the draws of {which} do not follow the target's law (p = {min(first.p_value, joint.p_value):.1g})"
    return None


def _spread(number: int, count: int, size: int) -> list[int]:
    """`count` places of `size`, others for another number."""
    return [(number + step * max(1, size // count)) % size for step in range(min(count, size))]

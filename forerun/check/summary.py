"""A report in words: what was checked, how sure that is, and what was not checked."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.check.chi_square import MIN_EXPECTED, POWER
from forerun.check.law import FALSE_ALARM, LENGTH, MAX_DRAFTED, TOP_K
from forerun.check.report import Check, Outcome, Report, Row
from forerun.spec.rules import LAW, NO, PATH

PROMISES = {
    PATH: "the same seed gives the same text as without speculation",
    LAW: "texts follow the target's distribution; at temperature 0 they are the same as without speculation",
    NO: "nothing: texts change by design",
}


def summary(report: Report, *, exact: bool) -> list[str]:
    """Sentences, the verdict first. exact: the device computes rows exactly."""
    words = [_verdict(report), f"The rule is {report.rule}, which promises: {PROMISES[report.lossless]}."]
    tokens = [row for row in report.rows if row.check in (Check.GREEDY, Check.SEEDED)]
    laws = [row for row in report.rows if row.check is Check.LAW]
    if tokens:
        words += _tokens(tokens, exact)
    if rows := sum(row.num_tokens for row in report.rows if row.check is Check.ROWS):
        words.append(
            f"Rows: {rows} distributions after drafted tokens, compared with those after the same tokens as output."
        )
    if laws:
        words += _laws(laws)
    if nothing := [row for row in report.rows if row.outcome is Outcome.NOTHING]:
        names = ", ".join(f"{row.parameter} with {row.proposer}" for row in nothing)
        words.append(f"Nothing was shown by {len(nothing)} of {len(report.rows)} rows: {names}.")
    if tokens or laws:
        words.append(_not_checked(bool(laws)))
    return words


def _verdict(report: Report) -> str:
    if report.failed:
        return f"FAILED: {len(report.failed)} of {len(report.rows)} rows."
    if not report.passed:
        return "FAILED: nothing was drafted, so nothing was shown."
    if report.lossless == NO:
        return "Lossy, as expected: what changed is counted above."
    return "Passed: no difference was found."


def _tokens(rows: Sequence[Row], exact: bool) -> list[str]:
    num_tokens, drafted, accepted = (
        sum(getattr(row, name) for row in rows) for name in ("num_tokens", "num_drafted", "num_accepted")
    )
    alarms = (
        "There are no false alarms: rows are computed exactly, so one token that differs is a fault."
        if exact
        else "On this device a near tie may be decided otherwise with drafts: up to 1 in 1,000 tokens is let pass, and "
        "shown."
    )
    return [
        f"Tokens: {num_tokens} compared with plain decoding on the same engine, in mixed batches; {drafted} drafted, "
        f"{accepted} of them accepted. Text, end and log-probabilities were compared too. {alarms} A fault that "
        f"changes the share of tokens under 'finds', of steps with a draft, is found with probability {POWER:g}. "
        "'rehearsed' drafts come from the answers themselves with every third token wrong (in laws from the target's "
        "own distribution, sharpened or reversed), so that all is accepted and rejected everywhere."
    ]


def _laws(rows: Sequence[Row]) -> list[str]:
    found = [row.detectable for row in rows if row.detectable is not None]
    power = f"{min(found):.3f} to {max(found):.3f}" if found else "none"
    return [
        f"Laws: {len(rows)}, each tested by chi-square for the first token and for {LENGTH} tokens, over "
        f"{sum(row.num_tokens for row in rows)} draws on teacher-forced contexts, in cells that expect "
        f"{MIN_EXPECTED:g} or more. The chance that any of them fails where all hold is at most {FALSE_ALARM:g} "
        f"(Bonferroni, {2 * len(rows)} tests). A law that is off by the total variation under 'finds' ({power}) "
        f"is found with probability {POWER:g}, unless it errs within rare tokens that share a cell."
    ]


def _not_checked(laws: bool) -> str:
    more = (
        f" Laws were looked at with top_k at most {TOP_K} and drafts of at most {MAX_DRAFTED} tokens, drawn here "
        "from the distributions that the proposer gives; that it draws from them itself, the whole engine's row alone "
        "looks at."
        if laws
        else ""
    )
    return (
        "Not checked: other prompts and parameters, several of them at once, longer answers, preemption, the HTTP "
        f"server.{more}"
    )

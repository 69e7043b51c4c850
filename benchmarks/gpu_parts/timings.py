"""The parts that time steps, each on an engine that the caller built."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from peers.common import spread

from forerun.attention import Segment
from forerun.engine.engine import Engine
from forerun.kernels.fused import PlainLinear
from forerun.models.decoder import Decoder
from forerun.spec.control import FixedLength

from .floors import Floor, Sizes, Speeds, milliseconds, recorded, step_floor
from .models import ACCEPTANCE_LENGTH, DRAFTED, Models
from .options import VERIFY_ROUNDS, WINDOW_STEPS, Options
from .report import VERIFY_AT_MOST, VLLM, Column, Report, Table, met, number, target_ms, with_spread, yes_or_missed
from .steps import Batch, Ours, Timing, counted_since, counters, step_ms, synchronize

PASSES = 4  # launched together, so that the host prepares one while the device runs another
PROFILED_STEPS = 16
KERNELS = 12  # shown of a profile
TITLES = {
    "plain": "Plain decoding: ms a token and request, windows of 16 tokens",
    "eagle3": f"EAGLE-3, K = {DRAFTED}, synthetic acceptance: ms a token and request, windows of 16 tokens",
}


def decode_table(report: Report, part: str) -> Table:
    eagle = part == "eagle3"
    columns = [
        Column("batch", "batch"),
        Column("ms", "ms a token", with_spread),
        Column("tokens_per_s", "tokens/s", number(0)),
        Column("step_ms", "ms a step", number(2)),
        *([Column("acceptance_length", "acceptance length", number(2))] if eagle else []),
        *([Column("ms_at_length", f"ms at {ACCEPTANCE_LENGTH}", number(2))] if eagle else []),
        Column("floor_ms", "floor, ms a token", number(2)),
        Column("of_floor", "x floor", number(2)),
        Column("vllm_ms", "vLLM 0.26.0*", number(2)),
        Column("target_ms", "target", number(2)),
        Column("met", "met", yes_or_missed),
    ]
    return report.table(part, TITLES[part], columns)


class Timings:
    """What all timed parts share.

    Attributes:
        speeds: of the device, measured once.
    """

    def __init__(self, options: Options, report: Report, models: Models, speeds: Speeds) -> None:
        self.options = options
        self.report = report
        self.models = models
        self.speeds = speeds

    @property
    def sizes(self) -> Sizes:
        return self.models.sizes

    def batch(self, engine: Engine, size: int) -> Batch:
        info, prompt = engine.info(), self.options.prompt
        return Batch(Ours(engine), size, prompt, info.vocab_size, info.max_model_len - prompt)

    def decode(self, engine: Engine, part: str) -> None:
        """The parts `plain` and `eagle3`."""
        table = decode_table(self.report, part)
        for size in self.options.batch:
            rounds, counted, fill_s = [], [], []
            for _ in range(self.options.rounds):
                with self.batch(engine, size) as batch:
                    before = counters(engine)
                    rounds.append(batch.watch(self.options.steps))
                    counted.append(counted_since(engine, before))
                    fill_s.append(batch.fill_s)
            timing = Timing.of(rounds, size, self.options.prompt)
            drafts = sum(count["drafts"] for count in counted)
            accepted = sum(count["accepted"] for count in counted)
            table.add(**self._row(part, size, timing), acceptance_length=1 + accepted / drafts if drafts else None)
        prompts = size * self.options.prompt / statistics.median(fill_s)
        table.note(f"prompts: {prompts:,.0f} tokens/s, {size} of {self.options.prompt} tokens until all decode")
        if part == "eagle3":
            table.note(
                f"ms at {ACCEPTANCE_LENGTH}: a mean step's over that length, so without the draws' luck; this is judged"
            )
        if self.options.published:
            table.note("*measured elsewhere on such a card, 2026-11-29, in a run of its own")

    def _row(self, part: str, size: int, timing: Timing) -> dict[str, Any]:
        eagle = part == "eagle3"
        heads = {"rows": 1 + DRAFTED, "head_passes": DRAFTED} if eagle else {}
        floor = step_floor(self.sizes, self.speeds, size, timing.context, **heads).total / timing.tokens_a_step
        published = self.options.published
        limit = target_ms(part, size) if published else None
        ms_at_length = timing.step_ms / ACCEPTANCE_LENGTH if eagle else None
        return {
            "batch": size,
            "ms": timing.ms,
            "tokens_per_s": timing.tokens_per_s,
            "step_ms": timing.step_ms,
            "context": timing.context,
            "tokens_a_step": timing.tokens_a_step,
            "floor_ms": floor,
            "of_floor": timing.ms["median"] / floor,
            "vllm_ms": VLLM[part].get(size) if published else None,
            "target_ms": limit,
            "ms_at_length": ms_at_length,
            "met": met(ms_at_length or timing.ms["median"], limit),
        }

    def verify(self, engine: Engine) -> None:
        """A step that verifies K tokens that do not stand beside a plain step, in turns in one batch."""
        columns = [
            Column("batch", "batch"),
            Column("plain", "plain step, ms", with_spread),
            Column("wide", f"step of {1 + DRAFTED} rows, ms", with_spread),
            Column("rows", "its rows", number(1)),
            Column("ratio", "ratio", with_spread),
            Column("floor", "ratio of floors", number(2)),
            Column("target", "target", number(2)),
            Column("met", "met", yes_or_missed),
        ]
        table = self.report.table("verify", f"Verifying {DRAFTED} wrong tokens of each request", columns)
        limit = VERIFY_AT_MOST if self.options.published else None
        for size in self.options.batch:
            times: dict[int, list[float]] = {0: [], DRAFTED: []}
            rows = []
            with self.batch(engine, size) as batch:
                for _ in range(VERIFY_ROUNDS):
                    for drafted in times:
                        engine.control = FixedLength(drafted)
                        before = counters(engine)
                        times[drafted].append(step_ms(batch.watch(WINDOW_STEPS)))
                        count = counted_since(engine, before)
                    rows.append(count["rows"] / count["steps"])
            ratio = spread([wide / plain for plain, wide in zip(*times.values(), strict=True)])
            one, four = (self._floor(size, count).total for count in (1, 1 + DRAFTED))
            table.add(
                batch=size,
                plain=spread(times[0]),
                wide=spread(times[DRAFTED]),
                rows=statistics.median(rows),
                ratio=ratio,
                floor=four / one,
                target=limit,
                met=met(ratio["median"], limit),
            )

    def _floor(self, size: int, rows: int) -> Floor:
        return step_floor(self.sizes, self.speeds, size, self.options.prompt, rows)

    def passes(self, engine: Engine) -> None:
        """The target's pass with logits, without an engine around it, and its products alone."""
        columns = [
            Column("batch", "batch"),
            Column("rows", "rows each"),
            Column("pass_ms", "pass, ms", number(2)),
            Column("linears_ms", "products alone", number(2)),
            Column("products_floor_ms", "floor: products", number(2)),
            Column("attention_floor_ms", "attention", number(2)),
            Column("floor_ms", "sum", number(2)),
            Column("of_floor", "pass x floor", number(2)),
        ]
        table = self.report.table("pass", "The target's pass alone", columns)
        for size in self.options.batch:
            for rows in (1, 1 + DRAFTED):
                pass_ms = self._pass_ms(engine, size, rows)
                floor = self._floor(size, rows)
                table.add(
                    batch=size,
                    rows=rows,
                    pass_ms=pass_ms,
                    linears_ms=self._linears_ms(engine, size * rows),
                    products_floor_ms=floor.products,
                    attention_floor_ms=floor.attention,
                    floor_ms=floor.total,
                    of_floor=pass_ms / floor.total,
                )

    def _pass_ms(self, engine: Engine, size: int, rows: int) -> float:
        target = engine.runner.target
        num_blocks = -(-(self.options.prompt + rows) // target.block_size)
        segments = [
            Segment([7] * rows, self.options.prompt, list(range(i * num_blocks, (i + 1) * num_blocks)))
            for i in range(size)
        ]

        def work() -> None:
            for _ in range(PASSES):
                target.logits(target.forward(segments), range(size * rows))

        return milliseconds(work, self.options.device) / PASSES

    @torch.inference_mode()
    def _linears_ms(self, engine: Engine, rows: int) -> float:
        """All products of a pass, one after another in a graph."""
        model = engine.runner.target.model
        assert isinstance(model, Decoder)
        linears = [linear for linear in model.linears if isinstance(linear, PlainLinear)]
        widths = {linear.shape[1] for linear in linears}
        inputs = {k: torch.randn(rows, k, device=model.device, dtype=model.dtype) for k in widths}

        def run() -> None:
            for linear in linears:
                linear(inputs[linear.shape[1]])

        return milliseconds(recorded(run, self.options.device), self.options.device)

    def profile(self, engine: Engine, kind: str, sizes: Sequence[int]) -> None:
        """Where the time of steps goes: the device's kernels, and what is left of the time from output to output."""
        for size in sizes:
            with self.batch(engine, size) as batch:
                wall = step_ms(batch.watch(self.options.steps))
                synchronize()
                kernels = profiled(batch, self.options.device)
            columns = [
                Column("ms", "ms a step", number(3)),
                Column("calls", "calls", number(1)),
                Column("name", "kernel", "`{}`".format),
            ]
            table = self.report.table(f"profile-{kind}-{size}", f"Kernels of a step, {kind}, batch {size}", columns)
            for name, ms, calls in kernels[:KERNELS]:
                table.add(name=name[:100], ms=ms, calls=calls)
            busy = sum(ms for _, ms, _ in kernels)
            count = sum(calls for _, _, calls in kernels)
            table.note(
                f"all {count:.0f} kernels and copies: {busy:.2f} ms; from output to output without the profiler: "
                f"{wall:.2f} ms; gap {wall - busy:.2f} ms"
            )


def profiled(batch: Batch, device: str) -> list[tuple[str, float, float]]:
    """(kernel, milliseconds a step, calls a step), the longest first. Copies count as kernels."""
    on_gpu = device == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        batch.call(PROFILED_STEPS)
        synchronize()
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    kernels = []
    for event in profiler.key_averages():
        if event.device_type == kind and not getattr(event, "is_user_annotation", False):
            total_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            kernels.append((event.key, total_us / 1000 / PROFILED_STEPS, event.count / PROFILED_STEPS))
    return sorted((kernel for kernel in kernels if kernel[1] > 0), key=lambda kernel: -kernel[1])

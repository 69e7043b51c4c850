"""What `cpu_peers.py` found, as tables and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

Figures = dict[str, Any]
TITLES = {
    "step": "tokens/s of a step by rows, logits of the last row",
    "verify": "tokens/s of a step by rows, logits of all rows",
    "prefill": "prefill, tokens/s by rows",
    "start": "start-up of the server",
}


def show(console: Console, report: Figures) -> None:
    keys = (
        "commit",
        "machine",
        "isa",
        "threads",
        "llama_cpp",
        "torch",
        "rounds",
        "load_average",
        "load_average_at_end",
    )
    console.print(" ".join(f"{key}={report[key]}" for key in keys), highlight=False, soft_wrap=True)
    for name, figures in report["files"].items():
        for part, title in TITLES.items():
            if part in figures:
                console.print(sides_table(f"{name}: {title}", figures[part]))
        if "spec" in figures:
            console.print(spec_table(f"{name}: Spec-Bench, tokens/s (accepted / drafted)", figures["spec"]))
    for model, found in report["best"].items():
        console.print(best_table(f"{model}: each side's best file and method, tokens/s", found))


def cell(figure: Figures) -> str:
    return f"{figure['median']:.4g} ({figure['low']:.4g}-{figure['high']:.4g})"


def new_table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def sides_table(title: str, found: Figures) -> Table:
    keys = [key for key in next(iter(found.values())) if key != "cost"]
    costs = list(next(iter(found.values())).get("cost", {}))
    table = new_table(title, "", *keys, *(f"cost of {rows} / 1" for rows in costs))
    for side, figures in found.items():
        shown = [f"{figures['cost'][rows]:.2f}" for rows in costs]
        table.add_row(side, *(cell(figures[key]) for key in keys), *shown)
    return table


def spec_table(title: str, found: Figures) -> Table:
    categories = list(next(iter(found.values())))
    table = new_table(title, "", *categories)
    for side, figures in found.items():
        cells = []
        for category in categories:
            figure = figures[category]
            drafts = f" ({figure['accepted']} / {figure['drafted']})" if figure["drafted"] else ""
            cells.append(cell(figure["tokens_per_s"]) + drafts)
        table.add_row(side, *cells)
    return table


def best_table(title: str, found: Figures) -> Table:
    table = new_table(title, "", "forerun", "llama.cpp", "ratio")
    for what, figure in found.items():
        sides = [f"{figure[s][0]:.4g} {figure[s][1]}" if s in figure else "-" for s in ("forerun", "llama.cpp")]
        table.add_row(what, *sides, f"{figure['ratio']:.2f}" if "ratio" in figure else "-")
    return table


def plot(report: Figures, path: Path) -> None:
    """A row of panels a model: steps by rows, and Spec-Bench by category; of each side and method the best file's."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        print("skipped: the plot needs matplotlib, which is not installed")
        return
    models = {model: best_spec(report["files"], model) for model in report["best"]}
    picture = Figure(figsize=(13, 3.6 * len(models)), layout="constrained")
    panels = picture.subplots(len(models), 2, squeeze=False, width_ratios=[1, 2])
    for (left, right), (model, spec) in zip(panels, models.items(), strict=True):
        name = common_name(report["files"], model)
        draw_steps(left, name, report["best"][model])
        draw_spec(right, name, spec)
    picture.suptitle(f"{report['machine']}, {report['isa']}, {report['threads']} threads; each side's best file")
    with rc_context({"svg.fonttype": "none"}):  # text as text: a third of the size
        picture.savefig(path, dpi=110)
    print(f"plot: {path}")


def common_name(files: Figures, model: str) -> str:
    """What the files of a model go by: the shortest of their names."""
    return Path(min((name for name, figures in files.items() if figures["model"] == model), key=len)).stem


def best_spec(files: Figures, model: str) -> Figures:
    """Of each side and method, the Spec-Bench figures of the file that gives it the most tokens/s."""
    found: Figures = {}
    for figures in files.values():
        if figures["model"] != model:
            continue
        for side, by_category in figures.get("spec", {}).items():
            speed = by_category["all"]["tokens_per_s"]["median"]
            if side not in found or speed > found[side]["all"]["tokens_per_s"]["median"]:
                found[side] = by_category
    return found


def draw_steps(panel: Any, name: str, best: Figures) -> None:
    colours = {"forerun": "tab:blue", "llama.cpp": "tab:orange"}
    for part, line in (("step", "-"), ("verify", "--")):
        for side, colour in colours.items():
            points = {
                int(what.removeprefix(f"{part} ")): figure[side][0]
                for what, figure in best.items()
                if what.startswith(f"{part} ") and side in figure
            }
            if points:
                panel.plot(
                    *zip(*sorted(points.items()), strict=True), line, marker="o", color=colour, label=f"{side}, {part}"
                )
    panel.set(title=name, xlabel="rows in a step", ylabel="tokens/s")
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_ylim(bottom=0)
    if panel.lines:
        panel.legend()


def draw_spec(panel: Any, name: str, found: Figures) -> None:
    """Groups of bars: a group a category, a bar a method, whiskers from the lowest to the highest round."""
    panel.set(title=f"{name}: Spec-Bench, greedy, one request at a time", ylabel="tokens/s")
    if not found:
        panel.set_axis_off()
        return
    from matplotlib import colormaps

    categories = list(next(iter(found.values())))
    width = 0.8 / len(found)
    seen: dict[str, int] = {}
    for place, (side, figures) in enumerate(found.items()):
        program = side.split(" ")[0]
        seen[program] = seen.get(program, 0) + 1
        rates = [figures[category]["tokens_per_s"] for category in categories]
        middle = [r["median"] for r in rates]
        around = [[r["median"] - r["low"] for r in rates], [r["high"] - r["median"] for r in rates]]
        colour = colormaps["Blues" if program == "forerun" else "Oranges"](0.25 + 0.17 * seen[program])
        at = [group + (place - len(found) / 2 + 0.5) * width for group in range(len(categories))]
        panel.bar(at, middle, width, yerr=around, label=side, color=colour)
    panel.set_xticks(range(len(categories)), categories)
    panel.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))

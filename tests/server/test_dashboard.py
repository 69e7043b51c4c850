"""The Grafana dashboard asks for nothing that /metrics does not have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "forerun.json"


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_every_series_and_label_that_it_asks_for_is_there(http: httpx.Client) -> None:
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 9}).status_code == 200
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for expression in expressions(json.loads(DASHBOARD.read_text())):
        names = re.findall(r"(?:vllm|forerun):\w+", expression)
        assert names
        for name in names:
            assert name in labels, f"{name} of {expression}"
        asked = re.findall(r"by \((\w+)\) \(rate\(((?:vllm|forerun):\w+)", expression)
        for name, selector in re.findall(r"((?:vllm|forerun):\w+)\{([^}]*)\}", expression):
            asked += [(label, name) for label in re.findall(r"(\w+)=", selector)]
        for label, name in asked:
            assert label in labels[name], f"{label} of {name} in {expression}"


def test_it_has_what_grafana_needs_to_load_it() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["uid"]
    assert dashboard["schemaVersion"] >= 36
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        box = panel["gridPos"]
        cells = {(box["x"] + dx, box["y"] + dy) for dx in range(box["w"]) for dy in range(box["h"])}
        assert not cells & taken
        assert box["x"] + box["w"] <= 24
        taken |= cells
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(panels)))
    assert used == variables

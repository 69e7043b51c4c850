"""llama.cpp's side: its own benchmark programs and its server, run as its users run them."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from forerun.bench.process import Server
from peers.common import Answer

SPEC_FLAGS: dict[str, list[str]] = {
    "plain": [],
    "ngram-mod": ["--spec-type", "ngram-mod"],
    "ngram-simple": ["--spec-type", "ngram-simple"],
    "spec-default": ["--spec-default"],
}
CONTEXT = 16  # tokens before a step of llama-batched-bench
STEPS = 8  # steps that it times as one


class LlamaCpp:
    """The programs in one folder. `missing` names those that are not there; what needs them is skipped."""

    PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-server", "llama-results")

    def __init__(self, folder: Path | None, threads: int) -> None:
        self.folder = folder
        self.threads = threads

    def has(self, program: str) -> bool:
        return self.folder is not None and (self.folder / program).exists()

    @property
    def missing(self) -> list[str]:
        return [program for program in self.PROGRAMS if not self.has(program)]

    @property
    def version(self) -> str:
        if not self.has("llama-server"):
            return "unknown"
        found = subprocess.run([self._path("llama-server"), "--version"], capture_output=True, text=True, check=False)
        match = re.search(r"version: (.*)", found.stdout + found.stderr)
        return match[1] if match else "unknown"

    def steps(self, model: Path, rows: Sequence[int], repeats: int) -> dict[int, list[float]]:
        """llama-bench: tokens/s of a step of so many rows of one sequence, logits of the last row only."""
        sizes = ",".join(map(str, rows))
        flags = ["-m", str(model), "-t", str(self.threads), "-p", sizes, "-n", "0", "-r", str(repeats), "-o", "json"]
        return {entry["n_prompt"]: entry["samples_ts"] for entry in json.loads(self._run("llama-bench", flags))}

    def verify_steps(self, model: Path, rows: Sequence[int]) -> dict[int, list[float]]:
        """llama-batched-bench: tokens/s of a step of so many rows, one a sequence, logits of all rows."""
        size = max(rows) * (CONTEXT + STEPS)
        flags = ["-m", str(model), "-t", str(self.threads), "-c", str(size), "--output-format", "jsonl"]
        flags += ["-npp", str(CONTEXT), "-ntg", str(STEPS), "-npl", ",".join(map(str, rows))]
        lines = [json.loads(line) for line in self._run("llama-batched-bench", flags).splitlines() if line[:1] == "{"]
        return {line["pl"]: [line["speed_tg"]] for line in lines}

    def serve(self, model: Path, context: int, flags: Sequence[str] = ()) -> Server:
        threads = str(self.threads)
        command = [self._path("llama-server"), "-m", str(model), "-t", threads, "-tb", threads, "-c", str(context)]
        return Server([*command, "-np", "1", "--no-ui", *flags])

    def logits(self, model: Path, text: str, max_tokens: int) -> tuple[list[int], NDArray[np.float32]]:
        """llama-results: the tokens that it makes of the text [T], and the logits of every row [T, V], as they are."""
        with tempfile.TemporaryDirectory() as folder:
            prompt, out = Path(folder, "prompt.txt"), Path(folder, "results.gguf")
            prompt.write_text(text + "\n", encoding="utf-8")  # it drops one line feed at the end
            size, threads = str(max_tokens), str(self.threads)
            flags = ["-m", str(model), "-t", threads, "-tb", threads, "-c", size, "-b", size, "-f", str(prompt)]
            self._run("llama-results", [*flags, "-o", str(out)])
            tensors = {tensor.name: np.array(tensor.data) for tensor in GGUFReader(out).tensors}
        tokens = tensors["tokens"].tolist()
        return tokens, tensors["logits"].reshape(len(tokens), -1)

    def _path(self, program: str) -> str:
        assert self.folder is not None
        return str(self.folder / program)

    def _run(self, program: str, flags: Sequence[str]) -> str:
        found = subprocess.run([self._path(program), *flags], capture_output=True, text=True, check=False)
        if found.returncode:
            raise SystemExit(f"{program} {' '.join(flags)} failed:\n{found.stderr[-2000:]}")
        return found.stdout


def answer(server: Server, prompt_ids: Sequence[int], max_tokens: int) -> Answer:
    """A greedy answer of a llama-server. Its prompt is computed anew."""
    body: dict[str, Any] = {"prompt": list(prompt_ids), "n_predict": max_tokens, "temperature": 0}
    body |= {"cache_prompt": False, "return_tokens": True}
    found = server.post("/completion", body)
    timings = found["timings"]
    drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
    seconds = timings["predicted_ms"] / 1000
    return Answer(timings["predicted_n"], seconds, drafted, accepted, tuple(found.get("tokens", ())))

"""C26: a bad --speculative-config is one line at once, and a good one is what it says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun.errors import ConfigError
from forerun.request import SamplingParams
from forerun.spec.config import SpeculativeConfig
from forerun.spec.keys import KEYS, Status
from forerun.spec.source import FLAG
from tests.cases.conftest import Reference
from tests.cases.material import DISTINCT, LOOPS, complete
from tests.tiny_engine import NGRAM, SUFFIX, make_engine, run

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from forerun.cli import main; main()"]
WITHIN_S = 10.0  # a bad one takes 0.3 s on an idle machine; loading torch alone would take 2 s

# text -> what the one line must hold: the key or the character position, and the nearest name for a typo.
BAD: dict[str, list[str]] = {
    "{method: ngram}": ["at character 2", "quotes"],
    '{"method":"ngram",}': ["at character 18", "comma"],
    "[]": ["must be a JSON object", "[]"],
    '"ngram"': ["must be a JSON object", '{"method": "ngram", ...}'],
    "": ["empty"],
    "no/such/file.json": ["no/such/file.json", "does not exist"],
    "@no/such/file": ["no/such/file", "does not exist"],
    '{"method":"ngram","num_speculative_token":5}': ['"num_speculative_token"', '"num_speculative_tokens"'],
    '{"method":"eagel3","num_speculative_tokens":5}': ['"eagel3"', '"eagle3"'],
    '{"method":"ngram","num_speculative_tokens":5,"num_speculative_tokens":6}': ["num_speculative_tokens", "twice"],
    '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_min":5,"prompt_lookup_max":2}': [
        "prompt_lookup_min=5",
        "prompt_lookup_max=2",
    ],
    '{"method":"ngram","num_speculative_tokens":5,"suffix_decoding_max_tree_depth":8}': [
        "suffix_decoding_max_tree_depth=8",
        '"suffix"',
    ],
    '{"method":"ngram","num_speculative_tokens":5,"model":"some/EAGLE3-head"}': ['model="some/EAGLE3-head"', '"ngram"'],
    '{"method":"suffix","model":"ngram"}': ['model="ngram"', '"suffix"'],
    '{"method":"ngram","num_speculative_tokens":"five"}': ["num_speculative_tokens", '"five"', "1 to 1024"],
    '{"method":"ngram","num_speculative_tokens":0}': ["num_speculative_tokens", "got 0", "1 to 1024"],
    '{"method":"draft_model","num_speculative_tokens":4}': ["model is missing", '"draft_model"'],
    '{"model":"some/DFlash-head","num_speculative_tokens":4}': ['"dflash" in its name', "not served yet"],
    '{"model":"some/EAGLE3-head","num_speculative_tokens":0}': ["num_speculative_tokens", "got 0", "1 to 1024"],
    '{"method":"eagle3","num_speculative_tokens":4}': ["model is missing", '"eagle3"'],
    '{"method":"eagle3","model":"h","spec_tree":{"depth":4,"top_k":8}}': ["spec_tree", "num_draft_tokens is missing"],
    '{"method":"eagle3","model":"h","kv_cache_dtype":"float32"}': ['kv_cache_dtype="float32"', '"auto"'],
    '{"method":["suffix",{"method":"ngram","prompt_lookup_max":0}]}': ["method[1]: prompt_lookup_max", "got 0"],
    '{"method":["suffix","ngram"],"num_speculative_tokens":4,"draft_min_prob":0.5}': ["draft_min_prob=0.5", "belongs"],
    '{"method":"suffix","num_speculative_tokens_per_batch_size":[[1,8,5],[8,16,2]]}': ["[1, 8, 5]", "[8, 16, 2]"],
}


@pytest.mark.parametrize("text", BAD)
def test_parse_refuses_in_one_line_that_names_what_is_wrong(text: str) -> None:
    """C26 at SpeculativeConfig.parse."""
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.parse(text)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in BAD[text]), str(caught.value)


@pytest.fixture(scope="module")
def broken_model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """T with weights that cannot be read: whoever looks at them says so."""
    folder = tmp_path_factory.mktemp("broken") / "target"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes() if file.suffix != ".safetensors" else b"no weights")
    return folder


Refusals = dict[tuple[str, str], tuple[subprocess.CompletedProcess[str], float]]


@pytest.fixture(scope="module")
def refusals(broken_model: Path) -> Refusals:
    """What `serve` and `generate` say to each bad text, run a few at a time."""
    options = {"serve": ["--port", "0"], "generate": ["--prompt", "x"]}

    def start(command: str, text: str) -> tuple[subprocess.CompletedProcess[str], float]:
        started = time.monotonic()
        words = [*COMMAND, command, str(broken_model), *options[command], FLAG, text]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
        return done, time.monotonic() - started

    keys = [("serve", text) for text in BAD] + [("generate", text) for text in list(BAD)[::4]]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(keys, pool.map(lambda key: start(*key), keys), strict=True))


def test_a_bad_text_ends_the_program_at_once_with_one_line(refusals: Refusals) -> None:
    """C26 through the command line: the weights are broken too, and nobody has looked at them yet."""
    for (command, text), (done, seconds) in refusals.items():
        about = f"{command} {text!r}: {done.stderr}"
        assert done.returncode == 1, about
        assert done.stdout == "", about
        assert done.stderr.startswith("forerun: error: speculative_config: "), about
        assert done.stderr.count("\n") == 1, about
        assert all(word in done.stderr for word in BAD[text]), about
        assert "Traceback" not in done.stderr
        assert seconds < WITHIN_S, about


def test_the_broken_weights_are_noticed_once_the_configuration_is_right(broken_model: Path) -> None:
    """C26: so that the test above can fail. One clean line as well."""
    words = [*COMMAND, "generate", str(broken_model), "--prompt", "x", FLAG, json.dumps(NGRAM)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("forerun: error: ")
    assert "speculative_config" not in done.stderr
    assert "safetensors" in done.stderr
    assert "Traceback" not in done.stderr


class Serving:
    """`forerun serve` as a subprocess; `said` is its stderr so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.said.extend(iter(self.process.stderr.readline, ""))

    def wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._reader.is_alive():
            if found := re.search(pattern, "".join(self.said)):
                return found[1]
            time.sleep(0.02)
        raise AssertionError(f"{pattern} was not said:\n" + "".join(self.said))

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        self._reader.join(5)
        return code


GIVEN = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}


@pytest.fixture(scope="module")
def serving(tiny_model: Path) -> Iterator[Serving]:
    words = [*COMMAND, "serve", str(tiny_model), "--host", "127.0.0.1", "--port", "0", "--num-threads", "1"]
    words += ["--kv-cache-memory", "1MiB", FLAG, json.dumps(GIVEN)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        serving = Serving(process)
        try:
            yield serving
        finally:
            if process.poll() is None:
                process.kill()


def test_a_valid_configuration_is_echoed_in_full_and_readable_from_the_server(serving: Serving, ref: Reference) -> None:
    """C26: the log's line and /v1/speculation say every key that has an effect, defaults included, method as given."""
    resolved = SpeculativeConfig.parse(GIVEN).resolved()
    assert resolved == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 4,
        "prompt_lookup_max": 4,
        "rejection_sample_method": "match",
    }
    url = serving.wait_for(r"Starting forerun server on (http://\S+)")
    assert json.loads(serving.wait_for(r"Speculative config: (\{.*\})")) == resolved
    serving.wait_for(r"(Application startup complete)")
    with httpx.Client(base_url=url, timeout=20) as http:
        content = http.get("/v1/speculation").json()
        assert content["speculative_config"] == resolved
        assert content["num_speculative_tokens"] == 3
        for prompt in (LOOPS[3], DISTINCT[0]):
            assert complete(http, prompt, max_tokens=16).token_ids == ref(prompt, max_tokens=16).token_ids
        assert http.get("/v1/speculation").json()["totals"]["num_accepted_tokens"] > 0
    assert serving.end() == 0
    assert not re.search("ERROR|Traceback", "".join(serving.said))


# key of the echo -> another value of it; None: no other value is served, and each is refused by name.
TABLE = "num_speculative_tokens_per_batch_size"
BY_SIZE = NGRAM | {TABLE: [[1, 64, 5]]}
CACHED = SUFFIX | {"suffix_decoding_max_cached_requests": 1000}
NGRAM_MOD = {"method": "ngram_mod", "num_speculative_tokens": 5, "ngram_mod_n_match": 2, "ngram_mod_n_min": 1}
EFFECTS: list[Any] = [
    (NGRAM, "num_speculative_tokens", 2),
    (NGRAM, "prompt_lookup_min", 4),
    (NGRAM, "prompt_lookup_max", 2),
    (NGRAM, "rejection_sample_method", None),
    (CACHED, "num_speculative_tokens", 2),
    (CACHED, "suffix_decoding_max_tree_depth", 3),
    (CACHED, "suffix_decoding_max_spec_factor", 0.5),
    (CACHED, "suffix_decoding_min_token_prob", 0.9),
    (CACHED, "suffix_decoding_max_cached_requests", 0),
    (CACHED, "suffix_decoding_max_cached_bytes", 1 << 12),
    (CACHED, "rejection_sample_method", None),
    (NGRAM_MOD, "num_speculative_tokens", 2),
    (NGRAM_MOD, "ngram_mod_n_match", 4),
    (NGRAM_MOD, "ngram_mod_n_min", 4),
    (NGRAM_MOD, "ngram_mod_pool_bytes", 64),
    (NGRAM_MOD, "rejection_sample_method", None),
    (BY_SIZE, "num_speculative_tokens", 2),
    (BY_SIZE, "prompt_lookup_min", 4),
    (BY_SIZE, "prompt_lookup_max", 2),
    (BY_SIZE, "rejection_sample_method", None),
    (BY_SIZE, TABLE, [[1, 1, 2]]),
]
WORK = [(prompt, SamplingParams(temperature=0.9, seed=1, max_tokens=24, ignore_eos=True)) for prompt in LOOPS]


def drafts_with(spec: dict[str, Any], model: Path) -> list[list[int]]:
    """How many tokens were drafted in each step of each request."""
    engine = make_engine(model, spec)
    results = run(engine, [*WORK, *WORK], check=False, together=False)  # twice: the second may copy from the first
    return [result.last.metrics.speculative_decoding["per_step_drafted"] for result in results]


@pytest.mark.parametrize(("spec", "key", "value"), EFFECTS, ids=lambda part: part if isinstance(part, str) else "")
def test_each_key_of_the_echo_has_an_effect(spec: dict[str, Any], key: str, value: Any, tiny_model: Path) -> None:
    """C26: what is echoed is not parsed and forgotten: other drafts are made, or the other value is refused."""
    assert key in SpeculativeConfig.parse(spec).resolved()
    if value is not None:
        assert drafts_with(spec | {key: value}, tiny_model) != drafts_with(spec, tiny_model)
        return
    others: tuple[Any, ...] = (5,)
    if KEYS[key].choices:
        others = tuple(c.value for c in KEYS[key].choices if c.status is not Status.SERVED)
    for other in others:
        with pytest.raises(ConfigError, match=key):
            SpeculativeConfig.parse(spec | {key: other})


def test_the_table_of_effects_holds_every_key_of_the_echo() -> None:
    """C26: a key that is added later must show its effect here."""
    for spec in (NGRAM, CACHED, NGRAM_MOD, BY_SIZE):
        shown = {key for of, key, _ in EFFECTS if of is spec}
        assert shown == SpeculativeConfig.parse(spec).resolved().keys() - {"method"}

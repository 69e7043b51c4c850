"""Ids of the hub: huggingface_hub's own client against a hub of ours on this machine, in processes of their own, since
the client reads its environment once."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import ConfigError
from forerun.models.builtin import resolve_model
from forerun.models.hub import HubModel

from .tiny import hf_model, save_hf, write_gguf

COMMITS = {"main": "a" * 40, "v2": "b" * 40}
RUN = """
import logging, sys
from forerun.errors import ConfigError
from forerun.models.builtin import resolve_model
logging.basicConfig(format="LOG %(message)s", stream=sys.stdout)
try:
    print(resolve_model(sys.argv[1], False, weights=sys.argv[2] == "weights"))
except ConfigError as error:
    print("ERROR", error)
"""


class Hub:
    """Serves repositories: {id: {file: content}}; `v2` of a repository is another under `<id>@v2`."""

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        self.repositories = repositories
        self.fetched: list[str] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def files(self, repository: str, revision: str) -> dict[str, bytes] | None:
        names = {commit: name for name, commit in COMMITS.items()}
        revision = names.get(revision, revision)
        return self.repositories.get(repository if revision == "main" else f"{repository}@{revision}")

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repository, revision = "/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main"
            if repository == "org/gated":
                return 403, {"X-Error-Code": "GatedRepo"}, b""
            if repository not in self.repositories:
                return 404, {"X-Error-Code": "RepoNotFound"}, b""
            files = self.files(repository, revision)
            if files is None:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
            if parts[4:5] == ["tree"]:
                tree = [{"type": "file", "oid": "0", "size": len(files[name]), "path": name} for name in files]
                return 200, {}, json.dumps(tree).encode()
            siblings = [{"rfilename": name} for name in files]
            sha = COMMITS.get(revision, revision)
            return 200, {}, json.dumps({"id": repository, "sha": sha, "siblings": siblings}).encode()
        if len(parts) < 5 or parts[2] != "resolve":
            return 404, {}, b""  # what the client asks beside, as of its own updates
        repository, revision, name = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
        content = (self.files(repository, revision) or {})[name]
        headers = {"X-Repo-Commit": COMMITS.get(revision, revision), "ETag": hashlib.sha256(content).hexdigest()}
        return 200, headers, content

    def handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.send(with_body=False)

            def do_GET(self) -> None:
                if not self.path.startswith("/api"):
                    hub.fetched.append(self.path.split("/", 5)[-1])
                self.send(with_body=True)

            def send(self, with_body: bool) -> None:
                status, headers, body = hub.answer(self.path)
                self.send_response(status)
                for key, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        return Handler


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    root = tmp_path_factory.mktemp("hub")
    model = hf_model("llama")
    one, many = files_of(save_hf(model, root / "one")), files_of(save_hf(model, root / "many", max_shard_size="40KB"))
    gguf = write_gguf(model, root / "m.gguf").read_bytes()
    rest = {
        "README.md": b"#",
        "tokenizer.json": b"{}",
        "tokenizer.model": b"x",
        "pytorch_model.bin": b"x",
        "run.py": b"",
    }
    rest |= {"consolidated.safetensors": b"x", "onnx/model.onnx": b"x"}
    served = Hub(
        {
            "org/one": one | rest,
            "org/one@v2": one | {"tokenizer.json": b"{ }"},
            "org/many": many | rest,
            "org/gguf": {"README.md": b"#", "m-Q8_0.gguf": gguf},
            "org/ggufs": {"m-Q8_0.gguf": gguf, "m-Q4_K_M.gguf": gguf, "m-Q4_K_S.gguf": gguf},
            "org/pickles": {"config.json": b"{}", "pytorch_model.bin": b"x"},
            "org/empty": {"README.md": b"#"},
        }
    )
    yield served
    served.server.shutdown()
    served.server.server_close()


def resolve(hub: Hub | str, cache: Path, name: str, weights: bool = True, offline: bool = False) -> str:
    """What `resolve_model` gives in a new process; the hub forgets what was fetched before."""
    if isinstance(hub, Hub):
        hub.fetched.clear()
    environment = {"HF_ENDPOINT": hub.url if isinstance(hub, Hub) else hub, "HF_HOME": str(cache), "PATH": "/bin"}
    environment |= {"HF_HUB_OFFLINE": "1"} if offline else {}
    command = [sys.executable, "-c", RUN, name, "weights" if weights else ""]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


SMALL = {"config.json", "generation_config.json", "tokenizer.json"}


def test_what_a_model_needs_is_fetched_once_and_nothing_else(hub: Hub, tmp_path: Path) -> None:
    folder = Path(resolve(hub, tmp_path, "org/one"))
    assert set(hub.fetched) == {path.name for path in folder.iterdir()} == SMALL | {"model.safetensors"}
    assert resolve(hub, tmp_path, "org/one") == str(folder)
    assert hub.fetched == []
    assert resolve(hub, tmp_path, "org/one", offline=True) == str(folder)


def test_shards_are_those_that_the_index_names(hub: Hub, tmp_path: Path) -> None:
    folder = Path(resolve(hub, tmp_path, "org/many", weights=False))
    assert set(hub.fetched) == SMALL
    assert Path(resolve(hub, tmp_path, "org/many")) == folder
    shards = {name for name in hub.repositories["org/many"] if name.startswith("model-")}
    assert len(shards) > 1
    assert set(hub.fetched) == shards | {"model.safetensors.index.json"}


def test_a_revision_is_fetched_by_its_name(hub: Hub, tmp_path: Path) -> None:
    folder = Path(resolve(hub, tmp_path, "org/one@v2"))
    assert folder.name == COMMITS["v2"]
    assert (folder / "tokenizer.json").read_bytes() == b"{ }"
    assert "org/one has no revision 'v3'" in resolve(hub, tmp_path, "org/one@v3")


def test_a_gguf_file_is_found(hub: Hub, tmp_path: Path) -> None:
    for weights in (True, False):
        assert resolve(hub, tmp_path, "org/gguf", weights).endswith("/m-Q8_0.gguf")
    assert resolve(hub, tmp_path, "org/ggufs:q8_0").endswith("/m-Q8_0.gguf")
    assert hub.fetched == ["m-Q8_0.gguf"]
    assert resolve(hub, tmp_path, "org/ggufs:m-Q4_K_S.gguf").endswith("/m-Q4_K_S.gguf")
    said = resolve(hub, tmp_path, "org/ggufs")
    assert "org/ggufs has 3 GGUF files: name one, as in organisation/name:Q4_K_M; there are: m-Q8_0.gguf, m-Q4" in said
    assert "2 GGUF files fit 'Q4_K'" in resolve(hub, tmp_path, "org/ggufs:Q4_K")
    assert "no GGUF file fits 'Q2_K'; there are: m-Q8_0" in resolve(hub, tmp_path, "org/ggufs:Q2_K")


def test_what_cannot_be_fetched_is_one_line(hub: Hub, tmp_path: Path) -> None:
    for name, part in [
        ("org/none", "no such file or directory, and no such model on the hub"),
        ("org/gated", "org/gated is gated: accept its terms"),
        ("org/pickles", "neither config.json with *.safetensors nor a *.gguf file; pickles (pytorch_model.bin)"),
        ("org/empty", "neither config.json with *.safetensors nor a *.gguf file"),
    ]:
        said = resolve(hub, tmp_path, name)
        assert said.startswith("ERROR ")
        assert part in said
        assert len(said.splitlines()) == 1


def test_without_a_network_the_cache_does(hub: Hub, tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    said = resolve(nowhere, tmp_path, "org/one")
    assert "ERROR org/one: no such file or directory, the hub cannot be reached (ConnectError" in said
    assert len(said.splitlines()) == 1
    assert "org/one: no such file or directory, and not in the cache of the hub while HF_HUB_OFFLINE is set" in resolve(
        hub, tmp_path, "org/one", offline=True
    )
    assert hub.fetched == []
    resolve(hub, tmp_path, "org/one", weights=False)
    assert "ERROR the copy of org/one in the cache has neither config.json with *.safetensors" in resolve(
        hub, tmp_path, "org/one", offline=True
    )
    folder = resolve(hub, tmp_path, "org/one")
    warning, path = resolve(nowhere, tmp_path, "org/one").splitlines()
    assert path == folder
    assert warning.startswith("LOG the hub cannot be reached: org/one is taken from the cache")


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("org/name", HubModel("org/name")),
        ("Qwen/Qwen2.5-0.5B@refs/pr/1", HubModel("Qwen/Qwen2.5-0.5B", "refs/pr/1")),
        ("org/name-GGUF:Q4_K_M", HubModel("org/name-GGUF", None, "Q4_K_M")),
        ("org/name@v2:sub/m.gguf", HubModel("org/name", "v2", "sub/m.gguf")),
        ("no/such.gguf", None),
        ("./org/name", None),
        ("/org/name", None),
        ("../name", None),
        ("org/sub/name", None),
        ("name", None),
        ("", None),
    ],
)
def test_names_of_the_hub(name: str, model: HubModel | None) -> None:
    assert HubModel.parse(name) == model


def test_a_revision_of_what_has_none_is_refused(tmp_path: Path) -> None:
    for name in (str(tmp_path), "smollm2-135m", "org/name@other"):
        with pytest.raises(ConfigError, match=r"revision='v2' does not fit model"):
            resolve_model(name, revision="v2")

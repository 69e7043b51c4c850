"""Grammars are compiled in a process of their own before they reach the engine.

llguidance bounds most of what compiling may cost, not all: an intersection of a few dozen expressions runs for minutes,
and a thread that does cannot be ended. A process can be. The engine compiles what has passed here, in at most the
time that it took here.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from selectors import EVENT_READ, DefaultSelector
from typing import Any, Protocol

import msgspec
import psutil

from forerun.errors import RequestError
from forerun.structured.request import StructuredOutputs

MAX_COMPILE_S = 0.5  # of processor time; a schema with 2,000 required properties takes half of it
MAX_WAIT_S = 60.0  # for the process to start, or for its turn on a machine that is busy
POLL_S = 0.02
MAX_BYTES = 4 << 30  # address space of the process
MAX_REMEMBERED = 1024
_LENGTH_BYTES = 4


class Tokenizer(Protocol):
    """What is needed of `forerun.models.tokenizer.Tokenizer`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> Collection[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...


class Verdict(msgspec.Struct):
    """What the process says of a grammar: "" or the fault, and the seconds of processor time it took."""

    fault: str
    param: str | None = None
    seconds: float = 0.0


class GrammarTrial:
    """Judges what requests ask for. The process starts with the first of them. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._known: OrderedDict[StructuredOutputs, Verdict] = OrderedDict()

    def check(self, given: Mapping[str, Any]) -> None:
        """Waits for the verdict, about as long as it takes to compile, or to find that it takes too long.

        Raises:
            RequestError: the grammar is wrong or takes too long to compile; `param` names the key of
                `structured_outputs`.
        """
        asked = StructuredOutputs.parse(given)
        with self._lock:
            verdict = self._known.get(asked)
            if verdict is None:
                verdict = self._known[asked] = self._ask(asked)
                if len(self._known) > MAX_REMEMBERED:
                    self._known.popitem(last=False)
            self._known.move_to_end(asked)
        if verdict.fault:
            raise RequestError(verdict.fault, verdict.param)

    def close(self) -> None:
        """End the process. The next check starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _ask(self, asked: StructuredOutputs) -> Verdict:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        if not self._send(process, msgspec.msgpack.encode(asked)):
            return self._lost(asked)
        answer = _receive(process, 2 * MAX_COMPILE_S)
        if answer is None:
            return self._lost(asked)
        verdict = msgspec.msgpack.decode(answer, type=Verdict)
        return _too_slow(asked) if not verdict.fault and verdict.seconds > MAX_COMPILE_S else verdict

    def _lost(self, asked: StructuredOutputs) -> Verdict:
        """No answer: the process hangs in this grammar or died of it."""
        self.close()
        return _too_slow(asked)

    def _start(self) -> subprocess.Popen[bytes]:
        self.close()
        command = [sys.executable, "-m", "forerun.structured.trial"]
        # In a session of its own: Ctrl-C in a terminal is ours to hear, and closing the pipe ends the process.
        self._process = process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        tokenizer = self._tokenizer
        ids = range(tokenizer.vocab_size)
        vocabulary = (
            [tokenizer.token_bytes(i) for i in ids],
            [i for i in ids if tokenizer.is_special(i)],
            sorted(tokenizer.eos_token_ids) or [0],
        )
        if not self._send(process, msgspec.msgpack.encode(vocabulary)) or _receive(process, MAX_WAIT_S) is None:
            self.close()
            raise RequestError("structured_outputs is not served: llguidance cannot be used here", "structured_outputs")
        return process

    @staticmethod
    def _send(process: subprocess.Popen[bytes], content: bytes) -> bool:
        assert process.stdin is not None
        try:
            process.stdin.write(len(content).to_bytes(_LENGTH_BYTES, "big") + content)
            process.stdin.flush()
        except OSError:
            return False
        return True


def _too_slow(asked: StructuredOutputs) -> Verdict:
    key = f"structured_outputs.{asked.kind}"
    return Verdict(f"{key} takes too long to compile (at most {MAX_COMPILE_S} s): make it simpler", key)


def _receive(process: subprocess.Popen[bytes], most_s: float) -> bytes | None:
    """One message; None where the process died, or took more than so much processor time for it."""
    assert process.stdout is not None
    with DefaultSelector() as selector, contextlib.suppress(psutil.Error):
        selector.register(process.stdout, EVENT_READ)
        clock = psutil.Process(process.pid)
        most_s += sum(clock.cpu_times()[:2])
        deadline = time.monotonic() + MAX_WAIT_S
        while not selector.select(POLL_S):
            if sum(clock.cpu_times()[:2]) > most_s or time.monotonic() > deadline:
                return None
    head = process.stdout.read(_LENGTH_BYTES)  # what is answered is short, and written at once
    return process.stdout.read(int.from_bytes(head, "big")) if len(head) == _LENGTH_BYTES else None


def _limit(name: str, value: int) -> None:
    """Bound this process, where the system can."""
    with contextlib.suppress(ImportError, AttributeError, ValueError, OSError):
        import resource

        kind = getattr(resource, name)
        resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def _main() -> None:
    """The process: a vocabulary comes in, then one grammar after the other."""
    from forerun.structured.compiler import Compiler, Vocabulary

    _limit("RLIMIT_AS", MAX_BYTES)
    pipe_in, pipe_out = sys.stdin.buffer, sys.stdout.buffer

    def read() -> bytes:
        return pipe_in.read(int.from_bytes(pipe_in.read(_LENGTH_BYTES), "big"))

    def write(content: bytes) -> None:
        pipe_out.write(len(content).to_bytes(_LENGTH_BYTES, "big") + content)
        pipe_out.flush()

    kinds = tuple[list[bytes], list[int], list[int]]
    tokens, special_ids, eos_ids = msgspec.msgpack.decode(read(), type=kinds)
    # How a text is cut into tokens does not matter here
    vocabulary = Vocabulary(tokens, special_ids, eos_ids, lambda text: compiler.tokenizer.greedy_tokenize(text))
    compiler = Compiler(vocabulary)
    write(b"ready")
    while content := read():
        started = time.process_time()
        _limit("RLIMIT_CPU", int(started) + 10)  # should nobody be left to end it
        verdict = Verdict("")
        try:
            compiler.matcher(msgspec.msgpack.decode(content, type=StructuredOutputs))
        except RequestError as error:
            verdict = Verdict(str(error), error.param)
        except RecursionError:
            verdict = Verdict("structured_outputs is nested too deeply", "structured_outputs")
        verdict.seconds = time.process_time() - started
        write(msgspec.msgpack.encode(verdict))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _main()

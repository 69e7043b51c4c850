"""What an engine on a GPU does at start: measure its largest pass, size its caches, record its graphs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from forerun.attention import GPU_ROW_TILE, Segment
from forerun.attention.slots import BlockTables
from forerun.engine.config import SettledConfig
from forerun.errors import ConfigError
from forerun.kernels import cuda
from forerun.kernels.fused import PlainLinear
from forerun.memory.budget import GIB, GpuMemory, gpu_allowance, gpu_cache_bytes
from forerun.memory.passes import GRAPH_BYTES, LOGIT_BYTES, graph_shapes
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder, Tap, attention_spec
from forerun.models.loading import read_metadata
from forerun.models.paged import DTYPES, PagedModel, new_memory

CONTEXT_BYTES = 512 << 20  # of CUDA and its libraries, before anything is loaded
SEGMENT_ROWS = (16, 1024)  # of the sequences of the measured pass: what decodes, and prompts


def model_dtype(wanted: str, path: str) -> torch.dtype:
    """What a model computes in: as asked for; "auto": float16 where the checkpoint says so, else bfloat16."""
    if wanted != "auto":
        return DTYPES[wanted]
    metadata = read_metadata(path) if Path(path).is_dir() else {}
    stored = str(metadata.get("dtype") or metadata.get("torch_dtype")).removeprefix("torch.")
    return torch.float16 if stored == "float16" else torch.bfloat16


def check_kernels(config: SettledConfig) -> None:
    """Fail where settings need kernels that are not there.

    Raises:
        ConfigError: batch_invariant, without Triton.
    """
    if config.batch_invariant and not cuda.available():
        raise ConfigError("batch_invariant=True needs Triton on a GPU: install triton, or leave it out")


@torch.inference_mode()
def check_rows(model: Decoder) -> None:
    """Fail where the products of `batch_invariant` are not row-exact.

    Raises:
        ConfigError: this GPU adds up otherwise than those that we know.
    """
    if not model.invariant:
        return
    by_shape = {linear.shape: linear for linear in model.linears if isinstance(linear, PlainLinear)}
    for (num_columns, depth), linear in by_shape.items():
        if not cuda.product_ops().is_row_exact(linear.weight):
            raise ConfigError(
                f"batch_invariant=True cannot be kept on this GPU: with weights [{num_columns}, {depth}] a row has "
                "other bits in other company; leave it out"
            )


def check_budget(config: SettledConfig, device: torch.device) -> None:
    """Fail, before weights load, where more memory is asked for than is free.

    Raises:
        ConfigError: the GPU's memory is not as free as it must be.
    """
    free, total = torch.cuda.mem_get_info(device)
    if config.kv_cache_memory_bytes is not None:
        gpu_cache_bytes(config.kv_cache_memory_bytes, GpuMemory(total, free), None)
    else:
        gpu_allowance(GpuMemory(total, free), config.gpu_memory_utilization)


def cache_bytes(
    config: SettledConfig,
    model: Decoder,
    kv_dtype: torch.dtype,
    taps: Sequence[Tap],
    drafts: Sequence[tuple[int, int]] = (),
) -> int:
    """What is left for caches once weights are loaded.

    Args:
        drafts: `draft_shapes` that will be recorded.
    Raises:
        ConfigError: nothing is, or less than was asked for.
    """
    pass_bytes = _pass_bytes(config, model, kv_dtype, taps)
    free, total = torch.cuda.mem_get_info(model.device)
    graph_bytes = GRAPH_BYTES * num_graphs(config, model) + draft_graph_bytes(drafts, model.config)
    memory = GpuMemory(total, free, pass_bytes, graph_bytes)
    return gpu_cache_bytes(config.kv_cache_memory_bytes, memory, config.gpu_memory_utilization)


@torch.inference_mode()
def _pass_bytes(config: SettledConfig, model: Decoder, kv_dtype: torch.dtype, taps: Sequence[Tap]) -> int:
    """Memory that the largest pass takes: all rows of a step, logits where requests end."""
    spec = attention_spec(model.config, config.block_size)
    memory = new_memory(spec.shape.block_bytes(kv_dtype.itemsize), model.device)
    paged = PagedModel.over(model, memory, kv_dtype, config.block_size)
    segments = _measured_segments(config, model.config)
    num_logits = logit_rows(config)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    paged.logits(paged.forward(segments, taps), range(num_logits)).softmax(-1)
    peak = torch.cuda.max_memory_allocated(model.device) - before
    torch.cuda.empty_cache()
    return peak


def _measured_segments(config: SettledConfig, model: DecoderConfig) -> list[Segment]:
    """All rows of a step, half of them in short sequences and half in long ones, so that the kernels of both are
    compiled. All is written to one block: what they compute is of no interest."""
    num_rows, segments = config.max_num_batched_tokens, []
    longest = config.max_model_len or model.max_position_embeddings
    for rows, most in zip((num_rows // 2, num_rows - num_rows // 2), SEGMENT_ROWS, strict=True):
        length = min(most, longest)
        blocks = [0] * -(-length // config.block_size)
        segments += [Segment([0] * min(length, rows - i), 0, blocks) for i in range(0, rows, length)]
    return segments


def logit_rows(config: SettledConfig) -> int:
    """Most rows of a pass that get logits."""
    return min(config.max_num_batched_tokens, config.max_num_seqs * _rows_a_request(config)[-1])


def shapes_to_record(config: SettledConfig, model: DecoderConfig) -> list[tuple[int, int]]:
    """Of the passes that graphs are recorded for, where there is Triton."""
    if any(model.has_experts(layer) for layer in range(model.num_layers)):
        return []  # which experts run is decided on the host
    return graph_shapes(config.max_num_seqs, _rows_a_request(config), GPU_ROW_TILE)


def _rows_a_request(config: SettledConfig) -> tuple[int, ...]:
    """Rows that a request usually has in a step: one, and with drafts one more than their tokens."""
    spec = config.speculative_config
    return (1, 1 + spec.num_speculative_tokens) if spec else (1,)


def num_graphs(config: SettledConfig, model: Decoder) -> int:
    """Of the target's passes."""
    return len(shapes_to_record(config, model.config)) if model.device.type != "cpu" and cuda.available() else 0


def most_rows_a_request(config: SettledConfig) -> int:
    """In a step that decodes."""
    return max(_rows_a_request(config))


def draft_shapes(config: SettledConfig) -> list[tuple[int, int]]:
    """(requests, tokens of each) of the drafts that graphs are worth recording for: each K that there may be."""
    spec = config.speculative_config
    if spec is None or config.async_scheduling is False:
        return []
    table = spec.num_speculative_tokens_per_batch_size or ()
    lengths = {spec.num_speculative_tokens, *(length for _, _, length in table)} - {0}
    sizes = [num_seqs for num_seqs, _ in graph_shapes(config.max_num_seqs, (1,), GPU_ROW_TILE)]
    return list(itertools.product(sizes, sorted(lengths)))


def draft_graph_bytes(shapes: Sequence[tuple[int, int]], target: DecoderConfig) -> int:
    """Of their graphs, with the logits of the largest, which share their memory."""
    most = max((num_requests for num_requests, _ in shapes), default=0)
    return GRAPH_BYTES * len(shapes) + most * target.vocab_size * LOGIT_BYTES


class Recording:
    """What so many graphs take, recorded from here on."""

    def __init__(self, device: torch.device, num_graphs: int) -> None:
        self._device = device
        self._num_graphs = num_graphs
        self._started = time.perf_counter()
        self._free = self._free_bytes()

    def lines(self) -> list[str]:
        """For the log; [] where there is nothing to record."""
        free = self._free_bytes()  # waits
        seconds, gib = time.perf_counter() - self._started, (self._free - free) / GIB
        return [f"Graph capturing finished in {seconds:.0f} secs, took {gib:.2f} GiB"] if self._num_graphs else []

    def _free_bytes(self) -> int:
        if not self._num_graphs:
            return 0
        torch.cuda.synchronize(self._device)
        return torch.cuda.mem_get_info(self._device)[0]


def record(paged: PagedModel, config: SettledConfig, blocks: BlockTables, taps: Sequence[Tap]) -> PagedModel:
    """The model with graphs for its usual passes; as it is where it can have none."""
    model = paged.model
    if not isinstance(model, Decoder) or not num_graphs(config, model):
        return paged
    from forerun.attention.triton import TritonAttention
    from forerun.models.graphs import GraphedModel

    assert isinstance(paged.attention, TritonAttention)
    graphed = GraphedModel(model, paged.attention, paged.block_size)
    spec = config.speculative_config
    trees = spec is not None and any(method.spec_tree is not None for method in spec.methods)
    graphed.record(shapes_to_record(config, model.config), blocks, taps, trees=trees)
    return graphed


def warnings() -> list[str]:
    """What works, but not as well as one might expect."""
    if cuda.available():
        return []
    return ["Triton is not installed: the GPU runs on plain torch, several times slower; install triton"]

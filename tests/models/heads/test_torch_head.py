"""The definition in torch, which is fitted and compared with, is the one in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .definition import Definition, Row
from .test_networks import VARIANTS
from .tiny_heads import HIDDEN, VOCAB
from .torch_head import TorchHead


@pytest.mark.parametrize("name", VARIANTS)
def test_both_definitions_agree(name: str) -> None:
    """Of rows some of which share a position, as in a tree, on states of a target."""
    config, tensors = VARIANTS[name]
    generator = torch.Generator().manual_seed(6)
    embedding, output = (torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    head = TorchHead(tensors, config, embedding, output).double()
    arrays = {key: tensor.double().numpy() for key, tensor in tensors.items()}
    oracle = Definition(arrays, config, embedding.numpy(), output.numpy())
    num_states = len(config.get("eagle_aux_hidden_state_layer_ids", [0, 1, 2])) if head.is_eagle3 else 1
    states = torch.randn(7, num_states, HIDDEN, generator=generator, dtype=torch.float64)
    token_ids, positions = torch.randint(VOCAB, (7,), generator=generator), torch.tensor([0, 1, 2, 3, 4, 4, 5])
    sees = torch.ones(7, 7, dtype=torch.bool).tril()
    sees[5, 4] = sees[6, 4] = False  # the second of two siblings, and its child
    combined = head.combine(states)
    fed_back, logits = head.run(token_ids[None], combined[None], positions, sees[None, None])
    rows = [
        Row(
            int(token_ids[i]),
            oracle.combine(list(states[i].numpy())),
            int(positions[i]),
            sees[i].nonzero().flatten().tolist(),
        )
        for i in range(7)
    ]
    expected_fed_back, expected_logits = oracle.run(rows)
    assert np.allclose(fed_back[0].numpy(), np.stack(expected_fed_back), rtol=1e-9, atol=1e-9)
    assert np.allclose(logits[0].numpy(), np.stack(expected_logits), rtol=1e-9, atol=1e-9)

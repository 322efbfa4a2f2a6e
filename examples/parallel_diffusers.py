"""Context parallelism of diffusers: each rank has a part of the tokens of a video, here in a Wan with random weights.

torchrun --nproc-per-node 2 examples/parallel_diffusers.py

prints

    ulysses_degree=2, 4 sparse calls and 4 dense: density by rank 0.235, 0.366; equal to one process: True
    ring_degree=2, 4 sparse calls and 4 dense: density by rank 0.307, 0.293; equal to one process: True

For a pipeline, call pipe.transformer.enable_parallelism(config=...) and sparge.enable(pipe, policy), in either order.
"""

import torch
from diffusers import ContextParallelConfig, WanTransformer3DModel
from parallel import BACKEND, HAS_GPU, finish, report, start

import sparge

rank, ranks = start()
device = "cuda" if HAS_GPU else "cpu"
if not HAS_GPU:
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it
policy = sparge.Policy(topk=0.3, backend=BACKEND)


@torch.no_grad()
def split(**degrees: int) -> None:
    """Compare a forward pass on all ranks with a forward pass on this rank only."""
    torch.manual_seed(0)
    config = {"num_attention_heads": 2, "attention_head_dim": 64, "num_layers": 4, "ffn_dim": 128}
    model = WanTransformer3DModel(text_dim=32, in_channels=4, out_channels=4, **config).to(device).eval()
    inputs = {
        "hidden_states": torch.randn(1, 4, 3, 48, 64, device=device),  # 3 x 24 x 32 tokens in patches of 2 x 2
        "timestep": torch.tensor([500], device=device),
        "encoder_hidden_states": torch.randn(1, 64, 32, device=device),
    }
    sparge.enable(model, policy)
    (expected,) = model(**inputs, return_dict=False)
    model.enable_parallelism(config=ContextParallelConfig(**degrees))
    sparge.reset_stats()
    (output,) = model(**inputs, return_dict=False)
    stats = sparge.stats()
    names = ", ".join(f"{name}={degree}" for name, degree in degrees.items())
    report(f"{names}, {stats.sparse} sparse calls and {stats.dense} dense", output, expected)


split(ulysses_degree=ranks)
split(ring_degree=ranks)
finish()

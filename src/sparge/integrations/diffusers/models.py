"""The structure of diffusers' models: a table with one row per known class.

A model without a row is probed with two forward passes (`probe`). The tests check the table against probes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

Grid = Callable[[Any, dict[str, Any]], tuple[int, ...] | None]
"""Returns the sizes of the image or video whose tokens a model denoises, from its config and its arguments."""


@dataclass(frozen=True)
class Structure:
    """The structure of a model.

    Attributes:
        text: the positions of text tokens in the keys of joint attention; None if text uses cross-attention; "probe" if
            unknown.
        grid: returns the sizes of the image or video that the other tokens form; None if unknown.
        merged: lists of blocks whose attention gets text and image as one tensor.
        lists: the lists of blocks, in the order they run; None: all lists with attention.
    """

    text: Literal["first", "last", "probe"] | None
    grid: Grid | None = None
    merged: tuple[str, ...] = ()
    lists: tuple[str, ...] | None = None


def of_latents(config: Any, arguments: dict[str, Any]) -> tuple[int, ...]:
    """Return the grid of latents (B, C, T, H, W) or (B, C, H, W) in patches."""
    return _in_patches(config, arguments["hidden_states"].shape[2:])


def of_frames(config: Any, arguments: dict[str, Any]) -> tuple[int, ...]:
    """Return the grid of latents (B, T, C, H, W) in patches."""
    _, frames, _, height, width = arguments["hidden_states"].shape
    return _in_patches(config, (frames, height, width))


def of_channels_last(config: Any, arguments: dict[str, Any]) -> tuple[int, ...]:
    """Return the grid of latents (B, T, H, W, C) in patches."""
    return _in_patches(config, arguments["hidden_states"].shape[1:4])


def _in_patches(config: Any, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of patches (T, H, W) of latents with these sizes, T H W or H W."""
    patch = config.patch_size
    if isinstance(patch, int):
        patch = getattr(config, "patch_size_t", None) or 1, patch, patch
    patch = (1, *patch)[-3:]
    sizes = sizes if len(sizes) == 3 else (patch[0], *sizes)
    return tuple(size // part for size, part in zip(sizes, patch, strict=True))


def of_sizes(_: Any, arguments: dict[str, Any]) -> tuple[int, ...]:
    """Return the grid of latents that are passed as a sequence, with their sizes as arguments."""
    return arguments["num_frames"], arguments["height"], arguments["width"]


def of_shapes(_: Any, arguments: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the grid of latents that are passed as a sequence with a list of sizes; None for several images."""
    shapes = arguments["img_shapes"]
    while isinstance(shapes[0], (list, tuple)):
        if len(shapes) > 1 and not isinstance(shapes[0][0], (list, tuple)):
            return None
        shapes = shapes[0]
    return tuple(shapes)


def of_positions(_: Any, arguments: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the grid of latents that are passed as a sequence with the position of each token, (S, 3) or (B, S, 3).

    Return None in a compiled program, or if the positions are not one grid in raster order, for example because
    reference images are appended. Reading positions synchronizes with the device, so the grid is cached as an attribute
    of the tensor until the tensor is modified. Inference tensors do not record changes and are read in every call.
    """
    ids = arguments["img_ids"]
    if torch.compiler.is_compiling():
        return None
    known = getattr(ids, _GRID, None)
    version = None if ids.is_inference() else ids._version
    if known is None or version is None or known[0] != version:
        known = version, _grid_of_positions(ids)
        setattr(ids, _GRID, known)
    return known[1]


_GRID = "_sparge_grid"


def _grid_of_positions(ids: Tensor) -> tuple[int, ...] | None:
    positions = ids.reshape(-1, ids.shape[-2], ids.shape[-1])[0].cpu().long()
    first, last = positions.amin(0), positions.amax(0)
    sizes = (last - first + 1).tolist()
    if math.prod(sizes) != len(positions):
        return None
    index = positions.new_zeros(len(positions))
    for axis, size in enumerate(sizes):
        index = index * size + positions[:, axis] - first[axis]
    in_order = bool((index == index.new_tensor(range(len(positions)))).all())
    return tuple(size for size in sizes if size > 1) if in_order else None


SINGLE = ("single_transformer_blocks",)

KNOWN = {
    # text and image in one sequence, text first
    "BriaFiboTransformer2DModel": Structure("first", of_positions, SINGLE),
    "BriaTransformer2DModel": Structure("first", of_positions, SINGLE),
    "ChromaTransformer2DModel": Structure("first", of_positions, SINGLE),
    "CogVideoXTransformer3DModel": Structure("first", of_frames),
    "CogView3PlusTransformer2DModel": Structure("first", of_latents),
    "CogView4Transformer2DModel": Structure("first", of_latents),
    "ConsisIDTransformer3DModel": Structure("first", of_frames, lists=("transformer_blocks",)),
    "EasyAnimateTransformer3DModel": Structure("first", of_latents),
    "FluxTransformer2DModel": Structure("first", of_positions, SINGLE),
    "LongCatImageTransformer2DModel": Structure("first", of_positions, SINGLE),
    "OvisImageTransformer2DModel": Structure("first", of_positions, SINGLE),
    "PRXTransformer2DModel": Structure("first", of_latents),
    "QwenImageControlNetModel": Structure("first", of_shapes),
    "QwenImageTransformer2DModel": Structure("first", of_shapes),
    # text and image in one sequence, text last
    "HunyuanImageTransformer2DModel": Structure("last", of_latents, lists=("transformer_blocks", *SINGLE)),
    "HunyuanVideo15Transformer3DModel": Structure("last", of_latents, lists=("transformer_blocks",)),
    "HunyuanVideoTransformer3DModel": Structure("last", of_latents, lists=("transformer_blocks", *SINGLE)),
    "JoyImageEditPlusTransformer3DModel": Structure("last"),
    "JoyImageEditTransformer3DModel": Structure("last", of_latents),
    "MochiTransformer3DModel": Structure("last", of_latents, lists=("transformer_blocks",)),
    "NucleusMoEImageTransformer2DModel": Structure("last", of_shapes),
    "SD3ControlNetModel": Structure("last", of_latents),
    "SD3Transformer2DModel": Structure("last", of_latents),
    # text in cross-attention
    "AceStepTransformer1DModel": Structure(None),
    "AllegroTransformer3DModel": Structure(None, of_latents),
    "AnyFlowTransformer3DModel": Structure(None, of_frames),
    "ChronoEditTransformer3DModel": Structure(None, of_latents),
    "ControlNetModel": Structure(None),
    "ControlNetUnionModel": Structure(None),
    "CosmosTransformer3DModel": Structure(None, of_latents),
    "HunyuanDiT2DControlNetModel": Structure(None, of_latents, lists=("blocks",)),
    "HunyuanDiT2DModel": Structure(None, of_latents, lists=("blocks",)),
    "I2VGenXLUNet": Structure(None),
    "Kandinsky5Transformer3DModel": Structure(None, of_channels_last, lists=("visual_transformer_blocks",)),
    "Kandinsky6Transformer3DModel": Structure(None, of_channels_last, lists=("visual_transformer_blocks",)),
    "LTX2VideoTransformer3DModel": Structure(None, of_sizes),
    "LTXVideoTransformer3DModel": Structure(None, of_sizes),
    "LatteTransformer3DModel": Structure(None),
    "LongCatAudioDiTTransformer": Structure(None),
    "PixArtTransformer2DModel": Structure(None, of_latents),
    "SanaVideoTransformer3DModel": Structure(None, of_latents),
    "SkyReelsV2Transformer3DModel": Structure(None, of_latents),
    "UNet2DConditionModel": Structure(None),
    "UNet3DConditionModel": Structure(None),
    "WanAnimate2Transformer3DModel": Structure(None, of_latents),
    "WanAnimateTransformer3DModel": Structure(None, of_latents),
    "WanTransformer3DModel": Structure(None, of_latents),
    "WanVACETransformer3DModel": Structure(None, of_latents),
}

GRIDS: tuple[Grid, ...] = (of_sizes, of_shapes, of_positions, of_latents)
"""Grid functions that are tried in this order for a model without a row."""


def any_grid(config: Any, arguments: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the result of the first grid function that returns one.

    Each attention call checks that the grid has as many positions as tokens.
    """
    grids = (grid_of(function, config, arguments) for function in GRIDS)
    return next((grid for grid in grids if grid is not None), None)


def grid_of(function: Grid | None, config: Any, arguments: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the result of a grid function; None if the arguments contain no grid."""
    if function is None:
        return None
    try:
        grid = function(config, arguments)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None
    is_grid = grid is not None and 1 <= len(grid) <= 3 and all(isinstance(size, int) and size > 0 for size in grid)
    return grid if is_grid else None


def structure_of(model: nn.Module) -> Structure:
    """Return the row of a model's class or of a base class, else a row that makes `inputs` probe the model."""
    rows = (KNOWN[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in KNOWN)
    return next(rows, Structure("probe", any_grid))


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return all blocks with attention and their names: members of lists, and attention modules outside of them."""
    lists = structure_of(model).lists
    if lists is None:
        return list(_outermost(model, ""))
    return [
        (f"{name}.{index}", block)
        for name in lists
        for index, block in enumerate(cast(nn.ModuleList, model.get_submodule(name)))
    ]


def _outermost(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield members of the outermost lists, and attention modules outside of them."""
    for part, child in module.named_children():
        full = f"{name}.{part}" if name else part
        if not any(map(is_attention, child.modules())):
            continue
        if is_attention(child) or isinstance(module, nn.ModuleList):
            yield full, child
        else:
            yield from _outermost(child, full)


def attentions(model: nn.Module) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield attention modules with the index of their block and their full name, without torch.compile's wrappers."""
    for index, (block_name, block) in enumerate(blocks_of(model)):
        for name, module in block.named_modules():
            if is_attention(module):
                full_name = f"{block_name}.{name}" if name else block_name
                yield index, full_name.replace("._orig_mod", ""), module


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is an attention module.

    It is one if it has a processor, or if its class is named like one. It contains no other attention module: the
    wrapper of torch.compile also has the attributes of the module in it.
    """
    parts = [part for part in module.modules() if part is not module]
    if any(hasattr(part, "processor") for part in parts):
        return False
    return hasattr(module, "processor") or (_is_named(module) and not any(map(_is_named, parts)))


def _is_named(module: nn.Module) -> bool:
    kind = type(module).__name__
    return "Attention" in kind or "Attn" in kind

"""transformers over packed sequences: documents by keywords or position_ids, Llama 4's chunks, vision encoders' frames.

The expected outputs come from a loop over the documents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_transformers import ALL_BLOCKS, SIZES, SPARSE, llama, mistral, tokens
from torch import Tensor, nn
from transformers import Llama4ForCausalLM, Llama4TextConfig
from transformers.masking_utils import and_masks, causal_mask_function, chunked_causal_mask_function
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

import sparge
from conftest import assert_equal_to_rounding, exact_attention, watch_attention
from sparge import Policy
from sparge.integrations import layers
from sparge.integrations.transformers import attention, masks, packing

pytestmark = pytest.mark.timeout(240)

DOCUMENTS = [150, 150, 90, 1, 129]
CALLS = 3 * 4  # layers, runs of documents of equal lengths
DENSE = Policy(min_tokens=10**6)


without_gradients = pytest.mark.usefixtures("no_gradients")


def packed_inputs() -> tuple[Tensor, dict[str, Any]]:
    """Return token ids (1, S), and the keyword arguments with the bounds of the documents."""
    bounds = torch.tensor([0, *DOCUMENTS]).cumsum(0).int()
    longest = max(DOCUMENTS)
    packed_args = {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    return tokens(1, sum(DOCUMENTS)), packed_args


POSITIONS = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]


def logits_per_document(model: Any, ids: Tensor) -> Tensor:
    return torch.cat([model(document).logits for document in ids.split(DOCUMENTS, 1)], 1)


@pytest.mark.parametrize(
    ("uses_cache", "has_keywords"),
    [(True, True), (False, True), (False, False)],
    ids=["keywords", "keywords_and_mask", "mask"],
)
class TestDocuments:
    """With a cache there is no mask, only keywords. Without a cache there is a block-diagonal mask."""

    @pytest.mark.parametrize(
        ("policy", "sparse"),
        [
            (SPARSE, CALLS - 3),  # a document of one token counts as decoding
            (Policy(topk=1.0, backend="torch", dense_layers=(1,)), 6),
            (Policy(topk=1.0, backend="torch", min_tokens=120), 6),
            (DENSE, 0),
        ],
        ids=["sparse", "dense_layer", "short_documents_dense", "dense"],
    )
    @without_gradients
    def test_matches_loop_over_documents(
        self, policy: Policy, sparse: int, uses_cache: bool, has_keywords: bool
    ) -> None:
        model, (ids, packed_args) = llama(), packed_inputs()
        sparge.enable(model, policy)
        expected = logits_per_document(model, ids)
        sparge.reset_stats()
        got = model(ids, position_ids=POSITIONS, use_cache=uses_cache, **(packed_args if has_keywords else {})).logits
        stats = sparge.stats()
        assert (stats.sparse, stats.calls) == (sparse, CALLS)
        assert_equal_to_rounding(got, expected)

    def test_training_runs_dense_and_within_documents(self, uses_cache: bool, has_keywords: bool) -> None:
        model, (ids, packed_args) = llama(), packed_inputs()
        logits_per_document(model, ids).square().sum().backward()
        weight = model.model.layers[0].self_attn.k_proj.weight
        expected, weight.grad = weight.grad, None
        sparge.enable(model, Policy(backend="torch", on_unsupported="dense"))
        keywords = packed_args if has_keywords else {}
        model(ids, position_ids=POSITIONS, use_cache=uses_cache, **keywords).logits.square().sum().backward()
        assert sparge.stats().sparse == 0
        torch.testing.assert_close(weight.grad, expected, atol=float(1e-5 * expected.abs().max()), rtol=0)

    @without_gradients
    def test_sliding_windows(self, uses_cache: bool, has_keywords: bool) -> None:
        """A sliding-window mask applies in addition to the keywords."""
        model, (ids, packed_args) = mistral(), packed_inputs()
        expected = logits_per_document(model, ids)
        sparge.enable(model, ALL_BLOCKS)
        got = model(ids, position_ids=POSITIONS, use_cache=uses_cache, **(packed_args if has_keywords else {})).logits
        assert sparge.stats().sparse
        assert_equal_to_rounding(got, expected)


@without_gradients
def test_documents_reach_kernels_with_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cache, the mask only expresses the sliding window and is not read."""
    model, (ids, packed_args) = mistral(), packed_inputs()
    sparge.enable(model, ALL_BLOCKS)
    seen = []

    def note(*tensors: Any, window: Any = None, **_: Any) -> None:
        seen.append((tensors[0].shape[0], tensors[3] if len(tensors) > 3 else None, window))

    watch_attention(monkeypatch, note)
    model(ids, position_ids=POSITIONS, **packed_args)
    assert set(seen) == {(2, None, (99, 0)), (1, None, (99, 0))}


@without_gradients
def test_separately_compiled_layers() -> None:
    model, (ids, _) = llama(), packed_inputs()
    sparge.enable(model, ALL_BLOCKS)
    expected = model(ids, position_ids=POSITIONS, use_cache=False).logits
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="eager")
    assert_equal_to_rounding(model(ids, position_ids=POSITIONS, use_cache=False).logits, expected)


@without_gradients
class TestMasks:
    def test_dense_calls_are_bitwise_stock(self) -> None:
        model, (ids, _) = llama(), packed_inputs()
        expected = model(ids, position_ids=POSITIONS, use_cache=False).logits
        sparge.enable(model, DENSE)
        assert torch.equal(model(ids, position_ids=POSITIONS, use_cache=False).logits, expected)

    def test_kernels_get_no_mask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []

        def note(*tensors: Any, **_: Any) -> None:
            seen.append((tensors[0].shape[0], tensors[3] if len(tensors) > 3 else None))

        watch_attention(monkeypatch, note)
        model, (ids, _) = llama(), packed_inputs()
        sparge.enable(model, ALL_BLOCKS)
        model(ids, position_ids=POSITIONS, use_cache=False)
        assert seen == [(2, None), (1, None), (1, None)] * 3

    def test_edited_mask_is_not_recognized(self) -> None:
        bounds = chunked_causal_mask_function(100, torch.zeros(1, dtype=torch.long))
        made = masks.make_mask(1, 300, 300, mask_function=bounds, allow_is_causal_skip=False)
        assert made is not None
        query = torch.zeros(1, 2, 300, 16)
        assert packing.pack_of(query, query, made, True, {}) is not None
        assert packing.pack_of(query, query, made, False, {}) is None
        made[..., 0] = True
        assert packing.pack_of(query, query, made, True, {}) is None

    @pytest.mark.parametrize(
        ("q_length", "kv_length", "q_offset", "kv_offset", "expected"),
        [
            (250, 250, 0, 0, ([0, 100, 200, 250], [0, 100, 200, 250])),
            (70, 250, 180, 0, ([0, 0, 20, 70], [0, 100, 200, 250])),
            (70, 100, 180, 150, ([0, 0, 20, 70], [0, 0, 50, 100])),
            (70, 250, 100, 0, None),  # a static cache with free space at the end
        ],
    )
    def test_bounds_of_chunked_masks(
        self, q_length: int, kv_length: int, q_offset: int, kv_offset: int, expected: Any
    ) -> None:
        chunks = chunked_causal_mask_function(100, torch.zeros(2, dtype=torch.long))
        sizes = (2, q_length, kv_length, q_offset, kv_offset)
        found = masks.bounds_of_mask(*sizes, chunks, None)
        assert found == expected
        if found is not None:
            full = masks.make_mask(*sizes, mask_function=chunks, allow_is_causal_skip=False)
            assert full is not None
            within = torch.zeros(q_length, kv_length, dtype=torch.bool)
            for q_start, q_stop, k_start, k_stop in zip(found[0], found[0][1:], found[1], found[1][1:], strict=False):
                rows, columns = q_stop - q_start, k_stop - k_start
                within[q_start:q_stop, k_start:k_stop] = torch.ones(rows, columns, dtype=torch.bool).tril(
                    columns - rows
                )
            assert torch.equal(full, within.expand_as(full))

    def test_other_masks_are_not_recognized_as_packed(self) -> None:
        padded = torch.tensor([0, 3])
        for function in (
            causal_mask_function,
            chunked_causal_mask_function(100, padded),
            and_masks(causal_mask_function, lambda *_: torch.ones((), dtype=torch.bool)),
            and_masks(chunked_causal_mask_function(100, torch.zeros(2)), causal_mask_function),
        ):
            assert masks.bounds_of_mask(2, 250, 250, 0, 0, function, None) is None
        chunks = chunked_causal_mask_function(100, torch.zeros(2))
        assert masks.bounds_of_mask(2, 250, 250, 0, 0, chunks, torch.arange(250)[None] < 240) is None


class TestKeywords:
    @pytest.mark.parametrize("policy", [ALL_BLOCKS, DENSE], ids=["sparse", "dense"])
    def test_segments_of_unequal_lengths(self, policy: Policy) -> None:
        """Queries align with the end of their segment's keys; a segment may have no queries, no keys, or fewer keys."""
        lengths = [(100, 300), (100, 300), (70, 70), (0, 30), (20, 0), (90, 40)]
        bounds = [torch.tensor([0, *side]).cumsum(0) for side in zip(*lengths, strict=True)]
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(1, 4, int(bounds[0][-1]), 16, generator=generator)
        key, value = (torch.randn(1, 2, int(bounds[1][-1]), 16, generator=generator) for _ in range(2))
        module = attention_module(policy)
        packed_args = dict(zip(packing.KEYWORDS, (*bounds, 100, 300), strict=True))
        output, _ = attention.attention_forward(module, query, key, value, None, **packed_args)
        assert sparge.stats().layers["layer"].reasons["dense: nothing to see"] == 1
        assert sparge.stats().sparse == (0 if policy is DENSE else 3)
        for q_start, q_stop, k_start, k_stop in zip(bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False):
            segment = (query[:, :, q_start:q_stop], key[:, :, k_start:k_stop], value[:, :, k_start:k_stop])
            expected = exact_attention(*segment, is_causal=True)[0].transpose(1, 2)
            torch.testing.assert_close(output[:, q_start:q_stop].double(), expected, atol=1e-5, rtol=0)

    @without_gradients
    def test_bounds_that_do_not_fit_raise(self) -> None:
        model, (ids, packed_args) = llama(), packed_inputs()
        sparge.enable(model, ALL_BLOCKS)
        with pytest.raises(ValueError, match="cu_seqlens_q: expected bounds from 0 to the 500 tokens of q"):
            model(ids[:, :500], position_ids=POSITIONS[:, :500], **packed_args)

    @without_gradients
    def test_compiled(self) -> None:
        """Without a mask, reading the bounds causes a graph break; a full mask makes the bounds unnecessary."""
        torch._dynamo.reset()
        module, (_, packed_args) = attention_module(ALL_BLOCKS), packed_inputs()
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(1, 4, sum(DOCUMENTS), 16, generator=generator)
        key, value = (torch.randn(1, 2, sum(DOCUMENTS), 16, generator=generator) for _ in range(2))
        expected, _ = attention.attention_forward(module, query, key, value, None, **packed_args)
        compiled = torch.compile(attention.attention_forward, backend="eager")
        document = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))
        mask = (document[:, None] == document).tril()[None, None]
        for given in (None, mask):
            sparge.reset_stats()
            got, _ = compiled(module, query, key, value, given, **packed_args)
            assert sparge.stats().sparse
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def attention_module(policy: Policy) -> nn.Module:
    """Return an enabled module with two query heads per key head."""
    attention.register_functions()
    module = nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    setattr(module, attention.LAYER, layers.Layer("layer", policy))
    return module


def llama4() -> Any:
    torch.manual_seed(0)
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
    sizes = {**SIZES, "intermediate_size_mlp": 64, "attention_chunk_size": 150, "no_rope_layer_interval": 3}
    return Llama4ForCausalLM(Llama4TextConfig(**sizes, **experts)).eval()


@without_gradients
class TestChunkedAttention:
    """Llama 4: two layers attend within chunks of 150 tokens, the third to all tokens."""

    def test_prefill(self) -> None:
        model, ids = llama4(), tokens(2, 400)
        expected = model(ids).logits
        sparge.enable(model, ALL_BLOCKS)
        got = model(ids).logits
        assert [layer.sparse for layer in sparge.stats().layers.values()] == [2, 2, 1]
        assert_equal_to_rounding(got, expected)

    def test_padding(self) -> None:
        model, ids = llama4(), tokens(2, 400)
        mask = torch.ones_like(ids)
        mask[0, :37] = 0
        expected = model(ids, attention_mask=mask).logits
        sparge.enable(model, ALL_BLOCKS)
        assert_equal_to_rounding(model(ids, attention_mask=mask).logits[mask.bool()], expected[mask.bool()])

    def test_prefill_in_pieces_and_decoding(self) -> None:
        model, ids = llama4(), tokens(1, 400)
        call: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "prefill_chunk_size": 130}
        call |= {"output_logits": True, "return_dict_in_generate": True}
        expected = model.generate(ids, **call)
        sparge.enable(model, ALL_BLOCKS)
        got = model.generate(ids, **call)
        assert sparge.stats().reasons.keys() == {"sparse: torch", "dense: decode"}
        assert_equal_to_rounding(torch.stack(got.logits), torch.stack(expected.logits))


def qwen2_vl() -> Any:
    sizes = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    return Qwen2VisionTransformerPretrainedModel(Qwen2VLVisionConfig(**sizes))


SHARED = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 32}


def qwen2_5_vl() -> Any:
    windows = {"window_size": 32, "fullatt_block_indexes": [1]}
    return Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(**SHARED, **windows, patch_size=4))


def qwen3_vl() -> Any:
    places = {"num_position_embeddings": 256, "deepstack_visual_indexes": [0]}
    return Qwen3VLVisionModel(Qwen3VLVisionConfig(**SHARED, **places, patch_size=4))


@pytest.mark.parametrize(
    ("build", "segments"),
    [(qwen2_vl, [3, 3]), (qwen2_5_vl, [10, 3]), (qwen3_vl, [3, 3])],
    ids=["qwen2", "qwen2.5", "qwen3"],
)
@without_gradients
def test_vision_encoders_call_attention_once_per_segment(build: Callable[[], Any], segments: list[int]) -> None:
    """The input is a clip of two frames and an image; the first layer of Qwen2.5-VL attends within windows."""
    torch.manual_seed(0)
    model = build().eval()
    grid = torch.tensor([[2, 16, 16], [1, 8, 12]])
    patches = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
    expected = model(patches, grid_thw=grid).last_hidden_state
    sparge.enable(model, Policy(topk=1.0, backend="torch", on_unsupported="raise", min_tokens=100))
    got = model(patches, grid_thw=grid).last_hidden_state
    assert_equal_to_rounding(got, expected)
    layers = list(sparge.stats().layers.values())
    assert [layer.calls for layer in layers] == segments
    assert [layer.reasons for layer in layers][1] == {"sparse: torch": 2, "dense: fewer than min_tokens": 1}

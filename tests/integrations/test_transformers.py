"""transformers: stock logits with all blocks kept, sparse prefill, dense decoding, restored bitwise by `disable`."""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartModel,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    SamConfig,
    SamModel,
    SamVisionModel,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
    TextGenerationPipeline,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

import sparge
from conftest import assert_equal_to_rounding, watch_attention
from sparge import Policy, TopK
from sparge.integrations import calls

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("no_gradients")]

ALL_BLOCKS = Policy(topk=1.0, backend="torch", on_unsupported="raise")
SPARSE = Policy(sparsity=TopK(0.3, min_blocks=1), backend="torch")
SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
LENGTH, PADDED = 400, 90


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **options)).eval()


def mistral() -> Any:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=100)).eval()


def tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(1, 99, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(side: str) -> Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, slice(0, PADDED) if side == "left" else slice(LENGTH - PADDED, None)] = 0
    return mask


@pytest.mark.parametrize("build", [llama, mistral], ids=["llama", "mistral"])
class TestAllBlocksMatchStock:
    def test_prefill(self, build: Callable[[], Any]) -> None:
        model, ids = build(), tokens()
        expected = model(ids).logits
        sparge.enable(model, ALL_BLOCKS)
        got = model(ids).logits
        assert sparge.stats().reasons == {"sparse: torch": 3}
        assert_equal_to_rounding(got, expected)

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padded_prefill(self, build: Callable[[], Any], side: str) -> None:
        model, ids, mask = build(), tokens(), padding(side)
        expected = model(ids, attention_mask=mask).logits
        sparge.enable(model, ALL_BLOCKS)
        got = model(ids, attention_mask=mask).logits
        assert sparge.stats().dense == 0
        assert_equal_to_rounding(got[mask.bool()], expected[mask.bool()])
        plain = model(ids).logits
        assert not torch.allclose(plain[0, PADDED:], expected[0, PADDED:], atol=1e-3) or side == "right"

    @pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 130}, {"cache_implementation": "static"}], ids=str)
    def test_generate(self, build: Callable[[], Any], options: dict[str, Any]) -> None:
        model, ids, mask = build(), tokens(), padding("left")
        call = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "disable_compile": True, **options}
        expected = model.generate(ids, **call, output_logits=True, return_dict_in_generate=True)
        sparge.enable(model, ALL_BLOCKS)
        got = model.generate(ids, **call, output_logits=True, return_dict_in_generate=True)
        assert torch.equal(got.sequences, expected.sequences)
        assert_equal_to_rounding(torch.stack(got.logits), torch.stack(expected.logits))
        reasons = sparge.stats().reasons
        assert reasons["dense: decode"] == 3 * 5
        assert set(reasons) == {"dense: decode", "sparse: torch"}


@pytest.mark.parametrize("build", [llama, mistral], ids=["llama", "mistral"])
class TestLeftPadding:
    """A left-padded prompt gives the result of the unpadded prompt: blocks start at its first token."""

    @pytest.mark.parametrize("length", [1, 37, 64, 100, 128])
    def test_equals_the_unpadded_prompt(self, build: Callable[[], Any], length: int) -> None:
        model, ids = build(), tokens(1)
        positions = torch.arange(LENGTH)[None]
        sparge.enable(model, SPARSE)
        expected = model(ids, position_ids=positions).logits
        mask = torch.ones(1, LENGTH + length, dtype=torch.long)
        mask[:, :length] = 0
        padded = torch.nn.functional.pad(ids, (length, 0))
        got = model(padded, attention_mask=mask, position_ids=torch.nn.functional.pad(positions, (length, 0))).logits
        assert_equal_to_rounding(got[:, length:], expected)
        assert sparge.stats().reasons == {"sparse: torch": 6}

    def test_batch_of_prompts(self, build: Callable[[], Any]) -> None:
        model, ids, mask = build(), tokens(), padding("left")
        sparge.enable(model, SPARSE)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        got = model(ids, attention_mask=mask, position_ids=positions).logits
        assert_equal_to_rounding(got[0, PADDED:], model(ids[:1, PADDED:]).logits[0])
        assert_equal_to_rounding(got[1], model(ids[1:]).logits[0])


def test_chunk_after_a_prefix() -> None:
    model, ids = llama(), tokens(1)
    expected = model(ids).logits[:, 250:]
    sparge.enable(model, ALL_BLOCKS)
    past = model(ids[:, :250]).past_key_values
    got = model(ids[:, 250:], past_key_values=past).logits
    assert sparge.stats().reasons == {"sparse: torch": 6}
    assert_equal_to_rounding(got, expected)


def test_chunks_and_padding_need_no_full_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels get `is_causal` and ranges of keys, never a full (S_q x S_k) mask."""
    seen = []
    watch_attention(monkeypatch, lambda *args, **_: seen.append(None if len(args) < 4 else args[3]))
    model, ids = llama(), tokens()
    sparge.enable(model, ALL_BLOCKS)
    past = model(ids[:, :250], attention_mask=padding("left")[:, :250]).past_key_values
    model(ids[:, 250:], attention_mask=padding("left"), past_key_values=past)
    assert seen == [None] * len(seen)
    assert len(seen) == 3 * 2 + 3 * 2, "one call for each sequence, as their padding differs"


def test_empty_static_cache() -> None:
    model, ids = llama(), tokens(1)
    expected = model(ids).logits
    sparge.enable(model, ALL_BLOCKS)
    cache = StaticCache(model.config, max_cache_len=LENGTH + 77)
    got = model(ids, past_key_values=cache).logits
    assert sparge.stats().reasons == {"sparse: torch": 3}
    assert_equal_to_rounding(got, expected)


def test_second_chunk_into_a_static_cache() -> None:
    """Cache slots after the queries are empty: the mask is causal, but not aligned with the last key."""
    model, ids = llama(), tokens(1)
    expected = model(ids).logits[:, 250:]
    sparge.enable(model, ALL_BLOCKS)
    cache = StaticCache(model.config, max_cache_len=LENGTH + 77)
    model(ids[:, :250], past_key_values=cache)
    assert_equal_to_rounding(model(ids[:, 250:], past_key_values=cache).logits, expected)
    assert sparge.stats().reasons == {"sparse: torch": 6}


def test_other_attention_set_after_enable_warns() -> None:
    model, ids = llama(), tokens(1)
    expected = model(ids).logits
    sparge.enable(model, SPARSE)
    model(ids)
    model.set_attn_implementation("eager")
    for warns in (True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(ids)
        message = "the attention of LlamaForCausalLM was set to 'eager' after sparge.enable, so nothing runs sparse"
        assert [message in str(warning.message) for warning in caught] == [True] * warns
    sparge.enable(model, SPARSE)
    sparge.reset_stats()
    copy.deepcopy(model)(ids)
    assert sparge.stats().sparse == 3
    model.set_attn_implementation("sdpa")
    with pytest.warns(UserWarning, match="was set to 'sdpa'"):
        assert torch.equal(model(ids).logits, expected)
    sparge.disable(model)
    assert not model._forward_pre_hooks


def test_other_model_with_the_same_config_stays_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparge.integrations.transformers.attention._registered", {})
    model, ids = llama(), tokens(1)
    other = LlamaForCausalLM(model.config).eval()
    expected = other(ids).logits
    sparge.enable(model, SPARSE)
    assert torch.equal(other(ids).logits, expected)
    assert sparge.stats().calls == 0


def test_enabling_a_model_and_its_part_raises() -> None:
    model = llama()
    sparge.enable(model.model, SPARSE)
    with pytest.raises(ValueError, match="neither contains an enabled model nor is part of one"):
        sparge.enable(model, SPARSE)
    sparge.disable(model.model)
    sparge.enable(model, SPARSE)
    with pytest.raises(ValueError, match="neither contains an enabled model nor is part of one"):
        sparge.enable(model.model, SPARSE)
    sparge.disable(model)
    assert model.config._attn_implementation == "sdpa"


def test_layer_numbers_count_within_each_module_list() -> None:
    """The encoder has 3 layers without layer_idx, the decoder has 2; cross-attention is always dense."""
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=99, d_model=32, encoder_layers=3, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=512,
    )  # fmt: skip
    model, ids = BartModel(config).eval(), tokens(1, 200)
    sparge.enable(model, Policy(topk=1.0, backend="torch", dense_layers=(-1,)))
    model(input_ids=ids, decoder_input_ids=ids)
    reasons = {name: list(layer.reasons) for name, layer in sparge.stats().layers.items()}
    assert {name for name, found in reasons.items() if found == ["dense: dense layer"]} == {
        "encoder.layers.2.self_attn",
        "decoder.layers.1.self_attn",
    }
    assert {name for name, found in reasons.items() if found == ["dense: cross-attention"]} == {
        "decoder.layers.0.encoder_attn",
        "decoder.layers.1.encoder_attn",
    }
    sparge.enable(model, Policy(dense_layers=(2, -3)))
    for wrong in ((7,), (0, 3), (-4, 1)):
        with pytest.raises(ValueError, match=r"dense_layers: expected layers below 3 \(or from -3 on\), got (7|3|-4)$"):
            sparge.enable(model, Policy(dense_layers=wrong))
    assert model.config._attn_implementation == "sparge", "a failed call changes nothing"
    sparge.disable(model)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("edited", ["the mask", "the input it was made from"])
def test_edited_masks_are_read_again(mode: Any, edited: str) -> None:
    """The cached parts of a mask are dropped when the mask is modified."""
    model, ids = llama(), tokens()

    def edit(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        if edited == "the mask":
            kwargs["attention_mask"][:, :, 300:, 100:200] = False
        else:
            visible[:] = False

    visible = padding("left").bool()
    hook = model.model.layers[1].register_forward_pre_hook(edit, with_kwargs=True)
    with mode():
        expected = model(ids, attention_mask=visible).logits
        hook.remove()
        visible = padding("left").bool()
        stock = model(ids, attention_mask=visible).logits
        assert torch.allclose(stock[0, -1], expected[0, -1], atol=1e-4) == (edited != "the mask")
        model.model.layers[1].register_forward_pre_hook(edit, with_kwargs=True)
        sparge.enable(model, ALL_BLOCKS)
        got = model(ids, attention_mask=visible).logits
    shown = padding("left").bool()
    assert sparge.stats().dense == 0
    assert_equal_to_rounding(got[shown], expected[shown])


def test_padding_is_read_once_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparge.integrations import padding as padding_module

    reads = []
    read = padding_module._read
    monkeypatch.setattr(padding_module, "_read", lambda visible: reads.append(1) or read(visible))
    model = llama()
    sparge.enable(model, ALL_BLOCKS)
    with torch.inference_mode():
        model(tokens(), attention_mask=padding("left"))
    assert sparge.stats().dense == 0
    assert len(reads) == 1, "one read for all layers: on a GPU, every read synchronizes"


def test_reentrant_checkpoints_train_as_stock() -> None:
    model, ids = llama().train(), tokens(1)
    grads = []
    for enabled in (False, True):
        if enabled:
            sparge.enable(model, Policy(sparsity=SPARSE.selection, backend="torch", on_unsupported="dense"))
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
        model.zero_grad()
        with torch.enable_grad():
            model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    assert torch.equal(*grads)
    assert sparge.stats().sparse == 0
    assert sparge.stats().dense == 6


class TestCustomAttention:
    """SAM's image encoder, loaded as "eager", computes softmax itself; its small decoder uses the interface."""

    def build(self) -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 32}
        image = {"image_size": 32, "patch_size": 4, "num_pos_feats": 16, "output_channels": 32}
        config = SamConfig(
            vision_config={**sizes, **image, "window_size": 0, "global_attn_indexes": [0, 1]},
            mask_decoder_config={**sizes, "num_hidden_layers": 1, "iou_head_hidden_dim": 32},
            prompt_encoder_config={"hidden_size": 32, "image_size": 32, "patch_size": 4},
        )
        config._attn_implementation = "eager"
        return SamModel(config).eval()

    def inputs(self) -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(1, 3, 32, 32), "input_points": torch.zeros(1, 1, 1, 2)}

    def test_custom_attention_in_a_part_of_the_model(self) -> None:
        model = self.build()
        names = [sorted(vars(module)) for module in model.modules()]
        hooks = [len(module._forward_hooks) for module in model.modules()]
        with pytest.warns(UserWarning, match=r"implementation in SamVisionAttention .*implementation='sdpa'"):
            sparge.enable(model, Policy(backend="torch"))
        model(**self.inputs())
        layers = sparge.stats().layers
        for index in range(2):
            assert layers[f"vision_encoder.layers.{index}.attn"].reasons == {"dense: the model's own attention": 1}
        assert layers["mask_decoder.transformer.layers.0.self_attn"].reasons == {"sparse: torch": 1}
        sparge.disable(model)
        assert [sorted(vars(module)) for module in model.modules()] == names
        assert [len(module._forward_hooks) for module in model.modules()] == hooks
        with pytest.raises(NotImplementedError, match="implementation in SamVisionAttention"):
            sparge.enable(model, ALL_BLOCKS)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sparge.enable(model, Policy(on_unsupported="dense"))

    @pytest.mark.parametrize("on_unsupported", ["raise", "warn", "dense"])
    def test_custom_attention_in_the_whole_model(self, on_unsupported: Any) -> None:
        model = SamVisionModel(self.build().config.vision_config)
        with pytest.raises(NotImplementedError, match=r"SamVisionModel: expected modules that call transformers'"):
            sparge.enable(model, Policy(on_unsupported=on_unsupported))
        assert model.config._attn_implementation == "eager"


def test_scope_around_an_enabled_model_has_no_effect() -> None:
    model, ids = llama(), tokens(1)
    expected = model(ids).logits
    sparge.enable(model, Policy(backend="torch", dense_layers=(0, 1, 2)))
    with sparge.replace_sdpa(SPARSE):
        assert torch.equal(model(ids).logits, expected)
    assert sparge.stats().reasons == {"dense: dense layer": 3}


def test_causal_with_more_queries_than_keys_runs_dense() -> None:
    from sparge.integrations.transformers.attention import attention_forward

    sparge.register(Policy(topk=1.0, backend="torch", self_attention_only=False, on_unsupported="dense"))
    query, key = torch.randn(1, 2, 300, 16), torch.randn(1, 2, 200, 16)
    got, _ = attention_forward(torch.nn.Module(), query, key, key, None)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True)
    assert torch.equal(got, expected.transpose(1, 2))


def test_custom_mask_replaces_causality() -> None:
    """A 4-D mask may make future keys visible in a causal module."""
    model, ids = llama(), tokens(1)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[:50, :50] = True
    expected = model(ids, attention_mask=mask[None, None]).logits
    sparge.enable(model, ALL_BLOCKS)
    got = model(ids, attention_mask=mask[None, None]).logits
    assert sparge.stats().dense == 0
    assert_equal_to_rounding(got, expected)


def test_sparse_prefill() -> None:
    model, ids = llama(), tokens(1, 1024)
    expected = model(ids).logits
    sparge.enable(model, SPARSE)
    got = model(ids).logits
    stats = sparge.stats()
    assert stats.sparse == 3
    assert stats.density is not None
    assert 0.3 < stats.density < 0.6
    assert not torch.allclose(got, expected, atol=1e-4)
    assert_equal_to_rounding(
        got[:, :128], expected[:, :128]
    )  # first two blocks are sink and diagonal, nothing is skipped


def test_sink_and_diagonal_are_kept_under_masks() -> None:
    """A padded sequence keeps the same blocks, and has the same output, as without padding."""
    model, ids = llama(), tokens(1, 1024)
    sparge.enable(model, SPARSE)
    unpadded = model(ids[:, 128:]).logits
    density = sparge.stats().density
    mask = torch.ones(1, 1024, dtype=torch.long)
    mask[:, :128] = 0
    sparge.reset_stats()
    padded = model(ids, attention_mask=mask, position_ids=torch.arange(-128, 896).clamp(min=0)[None]).logits
    assert sparge.stats().density == density
    assert_equal_to_rounding(padded[:, 128:], unpadded)


def test_dense_layers() -> None:
    model, ids = llama(), tokens(1)
    sparge.enable(model, Policy(topk=0.5, backend="torch", dense_layers=(0, -1)))
    model(ids)
    layers = sparge.stats().layers
    assert list(layers) == [f"model.layers.{index}.self_attn" for index in range(3)]
    assert [layer.reasons for layer in layers.values()] == [
        {"dense: dense layer": 1},
        {"sparse: torch": 1},
        {"dense: dense layer": 1},
    ]
    assert layers["model.layers.0.self_attn"].density is None
    assert layers["model.layers.1.self_attn"].density == sparge.stats().density


def test_short_prefill_is_bitwise_stock() -> None:
    model, ids = llama(), tokens()
    expected = model(ids, attention_mask=padding("left")).logits
    sparge.enable(model)
    assert torch.equal(model(ids, attention_mask=padding("left")).logits, expected)
    assert sparge.stats().reasons == {"dense: below the crossover": 3}
    sparge.enable(model, Policy(min_tokens=LENGTH + 1, backend="torch"))
    assert torch.equal(model(ids, attention_mask=padding("left")).logits, expected)
    assert sparge.stats().reasons == {"dense: below the crossover": 3, "dense: fewer than min_tokens": 3}


@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_disable_restores(before: str) -> None:
    model, ids = llama(attn_implementation=before), tokens()
    expected = model(ids, attention_mask=padding("left")).logits
    names = [sorted(vars(module)) for module in model.modules()]
    sparge.enable(model, SPARSE)
    sparge.enable(model, ALL_BLOCKS)
    model(ids)
    sparge.disable(model)
    assert model.config._attn_implementation == before
    assert torch.equal(model(ids, attention_mask=padding("left")).logits, expected)
    assert [sorted(vars(module)) for module in model.modules()] == names
    with pytest.raises(ValueError, match=r"expected an enabled model .*, got LlamaForCausalLM"):
        sparge.disable(model)


def test_attn_implementation_by_name(tmp_path: Any) -> None:
    """``from_pretrained(attn_implementation="sparge")`` uses the registered policy."""
    stock, ids = llama(), tokens(1)
    stock.save_pretrained(tmp_path)
    sparge.register(Policy(topk=1.0, backend="torch", dense_layers=(1,)))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sparge").eval()
    assert_equal_to_rounding(model(ids).logits, stock(ids).logits)
    assert {name: layer.sparse for name, layer in sparge.stats().layers.items()} == {
        "layers.0": 1,
        "layers.1": 0,
        "layers.2": 1,
    }


def test_attn_implementation_by_name_with_unusable_rules(tmp_path: Any) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected no rules about denoising steps"):
        sparge.register(Policy(dense_steps=(1,)))
    sparge.register(Policy(backend="torch", dense_layers=(1, 99)))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sparge").eval()
    with pytest.warns(UserWarning, match=r"dense_layers: expected layers below 3 .*, got 99$"):
        model(tokens(1))
    assert sparge.stats().reasons == {"dense: dense layer": 1, "sparse: torch": 2}


def test_encoders_are_not_causal() -> None:
    torch.manual_seed(0)
    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=99)
    model, ids = BertModel(config).eval(), tokens()
    expected = model(ids, attention_mask=padding("right")).last_hidden_state
    sparge.enable(model, ALL_BLOCKS)
    got = model(ids, attention_mask=padding("right")).last_hidden_state
    assert sparge.stats().dense == 0
    valid = padding("right").bool()
    assert_equal_to_rounding(got[valid], expected[valid])


@pytest.mark.parametrize(
    "build, config", [(T5ForConditionalGeneration, T5Config), (UMT5ForConditionalGeneration, UMT5Config)]
)
def test_position_biases_run_dense(build: Any, config: Any) -> None:
    """T5's layers with biases run SDPA with a reason; its cross-attention is dense by policy."""
    if "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(inspect.getmodule(build)):
        pytest.skip("T5 of transformers 5.17 computes attention by itself")
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    model, ids = build(config(**sizes, decoder_start_token_id=0)).eval(), tokens(1, 200)
    expected = model(input_ids=ids, decoder_input_ids=ids[:, :130]).logits
    sparge.enable(model, Policy(backend="torch"))
    with pytest.warns(UserWarning, match="cannot be sparse: position bias; it runs dense"):
        got = model(input_ids=ids, decoder_input_ids=ids[:, :130]).logits
    assert torch.equal(got, expected)
    reasons = {name: layer.reasons for name, layer in sparge.stats().layers.items()}
    for block in range(2):
        for place in (f"encoder.block.{block}.layer.0", f"decoder.block.{block}.layer.0"):
            assert reasons.pop(f"{place}.SelfAttention") == {"dense: unsupported (position bias)": 1}
        assert reasons.pop(f"decoder.block.{block}.layer.1.EncDecAttention") == {"dense: cross-attention": 1}
    assert not reasons


class TestErrors:
    def test_gradients_warn_and_run_dense(self) -> None:
        model = llama()
        sparge.enable(model, ALL_BLOCKS)
        with torch.enable_grad(), pytest.raises(NotImplementedError, match="gradients"):
            model(tokens(1))
        sparge.enable(model, Policy(backend="torch"))
        with torch.enable_grad(), pytest.warns(UserWarning, match="cannot be sparse: gradients; it runs dense"):
            model(tokens(1)).logits.sum().backward()
        assert model.lm_head.weight.grad is not None

    def test_enable_raises(self) -> None:
        with pytest.raises(TypeError, match=r"expected a transformers model.*got Linear"):
            sparge.enable(torch.nn.Linear(2, 2))
        with pytest.raises(TypeError, match=r"expected a sparge\.Policy, got float"):
            sparge.enable(llama(), 0.5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no rules about denoising steps"):
            sparge.enable(llama(), Policy(dense_first_steps=1))
        with pytest.raises(ValueError, match="scheduler: expected None"):
            sparge.enable(llama(), scheduler=object())
        model = llama()
        model._supports_sdpa = False
        with pytest.raises(NotImplementedError, match="expected a model that supports SDPA"):
            sparge.enable(model)
        assert model.config._attn_implementation == "sdpa"

    @pytest.mark.parametrize("framework", ["transformers", "diffusers"])
    def test_missing_framework_raises(self, framework: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, framework, None)
        message = rf"expected {framework} to be installed, got none: pip install .*\[{framework}\]'"
        for policy in (None, Policy()):
            with pytest.raises(ImportError, match=message):
                sparge.register(policy, framework)

    @pytest.mark.parametrize("name", ["indices", "block_indices"])
    def test_unsupported_arguments_raise(self, name: str) -> None:
        from sparge.integrations.transformers.attention import attention_forward

        query = torch.randn(1, 2, 8, 16)
        with pytest.raises(NotImplementedError, match=name):
            attention_forward(torch.nn.Module(), query, query, query, None, **{name: torch.zeros(2)})


def test_compiled_equals_eager() -> None:
    model, ids = llama(), tokens(1, 640)
    sparge.enable(model, SPARSE)
    expected = model(ids).logits
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected, rtol=0, atol=1e-5)
    assert sparge.stats().reasons == {"sparse: torch": 6}


@pytest.mark.parametrize("side", ["left", "right"])
def test_compiled_padding(side: str) -> None:
    """A compiled program cannot read the padding, so it masks padded keys instead of cutting them off.

    With padding on the right, the output is the same. Padding on the left shifts the block boundaries: other blocks are
    kept, and the error has a similar size.
    """
    model, ids = llama(), tokens(2, 1024)
    mask = torch.ones(2, 1024, dtype=torch.long)
    mask[0, slice(0, 200) if side == "left" else slice(824, None)] = 0
    stock = model(ids, attention_mask=mask).logits
    shapes = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        shapes.append(None if len(args) < 4 or args[3] is None else tuple(args[3].shape))
        return attention(*args, **kwargs)

    attention, calls.api.attention = calls.api.attention, watched
    torch._dynamo.reset()  # other tests' batch sizes would make this one dynamic
    try:
        sparge.enable(model, Policy(topk=0.3, backend="torch"))
        cut = model(ids, attention_mask=mask).logits
        assert sparge.stats().reasons == {"sparse: torch": 3}
        masked = torch.compile(model, backend="eager", fullgraph=True)(ids, attention_mask=mask, use_cache=False).logits
    finally:
        calls.api.attention = attention
    assert sparge.stats().reasons == {"sparse: torch": 6}
    assert set(shapes) == {None, (2, 1, 1, 1024)}, "no full mask, which GPUs would run dense"
    shown = mask.bool()
    torch.testing.assert_close(masked[1], cut[1], rtol=0, atol=1e-5)
    if side == "right":
        torch.testing.assert_close(masked[shown], cut[shown], rtol=0, atol=1e-5)
    errors = [float((got - stock)[0, shown[0]].norm() / stock[0, shown[0]].norm()) for got in (cut, masked)]
    assert 0.6 < errors[1] / errors[0] < 1.7


def test_separately_compiled_layers_with_padding() -> None:
    """The mask is made outside the compiled layers and may be modified, so its cached parts are not used."""
    model, ids, mask = llama(), tokens(), padding("left")
    expected = model(ids, attention_mask=mask).logits
    sparge.enable(model, ALL_BLOCKS)
    for layer in model.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    got = model(ids, attention_mask=mask, use_cache=False).logits
    assert_equal_to_rounding(got[mask.bool()], expected[mask.bool()])
    assert sparge.stats().reasons == {"sparse: torch": 3}


def test_model_compiled_before_enable() -> None:
    model, ids = llama(), tokens(1)
    expected = model(ids).logits
    compiled = torch.compile(model, backend="eager")
    sparge.enable(compiled, ALL_BLOCKS)
    assert_equal_to_rounding(compiled(ids, use_cache=False).logits, expected)
    assert sparge.stats().reasons == {"sparse: torch": 3}
    sparge.disable(compiled)
    assert torch.equal(model(ids).logits, expected)


def test_transformers_pipeline() -> None:
    words = Tokenizer(WordLevel({"[UNK]": 0, **{str(index): index for index in range(1, 99)}}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="[UNK]")
    pipe = TextGenerationPipeline(model=llama(), tokenizer=tokenizer)
    sparge.enable(pipe, ALL_BLOCKS)
    pipe(" ".join(map(str, tokens(1)[0].tolist())), max_new_tokens=2, do_sample=False)
    assert sparge.stats().reasons == {"sparse: torch": 3, "dense: decode": 3}
    sparge.disable(pipe)
    assert pipe.model.config._attn_implementation == "sdpa"


def test_model_wrapped_by_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in replaces PEFT: its wrapper is a module with a method that returns the model."""
    import sys
    from types import ModuleType

    class PeftModel(torch.nn.Module):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.base_model = model

        def get_base_model(self) -> torch.nn.Module:
            return self.base_model

    peft = ModuleType("peft")
    peft.PeftModel = PeftModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peft", peft)
    model = llama()
    wrapped = PeftModel(model)
    sparge.enable(wrapped, ALL_BLOCKS)
    model(tokens(1))
    assert sparge.stats().sparse == 3
    sparge.disable(wrapped)
    assert model.config._attn_implementation == "sdpa"

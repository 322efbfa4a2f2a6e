"""Every model class of the installed diffusers is supported, with its text tokens found, or listed with a reason."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import diffusers.models.controlnets
import diffusers.models.transformers
import diffusers.models.unets
import pytest
import torch
from diffusers import ModelMixin
from families import FAMILIES, WITHOUT, build, class_of
from families.family import Keys, Tiny, first_tensor
from families.page import PAGE, POLICY, kind, page, parse_page
from torch import Tensor

import sparge
from sparge import Policy
from sparge.dispatch import call_cache
from sparge.integrations import calls as calls_module
from sparge.integrations import sdpa
from sparge.integrations.calls import substituted
from sparge.integrations.diffusers import models


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Keys]]:
    """Record the keys that the library assumes for each call, by layer."""
    seen: dict[str, list[Keys]] = {}
    next_call = sdpa.Scope.next_call

    def watched(scope: Any, key: Tensor, *, tokens_first: bool = False) -> sdpa.Tokens:
        tokens = next_call(scope, key, tokens_first=tokens_first)
        kv_len = key.shape[1 if tokens_first else 2]
        ends = ((start, kv_len if stop is None else stop) for start, stop in tokens.text)
        ranges = tuple((start, stop) for start, stop in ends if start < stop)
        taken: Keys = "other" if tokens.is_text else "cross" if tokens.is_self is False else ranges
        seen.setdefault(scope.layer.name, []).append(taken)
        return tokens

    monkeypatch.setattr(sdpa.Scope, "next_call", watched)
    return seen


def expected_keys(tiny: Tiny) -> dict[str, list[Keys]]:
    return {layer: keys if isinstance(keys, list) else [keys] for layer, keys in tiny.layers.items()}


def record_reordering(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that records, for each sparse call with a grid, whether its tokens are reordered."""
    are_reordered: list[bool] = []
    order = calls_module._order

    def watched(*args: Any) -> Any:
        result = order(*args)
        are_reordered.append(result is not None)
        return result

    monkeypatch.setattr(calls_module, "_order", watched)
    return are_reordered


def build_eval(name: str) -> Tiny:
    tiny = build(name)
    tiny.model.eval()
    return tiny


@pytest.mark.parametrize("name", FAMILIES)
def test_probe_and_table_find_the_expected_keys(
    name: str, calls: dict[str, list[Keys]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe and the library's table find these keys; with all blocks kept, the output is unchanged."""
    tiny = build_eval(name)
    known = models.KNOWN.get(class_of(name))
    orders = record_reordering(monkeypatch)
    with torch.no_grad():
        stock = first_tensor(tiny.model(**tiny.inputs))
        with monkeypatch.context() as patch:
            patch.setattr(models, "KNOWN", {})
            sparge.enable(tiny.model, POLICY)
            output = first_tensor(tiny.model(**tiny.inputs))
        expected = expected_keys(tiny)
        assert {layer: _merge_equal(keys, expected[layer]) for layer, keys in calls.items()} == expected
        torch.testing.assert_close(output, stock, rtol=0, atol=tiny.rounding * float(stock.abs().max()))
        assert sparge.stats().sparse >= 1
        sparge.disable(tiny.model)
        calls.clear()
        if known is not None:
            orders.clear()
            call_cache.forget()  # cached calls do not compute an order
            sparge.enable(tiny.model, POLICY)
            tiny.model(**tiny.inputs)
        assert parse_page(PAGE.read_text())[name] == kind(tiny, is_ordered=any(orders))
        assert all(expected[layer] == ["other"] or set(keys) == set(expected[layer]) for layer, keys in calls.items())
        assert known is None or all(expected[layer] == ["other"] for layer in set(expected) - set(calls))


def _merge_equal(keys: list[Keys], expected: list[Keys]) -> list[Keys]:
    """Merge equal calls; accept "cross" between audio and images where "other" is expected."""
    kinds = keys if len(expected) > 1 else list(dict.fromkeys(keys))
    return expected if kinds == ["cross"] and expected == ["other"] else kinds


def test_every_class_is_listed() -> None:
    """Fails with the names of new classes if a release of diffusers adds some."""
    classes = set()
    for package in (diffusers.models.transformers, diffusers.models.unets, diffusers.models.controlnets):
        for part in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(part.name)
            classes |= {
                name
                for name, kind in inspect.getmembers(module, inspect.isclass)
                if issubclass(kind, ModelMixin) and kind.__module__ == module.__name__
            }
    assert classes <= {class_of(name) for name in (*FAMILIES, *WITHOUT)}
    assert set(models.KNOWN) <= classes


def test_page_is_up_to_date() -> None:
    """`python -m families.page` in this folder writes the page."""
    written = PAGE.read_text()
    assert written == page(parse_page(written))


class TestUnlistedModel:
    """A model that is missing from the library's table, such as a model of a future release."""

    NAME = "Flux2Transformer2DModel"

    def test_probes_once_per_input_shape(self, calls: dict[str, list[Keys]]) -> None:
        tiny = build_eval(self.NAME)
        passes: list[int] = []
        tiny.model.proj_out.register_forward_hook(lambda *_: passes.append(1))
        sparge.enable(tiny.model, POLICY)
        with torch.no_grad():
            for timestep in (0.9, 0.5):
                tiny.model(**{**tiny.inputs, "timestep": torch.tensor([timestep])})
            assert len(passes) == 2 + 2
            shorter = {
                **tiny.inputs,
                "encoder_hidden_states": tiny.inputs["encoder_hidden_states"][:, :50],
                "txt_ids": tiny.inputs["txt_ids"][..., :50, :],
            }
            calls.clear()
            tiny.model(**shorter)
        assert len(passes) == 2 + 2 + 3
        assert {keys for keys_of_calls in calls.values() for keys in keys_of_calls} == {((0, 50),)}

    def test_failed_probe_warns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tiny = build_eval(self.NAME)
        with torch.no_grad():
            stock = first_tensor(tiny.model(**tiny.inputs))
            sparge.enable(tiny.model, POLICY)
            monkeypatch.setattr(
                "sparge.integrations.diffusers.probe._changed_latents", lambda latents: latents[..., :3]
            )
            with pytest.warns(UserWarning, match=r"Flux2\w*: expected a forward pass .* got RuntimeError"):
                output = first_tensor(tiny.model(**tiny.inputs))
        torch.testing.assert_close(output, stock, rtol=0, atol=1e-5)

    def test_probe_changes_latents_of_its_own_seed(self, calls: dict[str, list[Keys]]) -> None:
        tiny = build_eval("UNet2DModel")
        sample = torch.randn(tiny.inputs["sample"].shape, generator=torch.Generator().manual_seed(0))
        sparge.enable(tiny.model, POLICY)
        with torch.no_grad():
            tiny.model(**{**tiny.inputs, "sample": sample})
        assert calls == expected_keys(tiny)

    def test_detected_text_is_kept(self) -> None:
        tiny = build_eval(self.NAME)
        kept = []
        sparge.enable(tiny.model, Policy(topk=0.3, backend="torch"))

        def attention(_: str, query: Tensor, *__: Any, **options: Any) -> Tensor:
            kept.append(options["always_keep"])
            return query

        with torch.no_grad(), substituted(attention):
            tiny.model(**tiny.inputs)
        assert kept == [[(0, 70)]] * len(tiny.layers)


class TestSetAttentionBackend:
    """``set_attention_backend("sparge")``, diffusers' method of all models."""

    def test_applies_only_to_its_model(self) -> None:
        sparge.register(POLICY, "diffusers")
        one, other = build_eval("QwenImageTransformer2DModel"), build_eval("WanVACETransformer3DModel")
        one.model.set_attention_backend("sparge")
        with torch.no_grad():
            other.model(**other.inputs)
            assert sparge.stats().calls == 0
            one.model(**one.inputs)
            assert sparge.stats().sparse == len(one.layers)

    def test_attention_backend_context_applies_to_all_models(self) -> None:
        from diffusers.models.attention_dispatch import attention_backend

        sparge.register(POLICY, "diffusers")
        tiny = build_eval("QwenImageTransformer2DModel")
        with torch.no_grad(), attention_backend("sparge"):
            tiny.model(**tiny.inputs)
        assert sparge.stats().sparse == len(tiny.layers)
        with torch.no_grad():
            tiny.model(**tiny.inputs)
        assert sparge.stats().sparse == len(tiny.layers)

    @pytest.mark.parametrize("name", ["CogView4Transformer2DModel", "AuraFlowTransformer2DModel"])
    def test_modules_out_of_reach_warn(self, name: str) -> None:
        sparge.register(POLICY, "diffusers")
        tiny = build_eval(name)
        with pytest.warns(UserWarning, match=rf"does not affect \d of \d attention modules of {name}.*sparge.enable"):
            tiny.model.set_attention_backend("sparge")

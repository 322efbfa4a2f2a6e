"""transformers: ``attn_implementation="sparge"``, in both the attention and the mask registry.

The prefill of a language model goes sparse, decoding and everything else runs on transformers' own SDPA function, so
that what is dense is equal in every bit. Masks are those of SDPA. Where a mask is only causality, a sliding window and
padding, it carries these along: the kernels then read one row for each sequence instead of a square.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparge.dispatch.reasons import Reason, count
from sparge.integrations.calls import attend
from sparge.integrations.decisions import runs_dense
from sparge.integrations.hooks import THREAD, Passes, close_scope, hooked, open_mode
from sparge.integrations.layers import Layer, warn_about_places
from sparge.integrations.model_call import ModelCall, aligned_top_left
from sparge.integrations.sdpa import UNKNOWN, Scope, undisturbed
from sparge.integrations.transformers import eager, packing
from sparge.integrations.transformers.images import Inputs, takes_pictures
from sparge.integrations.transformers.mask_functions import causality_of
from sparge.options import checks
from sparge.policy import Policy

NAME = "sparge"
LAYER = "_sparge_layer"
BY_NAME = "_sparge_layer_by_name"
INPUTS = "_sparge_inputs"
"""Attribute of an attention module: what is known of the forward pass of the part it belongs to."""

PADDING = "_sparge_padding"
"""Attribute of a mask that is causal (aligned bottom-right) and padding: its version when that was so, the visible keys
(B, 1, 1, S_k) or None: all, and how many keys a query sees, or None: all before it."""

COMPILED = -1
"""In place of a version, in programs that torch.compile traces from the making of a mask to its use."""

NEEDED = "5.17"

EXTRAS = {"position_bias": "position bias", "cache": "paged cache", eager.CAP: "soft-capped scores"}
"""Arguments only transformers' own functions know what to do with."""

CROSS_ATTENTION = ("encoder_attn", "cross_attn", "crossattention", "EncDecAttention")
"""What layers call theirs."""

REGISTRY = "ALL_ATTENTION_FUNCTIONS"
"""What the code of a module names if its attention can be set."""

SDPA = "scaled_dot_product_attention"
OWN = ("softmax", SDPA)
"""What it names, too, if it computes attention by itself."""

FORBIDDEN = {
    "indices": "an index of keys",
    "block_indices": "an index of key blocks",
}
"""Arguments without which the model would be wrong, and that some versions of the SDPA function ignore."""

_registered: dict[str, Policy] = {}
_stock: list[Callable[..., tuple[Tensor, None]]] = []  # what runs dense calls: transformers' SDPA function


def register(policy: Policy) -> None:
    """Make ``attn_implementation="sparge"`` known; models loaded with it follow the policy.

    Raises:
        ImportError: transformers is missing or too old.
        ValueError: rules about steps.
    """
    _check_steps(policy)
    if policy.budgets is not None:
        raise ValueError("policy: expected no budgets of layers (sparge.enable knows their names), got some")
    _register_functions()
    _registered[NAME] = policy


def _check_steps(policy: Policy) -> None:
    if policy.has_step_rules:
        raise ValueError(f"policy: expected no rules about denoising steps for a language model, got {policy}")


def _register_functions() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface, __version__
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if tuple(int(part) for part in __version__.split(".")[:2]) < tuple(map(int, NEEDED.split("."))):
        raise ImportError(f"transformers: expected version {NEEDED} or newer, got {__version__}")
    _stock[:] = [ALL_ATTENTION_FUNCTIONS["sdpa"]]
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask)


def enable(model: Any, policy: Policy) -> None:
    """Switch a PreTrainedModel to sparse attention.

    Raises:
        NotImplementedError: the model cannot run on SDPA, or computes or chooses its attention in its own way.
        ValueError: rules about steps, or layers it does not have; a part of the model is enabled already.
    """
    if not _can_be_served(model):
        raise NotImplementedError(
            f"{type(model).__name__}: expected a model that supports SDPA attention (transformers says it does not)"
        )
    _check_steps(policy)
    attentions = [(name, module) for name, module in model.named_modules() if _is_attention(module)]
    checks.check_places("dense_layers", policy.dense_layers, _longest_list(model, attentions))
    policy.check_layers([name for name, _ in attentions])
    own = _own_attentions(model, attentions, policy)
    if is_enabled(model):
        disable(model)
    if any(LAYER in vars(module) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__}: expected a model no part of which is enabled, or that is no such part"
        )
    before = _implementations(model)
    _register_functions()
    model._sparge_before = before
    model._sparge_undo = []
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        disable(model)
        raise NotImplementedError(
            f"{type(model).__name__}: expected a model whose attention can be set (it calls SDPA itself; "
            "`with sparge.replace_sdpa(policy):` reaches it)"
        )
    for name, module in attentions:
        dense = bool(policy.dense_layers) and _is_dense_layer(model, name, policy)
        dense = dense or policy.is_dense_by_budget(name)
        setattr(module, LAYER, Layer(name, policy.of_layer(name), dense, is_cross=_is_cross(module, name)))
    model._sparge_undo.append(model.register_forward_pre_hook(_notice_another).remove)
    model._sparge_undo += _follow_pictures(model, attentions)
    model._sparge_undo += _follow_own(model, own)


def _notice_another(model: Any, *_: Any) -> None:
    """Say, once, that somebody has set another attention since; a forward pre-hook."""
    if torch.compiler.is_compiling():
        return
    found = model.config._attn_implementation
    if found != NAME:
        model._sparge_undo[0]()
        warnings.warn(
            f"sparge: {type(model).__name__} was set to {found!r} after sparge.enable, so nothing runs sparse (enable "
            "it again, or sparge.disable it)",
            stacklevel=2,
        )


def _follow_pictures(model: nn.Module, attentions: Sequence[tuple[str, nn.Module]]) -> list[Callable[[], None]]:
    """Have the parts that take pictures remember them for their layers; returns what undoes it."""
    parts: dict[nn.Module, Inputs] = {}
    for name, module in attentions:
        part = _innermost(model, name, takes_pictures)
        if part is not None:
            setattr(module, INPUTS, parts.setdefault(part, Inputs.of(part)))
    return [hooked(part, inputs.read, inputs.forget) for part, inputs in parts.items()]


def _follow_own(model: nn.Module, own: Sequence[tuple[str, nn.Module]]) -> list[Callable[[], None]]:
    """Open scopes around modules that call SDPA themselves, and count the others; returns what undoes it."""
    from transformers import PreTrainedModel

    undo: list[Callable[[], None]] = []
    parts: dict[nn.Module, Passes] = {}
    for name, module in own:
        hooks = _Own(vars(module)[LAYER], calls_sdpa=SDPA in _names_used(type(module)))
        undo.append(hooked(module, hooks.open, hooks.close))
        part = _innermost(model, name, lambda part: isinstance(part, PreTrainedModel))
        parts.setdefault(model if part is None else part, Passes())
    for part, passes in parts.items():
        undo += [
            passes.unwind,
            part.register_forward_pre_hook(passes.begin).remove,
            part.register_forward_hook(passes.end, always_call=True).remove,
        ]
    return undo


class _Own:
    """The two hooks of a module that computes attention by itself; where it calls SDPA, a scope sees that."""

    def __init__(self, layer: Layer, *, calls_sdpa: bool) -> None:
        self.layer = layer
        self.calls_sdpa = calls_sdpa

    def open(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        grid = tuple(hidden.shape[1:3]) if isinstance(hidden, Tensor) and hidden.ndim == 4 else None
        scope = Scope(self.layer, (UNKNOWN,), grid)
        THREAD.scopes.append(scope)
        if self.calls_sdpa:
            open_mode(scope)

    def close(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        scope = close_scope()
        if scope.calls == 0 and output is not None:
            count(Reason.OWN_ATTENTION, self.layer.name)


def _innermost(model: nn.Module, name: str, fits: Callable[[nn.Module], bool]) -> nn.Module | None:
    """The innermost part of a model around a module that fits."""
    parts = name.split(".")
    around = (model.get_submodule(".".join(parts[:stop])) for stop in reversed(range(len(parts))))
    return next((part for part in around if fits(part)), None)


def _can_be_served(model: nn.Module) -> bool:
    """Whether transformers says that SDPA serves a model, or that only sinks or capped scores keep it from that."""
    if getattr(model, "_supports_sdpa", False):
        return True
    kinds = {type(module) for module in model.modules() if _is_attention(module)}
    return bool(getattr(model, "_supports_flash_attn", False)) and any(map(eager.asks_for_it, kinds))


def is_enabled(model: Any) -> bool:
    """Whether `enable` was called for the model."""
    return hasattr(model, "_sparge_before")


def disable(model: Any) -> None:
    """Give a model back the attention it had before `enable`."""
    for config, implementation in model._sparge_before:
        config._attn_implementation_internal = implementation
    for action in model._sparge_undo:
        action()
    del model._sparge_before, model._sparge_undo
    for module in model.modules():
        for name in (LAYER, BY_NAME, INPUTS):
            vars(module).pop(name, None)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query (B, H, S_q, D), key and value (B, H_kv, S_k, D), output (B, S_q, H, D)."""
    for name in FORBIDDEN:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{FORBIDDEN[name]} ({name}): expected None, got a value (the model cannot run on a function like SDPA)"
            )
    attributes = vars(module)
    layer = attributes.get(LAYER) or _layer_of(module)
    causal = is_causal
    if causal is None:  # a module's __getattr__ would look for it among weights first
        causal = attributes["is_causal"] if "is_causal" in attributes else getattr(module, "is_causal", True)
    of_text = causal and layer is not None and not layer.is_cross

    pack = None
    if (attention_mask is not None or packing.KEYWORDS[0] in kwargs) and layer is not None and not layer.is_cross:
        pack = packing.pack_of(query, key, attention_mask, causal, kwargs)
    call = (dropout, scaling, is_causal)
    if layer is None or (pack is None and runs_dense(layer, query, key, is_language=of_text)):
        return _dense(module, causal, call, kwargs, query, key, value, attention_mask), None
    dense = functools.partial(_dense, module, causal, call, kwargs)
    unsupported = next((EXTRAS[name] for name in EXTRAS if kwargs.get(name) is not None), None)
    sinks = kwargs.get(eager.SINKS)
    if sinks is not None and sinks.shape != query.shape[1:2]:
        unsupported = "sinks of another shape than (heads,)"
    inputs = attributes.get(INPUTS)
    max_keys = kwargs.get("sliding_window")
    sparse = functools.partial(_sparse, layer, inputs, dropout, scaling, of_text, sinks, unsupported, max_keys)
    if pack is not None and unsupported is None:
        window = None if pack.is_masked else _window_of(attention_mask, pack)
        mask_of = functools.partial(_bottom_right, device=query.device, window=window) if causal else None
        told = attention_mask if window is None else None
        whole = packing.attend_within(pack, query, key, value, told, sparse, dense, mask_of, layer.name)
        return whole.contiguous(), None
    output = sparse(query, key, value, attention_mask)
    if output is None:
        return dense(query, key, value, attention_mask), None
    return output.transpose(1, 2).contiguous(), None


def _dense(
    module: nn.Module,
    causal: bool,
    call: tuple[float, float | None, bool | None],
    arguments: dict[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
) -> Tensor:
    """A call as transformers would run it; ``call`` is dropout, scaling and is_causal as it came."""
    if eager.needed(arguments):
        dropout, scaling, _ = call
        tensors = (query, key, value, attention_mask)
        return eager.attention_forward(module, *tensors, dropout, scaling, causal, **arguments)[0]
    output: Tensor = undisturbed(_stock[0], module, query, key, value, attention_mask, *call, **arguments)[0]
    return output


def _window_of(attention_mask: Tensor | None, pack: packing.Pack) -> int | None:
    """How many keys a query sees by a mask that is a sliding window alone, of segments that are the same on both sides;
    None for all others, whose entries are cut out."""
    version, padding, window = getattr(attention_mask, PADDING, (None, None, None))
    if attention_mask is None or window is None or padding is not None or version != _version_of(attention_mask):
        return None
    same = all((run.q_start, run.q_len) == (run.kv_start, run.kv_len) for run in pack.runs)
    return cast(int, window) if same else None


def _bottom_right(q_len: int, kv_len: int, device: torch.device, window: int | None) -> Tensor | None:
    """A causal mask (1, 1, S_q, S_k) that says so, and how many keys a query sees; None where causality says it all."""
    if q_len == kv_len and window is None:
        return None
    with torch.inference_mode(False):
        aligned = torch.ones(1, 1, q_len, kv_len, dtype=torch.bool, device=device).tril(kv_len - q_len)
        if window is not None:
            aligned = aligned.triu(kv_len - q_len - window + 1)
    setattr(aligned, PADDING, (aligned._version, None, window))
    return aligned


def _sparse(
    layer: Layer,
    inputs: Inputs | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    sinks: Tensor | None,
    unsupported: str | None,
    max_keys: int | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
) -> Tensor | None:
    """The output (B, H, S_q, D) of a call, or None: run it dense.

    Args:
        max_keys: that a query sees by the layer's own word; a mask in a compiled program does not say so itself.
    """
    applies_causality = causal and attention_mask is None and query.shape[2] > 1
    if applies_causality:  # behind the queries, a static cache is empty
        key, value, misaligned = aligned_top_left(query, key, value)
        unsupported = unsupported or misaligned
    version, padding, sliding_window = getattr(attention_mask, PADDING, (None, None, None))
    window = None
    if causal and attention_mask is not None and version is not None and version == _version_of(attention_mask):
        attention_mask, applies_causality = padding, True
        window = None if sliding_window is None else (sliding_window - 1, 0)
    grid: tuple[int, ...] | None = None
    text: Sequence[tuple[int, int]] = ()
    if inputs is not None and query.shape[2] == key.shape[2]:
        grid, text = (None, inputs.text(key.shape[2])) if causal else inputs.grid(key.shape[2])
    return attend(
        layer,
        ModelCall(
            query,
            key,
            value,
            attention_mask,
            dropout,
            applies_causality,
            scaling,
            enable_gqa=True,
            is_language=causal,
            text=text,
            grid=grid,
            sinks=sinks,
            window=window,
            max_keys=max_keys if window is None and attention_mask is not None else None,
            unsupported=unsupported,
        ),
    )


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """SDPA's mask, with padding and sliding window beside it where they are all there is to it besides causality."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    mask_function = causal_mask_function if mask_function is None else mask_function
    full: Tensor | None
    arguments = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    at_the_end = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    told = attention_mask is None or attention_mask.shape[-1] == kv_offset + kv_length
    is_causal, sliding_window = mask_function is causal_mask_function and kv_offset == 0, None
    if not torch.compiler.is_compiling():
        bounds = packing.bounds_of_mask(*arguments)
        if bounds is not None:
            with torch.inference_mode(False):
                full = sdpa_mask(*arguments, **kwargs)
            if full is not None and not full.is_inference():
                setattr(full, packing.BOUNDS, (full._version, bounds))
            return full
        is_causal, sliding_window = causality_of(mask_function)
    if not (is_causal and at_the_end and told):
        full = sdpa_mask(*arguments, **kwargs)
        return full
    if torch.compiler.is_compiling():
        full = sdpa_mask(*arguments, **kwargs)
        if full is not None:
            padding = None if attention_mask is None else attention_mask[:, None, None, :].to(torch.bool)
            setattr(full, PADDING, (COMPILED, padding, None))
        return full
    with torch.inference_mode(False):  # what is made in it has no version, and could be edited without a trace
        full = sdpa_mask(*arguments, **kwargs)
        padding = None
        if attention_mask is not None:
            padding = attention_mask[:, None, None, kv_offset:].to(torch.bool, copy=True)
    if full is not None and not full.is_inference():
        setattr(full, PADDING, (full._version, padding, sliding_window))
    return full


def _version_of(attention_mask: Tensor) -> int:
    """Which version of a mask this is, as `PADDING` has it."""
    return COMPILED if torch.compiler.is_compiling() else attention_mask._version


def _layer_of(module: nn.Module) -> Layer | None:
    """What `enable` attached, or for models loaded by name a layer with the registered policy.

    None without either: a model that shares the config of an enabled one, which is not enabled by that.
    """
    layer = vars(module).get(LAYER)
    if layer is not None:
        return cast(Layer, layer)
    policy = _registered.get(NAME)
    if policy is None:
        return None
    layer = vars(module).get(BY_NAME)
    if layer is not None and layer.policy is policy:
        return cast(Layer, layer)
    index = getattr(module, "layer_idx", None)
    name = "" if index is None else f"layers.{index}"
    total = getattr(getattr(module, "config", None), "num_hidden_layers", None)
    dense = index is not None and total is not None and policy.is_dense_layer(index, total)
    layer = Layer(name, policy, dense, is_cross=_is_cross(module))
    if not torch.compiler.is_compiling():
        setattr(module, BY_NAME, layer)
        if index is not None and total is not None:  # another part of the model may have them
            warn_about_places("dense_layers", policy.dense_layers, total)
    return layer


def _is_attention(module: nn.Module) -> bool:
    """Modules that may call the attention interface: all are called so, and most say whether they are causal."""
    return hasattr(module, "is_causal") or "Attention" in type(module).__name__


def _own_attentions(
    model: nn.Module, attentions: Sequence[tuple[str, nn.Module]], policy: Policy
) -> list[tuple[str, nn.Module]]:
    """Modules that ask for no function. Those that do not call SDPA either are out of reach, said as the policy says.

    Raises:
        NotImplementedError: the model has no others, or the policy says to raise.
    """
    names = {kind: _names_used(kind) for kind in {type(module) for _, module in attentions}}
    own = [
        (name, module)
        for name, module in attentions
        if not any(_is_attention(part) for part in module.modules() if part is not module)
        and REGISTRY not in names[type(module)]
        and not names[type(module)].isdisjoint(OWN)
    ]
    by_hand = {type(module) for _, module in own if SDPA not in names[type(module)]}
    if not by_hand:
        return own
    message = (
        f"{type(model).__name__}: expected attention by one of transformers' functions or by SDPA, got that of "
        f"{', '.join(sorted(kind.__name__ for kind in by_hand))} itself"
    )
    if any(SDPA in _names_used(other) for kind in by_hand for other in kind.__subclasses__()):
        message += " (another class calls SDPA: load the model with attn_implementation='sdpa')"
    if not any({REGISTRY, SDPA} & used for used in names.values()) or policy.on_unsupported == "raise":
        raise NotImplementedError(message)
    if policy.on_unsupported == "warn":
        warnings.warn(f"sparge: {message}; it runs as it was", stacklevel=4)
    return own


def _names_used(kind: type) -> set[str]:
    """The names in the code of a class and of those it is made from."""
    methods = [inspect.unwrap(method) for base in kind.__mro__ for method in vars(base).values() if callable(method)]
    return set(name for method in methods if inspect.isfunction(method) for name in method.__code__.co_names)


def _is_cross(module: nn.Module, name: str = "") -> bool:
    """Cross-attention by the name of its class or of its place in a layer, or as it says itself."""
    place = name.rsplit(".", 1)[-1]
    named = "Cross" in type(module).__name__ or place in CROSS_ATTENTION
    return named or getattr(module, "is_cross_attention", False) is True


def _place(model: nn.Module, name: str) -> tuple[int, int] | None:
    """Index and length in the innermost list of layers: "model.layers.3.self_attn" is layer 3 of "model.layers"."""
    parts = name.split(".")
    place = next((place for place in reversed(range(len(parts))) if parts[place].isdigit()), None)
    if place is None:
        return None
    layers: Any = model.get_submodule(".".join(parts[:place]))
    return int(parts[place]), len(layers)


def _is_dense_layer(model: nn.Module, name: str, policy: Policy) -> bool:
    place = _place(model, name)
    return place is not None and policy.is_dense_layer(*place)


def _longest_list(model: nn.Module, attentions: Sequence[tuple[str, nn.Module]]) -> int:
    return max((place[1] for name, _ in attentions if (place := _place(model, name)) is not None), default=0)


def _implementations(model: Any) -> list[tuple[Any, Any]]:
    """Every config of a model with the attention it names."""
    from transformers import PreTrainedModel

    found: dict[int, tuple[Any, Any]] = {}
    pending: list[Any] = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while pending:
        config = pending.pop()
        if config is None or id(config) in found:
            continue
        found[id(config)] = (config, config._attn_implementation_internal)
        pending += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return list(found.values())

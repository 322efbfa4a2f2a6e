"""``sparge calibrate``: measure budgets for every layer of a model on a few inputs and write them to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sparge.cli import options

HELD_OUT_LIMIT = 1.25
"""On held-out inputs, the report also counts the layers whose error is below this factor times the limit."""


def _error(text: str) -> float:
    from sparge.profile import PRESETS

    if text in PRESETS:
        return PRESETS[text]
    try:
        error = float(text)
    except ValueError:
        error = 0.0
    if not error > 0:
        raise typer.BadParameter(f"expected a number above 0, or one of {', '.join(PRESETS)}, got {text}")
    return error


def calibrate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Language model: hub name, folder or GGUF file. With --prompt, a diffusers pipeline."
        ),
    ],
    max_error: Annotated[
        float | None,
        typer.Option(
            parser=_error,
            metavar="ERROR",
            help="Maximum relative L1 error of each layer: a number, or a limit of the paper: llm (0.08), image "
            "(0.07), video (0.05). llm by default, video for a pipeline.",
        ),
    ] = None,
    density: Annotated[
        float | None,
        typer.Option(
            parser=options.share, metavar="SHARE", help="Mean budget over all layers, instead of --max-error."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=options.MIN_TOKENS, help="Length of each window of text.")] = 4096,
    inputs: Annotated[int, typer.Option(min=1, help="Windows to calibrate on.")] = 3,
    held_out: Annotated[int, typer.Option(min=0, help="Further windows on which the budgets are checked.")] = 3,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Prompt of a pipeline; may be repeated. Every fourth prompt is used to check the budgets. --tokens, "
            "--inputs, --held-out and --text have no effect.",
        ),
    ] = None,
    steps: options.Steps = None,
    text: options.Text = None,
    policy: Annotated[
        Any,
        typer.Option(
            parser=options.policy,
            metavar="FILE",
            help="Policy that selects the sparse calls, written by Policy.to_json.",
        ),
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    output: Annotated[
        Path, typer.Option(parser=options.writable, metavar="PATH", help="Where to write the profile.")
    ] = Path("sparge-profile.json"),
    rows: Annotated[
        Path | None,
        typer.Option(
            parser=options.writable,
            metavar="PATH",
            help="Append a row for each finished input; the same command resumes an interrupted run.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(parser=options.writable, metavar="PATH", help="Also write a plot: .png or .svg.")
    ] = None,
) -> None:
    """Find a budget for every layer of a model: the fewest blocks that keep its error on your inputs below a limit.

    sparge calibrate HuggingFaceTB/SmolLM2-135M --max-error 0.05 --output profile.json
    """
    from sparge.calibration import calibrate as measure
    from sparge.calibration import check
    from sparge.console import plain_console, print_written, show_progress
    from sparge.profile import PRESETS, share_within

    if max_error is not None and density is not None:
        raise options.UsageError("calibrate: expected --max-error or --density, got both")
    console = plain_console()
    device, torch_dtype = options.resolve_device_and_dtype(device, dtype)
    with options.errors_as_usage("calibrate", "use fewer --tokens", rows):
        if prompt:
            loaded, measured, unseen = _pipeline(model, device, torch_dtype, prompt, steps)
        else:
            loaded, measured, unseen = _language_model(model, device, torch_dtype, tokens, inputs, held_out, text)
        if max_error is None and density is None:
            max_error = PRESETS["video" if prompt else "llm"]
        with show_progress(console) as progress:
            profile = measure(
                loaded, measured, max_error=max_error, density=density, policy=policy, rows=rows, progress=progress
            )
            errors = check(loaded, unseen, profile, progress=progress) if unseen else {}
    profile.save(output)
    budgets = (profile.policy.budgets or {}).values()
    if profile.max_error is None:
        reason = f"chosen to keep {profile.share:.1%} of the predicted attention of every query block"
    else:
        reason = f"for an error of {profile.max_error:.3f}"
    console.print(
        f"{len(budgets)} layers, {profile.tokens} tokens: mean budget {profile.density:.3f}, "
        f"from {min(budgets):.2f} to {max(budgets):.2f}, {reason}"
    )
    if errors:
        worst = [max(of_layer) for of_layer in errors.values()]
        result = f"errors from {min(worst):.3f} to {max(worst):.3f}"
        if profile.max_error is not None:
            result = (
                f"{share_within(errors, profile.max_error):.0%} of the layers stay below the limit on all of them, "
                f"{share_within(errors, HELD_OUT_LIMIT * profile.max_error):.0%} below {HELD_OUT_LIMIT} times the limit"
            )
        console.print(f"{len(unseen)} further inputs: {result}")
    if plot is not None:
        profile.plot().savefig(plot, dpi=150)
    print_written(console, output, plot)
    console.print(f"sparge.enable(model, sparge.Profile.load({str(output)!r}))")


def _language_model(
    name: str, device: str, dtype: Any, tokens: int, inputs: int, held_out: int, text: str | None
) -> tuple[Any, list[Any], list[Any]]:
    """Return the model, the windows of text for calibration, and the held-out windows for the check."""
    from sparge.evaluate.language.load import load
    from sparge.evaluate.language.texts import read_text, windows_of

    model, tokenizer = load(name, device, dtype)
    ids = tokenizer(read_text(text), return_tensors="pt").input_ids[0]
    windows = windows_of(ids, tokens, len(ids) // tokens)
    count = inputs + held_out
    if len(windows) < count:
        raise ValueError(f"text: expected {count} windows of {tokens} tokens, got {len(windows)}; use a longer text")
    spread = [window.to(device) for window in windows[:: len(windows) // count]][:count]
    unseen = range(1, 2 * held_out, 2) if held_out <= inputs else range(inputs, count)
    return model, [spread[i] for i in range(count) if i not in unseen], [spread[i] for i in unseen]


def _pipeline(
    name: str, device: str, dtype: Any, prompts: list[str], steps: int | None
) -> tuple[Any, list[Any], list[Any]]:
    """Return the pipeline and its inputs; every fourth prompt is used for the check."""
    from sparge.evaluate.pipeline.load import load

    arguments = {} if steps is None else {"num_inference_steps": steps}
    calls = [{"prompt": prompt, **arguments} for prompt in prompts]
    measured = [call for number, call in enumerate(calls) if number % 4 != 3]
    return load(name, device, dtype), measured, calls[3::4]

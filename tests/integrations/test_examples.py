"""Run the examples as a user does, with a saved model and a command line, and check their output and statistics."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageSequence
from tiny_pipelines import (
    CALLS,
    PIPELINES,
    PROMPT,
    STEPS,
    build_allegro,
    seeded,
    word_tokenizer,
)

import sparge
from sparge import Policy, TopK

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:In CPU autocast"),  # from Mochi
    pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated"),  # its replacement is missing in older versions
]

EXAMPLES = Path(__file__).parents[2] / "examples"
SPARSE = Policy(sparsity=TopK(0.3, min_blocks=1), backend="torch")
FIRST_DENSE = Policy(sparsity=TopK(0.3, min_blocks=1), backend="torch", dense_first_steps=0.25)
Run = Callable[..., None]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    """Return a function that runs `python SCRIPT.py WORD ... --OPTION VALUE ...` on the CPU, in this process."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def run(script: str, *words: str, **options: Any) -> None:
        given = [str(word) for option, value in options.items() for word in (f"--{option.replace('_', '-')}", value)]
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *words, *given])
        runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")

    yield run
    sys.modules.pop("common", None)


def save_pipeline(pipe: Any, folder: Path) -> Path:
    pipe.save_pretrained(folder)
    return folder


def save_policy(policy: Policy, path: Path) -> Path:
    path.write_text(policy.to_json())
    return path


def assert_has_content(path: Path, frames: int) -> None:
    """Check the number of frames, that no frame is a single color, and that all frames differ."""
    with Image.open(path) as file:
        images = [frame.convert("RGB") for frame in ImageSequence.Iterator(file)]
    assert len(images) == frames
    assert all(high - low > 20 for image in images for low, high in image.getextrema())
    assert len({image.tobytes() for image in images}) == frames


@pytest.mark.parametrize("name", PIPELINES)
def test_diffusers(name: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = CALLS[name]
    is_video = "num_frames" in sizes
    output = "out.webp" if is_video else "out.png"
    run(
        "text_to_video" if is_video else "text_to_image",
        name,
        model=save_pipeline(PIPELINES[name](), tmp_path / "model"),
        policy=save_policy(FIRST_DENSE, tmp_path / "policy.json"),
        prompt=PROMPT,
        steps=STEPS,
        height=sizes["height"],
        width=sizes["width"],
        **({"frames": sizes["num_frames"]} if is_video else {}),
        output=output,
    )
    assert_has_content(tmp_path / output, sizes.get("num_frames", 1))
    stats = sparge.stats()
    assert str(stats) in capsys.readouterr().out
    assert stats.sparse == 3 * stats.reasons["dense: dense step"] > 0
    assert set(stats.reasons) <= {"sparse: torch", "dense: dense step", "dense: cross-attention"}
    assert stats.layers and all(layer.startswith("transformer.") for layer in stats.layers)
    assert all(layer.sparse or "dense: cross-attention" in layer.reasons for layer in stats.layers.values())


def test_open_sora_plan(run: Run, tmp_path: Path) -> None:
    run(
        "open_sora_plan",
        model=save_pipeline(build_allegro(), tmp_path / "model"),
        policy=save_policy(SPARSE, tmp_path / "policy.json"),
        steps=STEPS,
        height=128,
        width=128,
        frames=24,
        output="out.gif",
    )
    assert_has_content(tmp_path / "out.gif", 24)
    # Calls of the VAE and the text encoder are not counted.
    assert sparge.stats().reasons == {"sparse: torch": STEPS, "dense: cross-attention": STEPS}


class TestLanguageModel:
    WORDS = 4500
    """Enough words for sparse attention on a CPU by default."""

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        from transformers import LlamaConfig, LlamaForCausalLM

        tokenizer = word_tokenizer()
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=8192,
            eos_token_id=None,
        )
        seeded(LlamaForCausalLM, config).save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    @pytest.fixture
    def text(self, tmp_path: Path) -> Path:
        path = tmp_path / "text.txt"
        path.write_text("the cat walks in the rain " * (self.WORDS // 6))
        return path

    def test_prefill_is_sparse_and_decoding_dense(
        self, run: Run, model: Path, text: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run("transformers_llm", model=model, prompt_file=text, tokens=4)
        stats = sparge.stats()
        assert str(stats) in capsys.readouterr().out
        assert {name: layer.reasons for name, layer in stats.layers.items()} == {
            f"model.layers.{index}.self_attn": {"sparse: torch": 1, "dense: decode": 3} for index in range(3)
        }

    def test_chat_template(self, run: Run, model: Path, text: Path) -> None:
        (model / "chat_template.jinja").write_text("{% for m in messages %}rain {{ m.content }} rain{% endfor %}")
        run(
            "transformers_llm",
            model=model,
            prompt_file=text,
            tokens=2,
            policy=save_policy(SPARSE, model / "policy.json"),
        )
        assert sparge.stats().reasons == {"sparse: torch": 3, "dense: decode": 3}


class TestVision:
    POLICY = Policy(sparsity=TopK(0.3, min_blocks=1), backend="torch", min_tokens=300)

    def test_video_question(
        self, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The processor is a fake: the real one needs torchvision and a video decoder."""
        import torch
        from transformers import AutoProcessor, BatchFeature, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

        frames, video = 8, 91
        sizes = {"hidden_size": 32, "intermediate_size": 32}
        text = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 99}
        places = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
        ids = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
        vision = {"depth": 1, "out_hidden_size": 32, "num_heads": 2, "patch_size": 4, "fullatt_block_indexes": [0]}
        config = Qwen2_5_VLConfig(
            text_config={**sizes, **text, **places, **ids},
            vision_config={**sizes, **vision},
            image_token_id=90,
            video_token_id=video,
        )
        seeded(Qwen2_5_VLForConditionalGeneration, config).save_pretrained(tmp_path / "model")

        class Processor:
            def apply_chat_template(self, messages: Any, **_: Any) -> str:
                return " ".join(part.get("text", "<video>") for part in messages[0]["content"])

            def __call__(self, text: list[str], videos: list[str], **options: Any) -> BatchFeature:
                assert (text, videos) == (["<video> Why?"], ["rain.mp4"])
                assert (options["fps"], options["do_sample_frames"]) == (2.0, True)
                prompt = torch.tensor([[1, 2, *[video] * (frames * 64), 5, 6]])
                return BatchFeature(
                    {
                        "input_ids": prompt,
                        "mm_token_type_ids": (prompt == video).int() * 2,
                        "pixel_values_videos": torch.randn(frames * 256, 96),
                        "video_grid_thw": torch.tensor([[frames, 16, 16]]),
                    }
                )

            def decode(self, tokens: Any, **_: Any) -> str:
                return f"{len(tokens)} tokens"

        monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda _: Processor())
        policy = save_policy(self.POLICY, tmp_path / "policy.json")
        run("video_question", model=tmp_path / "model", policy=policy, video="rain.mp4", question="Why?", tokens=3)
        stats = sparge.stats()
        assert capsys.readouterr().out.endswith(f"3 tokens\n{stats}\n")
        assert {name: layer.reasons for name, layer in stats.layers.items()} == {
            "model.visual.blocks.0.attn": {"dense: fewer than min_tokens": frames},
            **{
                f"model.language_model.layers.{index}.self_attn": {"sparse: torch": 1, "dense: decode": 2}
                for index in range(2)
            },
        }

    def test_segmentation(self, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from transformers import SamConfig, SamModel, SamProcessor
        from transformers.models.sam.image_processing_pil_sam import SamImageProcessorPil

        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 32}
        encoder = {"image_size": 96, "patch_size": 4, "num_pos_feats": 16, "output_channels": 32, "window_size": 7}
        config = SamConfig(
            vision_config={**sizes, **encoder, "global_attn_indexes": [1]},
            mask_decoder_config={**sizes, "num_hidden_layers": 1, "iou_head_hidden_dim": 32},
            prompt_encoder_config={"hidden_size": 32, "image_size": 96, "patch_size": 4},
        )
        seeded(SamModel, config).save_pretrained(tmp_path / "model")
        square = {"height": 96, "width": 96}
        SamProcessor(SamImageProcessorPil(size={"longest_edge": 96}, pad_size=square)).save_pretrained(
            tmp_path / "model"
        )
        Image.linear_gradient("L").resize((160, 120)).save(tmp_path / "image.png")
        policy = save_policy(self.POLICY, tmp_path / "policy.json")
        run("segmentation", model=tmp_path / "model", policy=policy, image="image.png", x=50, y=40)
        with Image.open(tmp_path / "mask.png") as mask:
            assert mask.size == (160, 120)
        stats = sparge.stats()
        assert capsys.readouterr().out.endswith(f"{stats}\n")
        reasons = {name: layer.reasons for name, layer in stats.layers.items()}
        assert reasons["vision_encoder.layers.0.attn"] == {"dense: fewer than min_tokens": 1}
        assert reasons["vision_encoder.layers.1.attn"] == {"sparse: torch": 1}


class TestCommandLine:
    def test_mp4_without_imageio_raises_before_loading(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("common.find_spec", lambda _: None)
        with pytest.raises(SystemExit):
            run("text_to_video", "cogvideox", output="out.mp4")
        assert "imageio" in capsys.readouterr().err

    @pytest.mark.parametrize("topk", ["50", "0", "half"])
    def test_invalid_topk_raises_before_loading(self, topk: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            run("text_to_video", "wan", model="nowhere", topk=topk)
        assert "argument --topk" in capsys.readouterr().err

    def test_policy_with_an_unknown_field(self, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "policy.json").write_text('{"dense_start": 2}')
        with pytest.raises(SystemExit):
            run("text_to_image", "flux", policy=tmp_path / "policy.json")
        assert "got dense_start" in capsys.readouterr().err


def test_published_names(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("published_names", tokens=2048, topk=0.25)
    assert sparge.stats().reasons == {"sparse: torch": 1}
    assert sparge.stats().density == 0.25
    assert "density 0.250" in capsys.readouterr().out


def test_readme_lists_every_example() -> None:
    table = (EXAMPLES / "README.md").read_text()
    scripts = {path.name for path in EXAMPLES.glob("*.py")} - {"common.py"}
    assert all(f"[{script}]({script})" in table for script in scripts)

"""Clips, captions, training, packed weights and pipeline of the tiny video model, at sizes that take seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import sparge
from conftest import move_weights

FOLDER = Path(__file__).parents[2] / "examples" / "tiny_video_dit"
MODULES = ("clips", "packing", "pipeline", "train")
CAPTION = "a red striped star moves left over the cat, the camera pans right"
SIZES = {"num_frames": 3, "height": 32, "width": 40}

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def example() -> Any:
    """Return the modules of the example, imported as its scripts import them."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield SimpleNamespace(**{name: __import__(name) for name in MODULES})
    finally:
        sys.path.remove(str(FOLDER))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def config(example: Any) -> dict[str, Any]:
    small = {"num_attention_heads": 2, "attention_head_dim": 24, "ffn_dim": 48, "num_layers": 2}
    return {**example.pipeline.TRANSFORMER, **small}


@pytest.fixture
def pipe(example: Any, config: dict[str, Any]) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel

    torch.manual_seed(0)
    transformer = WanTransformer3DModel(**config)
    made = example.pipeline.TinyVideoPipeline(transformer, FlowMatchEulerDiscreteScheduler(shift=3.0), **SIZES)
    made.set_progress_bar_config(disable=True)
    return made


def frames_of(pipe: Any, prompt: Any = CAPTION, **options: Any) -> np.ndarray:
    options = {"num_inference_steps": 2, "output_type": "np", **options}
    return pipe(prompt, generator=torch.Generator().manual_seed(0), **options).frames


class TestClips:
    def rendered(self, example: Any, seed: int, frames: int = 3) -> torch.Tensor:
        clips = example.clips
        scene = clips.draw_scenes(4, torch.Generator().manual_seed(seed))
        return clips.render(clips.Images.noise(), scene, clips.clip_times(frames), 32, 32)[0]

    def test_clips_depend_on_the_seed(self, example: Any) -> None:
        first = self.rendered(example, seed=0)
        assert torch.equal(first, self.rendered(example, seed=0))
        assert not torch.equal(first, self.rendered(example, seed=1))
        assert first.shape == (4, 3, 3, 32, 32)
        assert first.abs().max() <= 1

    def test_first_frames_do_not_depend_on_the_length(self, example: Any) -> None:
        torch.testing.assert_close(self.rendered(example, 0, frames=5)[:, :, :3], self.rendered(example, 0, frames=3))

    @pytest.mark.parametrize(
        ("word", "axis", "sign"), [("left", 0, -1), ("right", 0, 1), ("up", 1, -1), ("down", 1, 1)]
    )
    def test_shape_moves_in_the_direction_of_the_caption(self, example: Any, word: str, axis: int, sign: int) -> None:
        clips = example.clips
        black = clips.Images(torch.full((8, 3, 8, 8), -1.0), torch.ones(3, 1, 8, 8))
        words = torch.tensor([example.pipeline.slot_indices(f"white brick disc moves {word} over the cat")]) - 1
        scene = clips.Scene(words.clamp(min=0), torch.zeros(1, 3), torch.zeros(1, 3))
        light = clips.render(black, scene, clips.clip_times(17), 32, 32)[0][0, 0] + 1
        along = light.sum(1 + axis)  # (F, pixels of the axis)
        middle = (along * torch.arange(32)).sum(1) / along.sum(1)
        steps = sign * middle.diff()
        assert steps.min() > 0.3
        assert steps.sum() == pytest.approx(16, abs=0.5)  # from 1/4 to 3/4 of the frame

    def test_shape_changes_only_pixels_near_it(self, example: Any) -> None:
        clips = example.clips
        scene = clips.draw_scenes(6, torch.Generator().manual_seed(0))
        images = clips.Images.noise()
        rendered, near = clips.render(images, scene, clips.clip_times(5), 64, 64)
        others = scene._replace(words=scene.words.clone())
        others.words[:, 2] = (others.words[:, 2] + 1) % 4
        changed = (rendered - clips.render(images, others, clips.clip_times(5), 64, 64)[0]).abs().amax(1, keepdim=True)
        assert near.shape == (6, 1, 5, 64, 64)
        assert (changed * (1 - near)).max() == 0
        assert (changed * near).flatten(1).amax(1).min() > 0.1


class TestCaptions:
    def test_round_trip(self, example: Any) -> None:
        scene = example.clips.draw_scenes(50, torch.Generator().manual_seed(0))
        captions = example.clips.captions(scene)
        assert [example.pipeline.slot_indices(caption) for caption in captions] == (scene.words + 1).tolist()
        assert example.pipeline.write_caption(example.pipeline.read_caption(CAPTION)) == CAPTION

    def test_missing_slots(self, example: Any) -> None:
        assert example.pipeline.slot_indices("") == [0] * 6
        assert example.pipeline.read_caption("The camera stays.") == {"camera": "stays"}

    def test_words_have_different_tokens(self, example: Any) -> None:
        sizes = [len(words) for words in example.pipeline.SLOTS.values()]
        seen = {
            example.pipeline.one_hot_tokens(torch.tensor([[0] * slot + [1 + word] + [0] * (5 - slot)]))[0, slot]
            .argmax()
            .item()
            for slot, size in enumerate(sizes)
            for word in range(size)
        }
        assert seen == set(range(1, sum(sizes) + 1))

    @pytest.mark.parametrize(
        ("caption", "message"),
        [
            ("a red blob", "expected one of red, .* got 'blob'"),
            ("a red star moves sideways", "moves left, .* got 'moves sideways'"),
            ("a star, the camera jumps", "expected one of stays, pans left, .* got 'jumps'"),
            ("a red green star", "expected one color, got 'red' and 'green'"),
        ],
    )
    def test_errors(self, example: Any, caption: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            example.pipeline.read_caption(caption)


class TestTraining:
    @pytest.fixture
    def stage(self, example: Any) -> Any:
        return example.train.Stage(frames=2, size=32, batch=2, noise=0.4)

    def test_loss_falls_and_resuming_is_exact(
        self, example: Any, config: dict[str, Any], stage: Any, tmp_path: Path
    ) -> None:
        images = example.clips.Images.noise()
        trainer = example.train.Trainer(config, "cpu")
        before = trainer.validate(stage, images)
        trainer.enter("tiny")
        for _ in range(30):
            trainer.train_step(stage, images, rate=5.0)
        after = trainer.validate(stage, images)
        assert all(now.all < 0.97 * then.all for now, then in zip(after, before, strict=True))
        assert all(errors.near > errors.all for errors in after), "errors are larger near shapes"

        trainer.save(tmp_path / "checkpoint.pt")
        resumed = example.train.Trainer(config, "cpu")
        resumed.load(tmp_path / "checkpoint.pt")
        resumed.enter("tiny")
        assert resumed.step == resumed.stage_step == 30
        for _ in range(2):
            assert torch.equal(trainer.train_step(stage, images), resumed.train_step(stage, images))
        for kept, loaded in zip(trainer.average.parameters(), resumed.average.parameters(), strict=True):
            assert torch.equal(kept, loaded)

    def test_other_shapes(self, example: Any) -> None:
        """Each caption gets the next shape, and the last shape becomes the first; nothing else changes."""
        captions = [f"a red {shape} over the cat" for shape in ("disc", "square", "triangle", "star")] + ["a red"]
        indices = torch.tensor([example.pipeline.slot_indices(caption) for caption in captions])
        changed = example.train.other_shapes(indices)
        assert changed[:, 2].tolist() == [2, 3, 4, 1, 0]
        assert (changed != indices).sum(0).tolist() == [0, 0, 4, 0, 0, 0]

    def test_command(
        self,
        example: Any,
        config: dict[str, Any],
        stage: Any,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        random = np.random.default_rng(0)
        images = {
            "photographs": random.integers(0, 256, (8, 16, 16, 3), np.uint8),
            "textures": random.integers(0, 256, (3, 16, 16), np.uint8),
        }
        np.savez(tmp_path / "photographs.npz", **images)
        monkeypatch.setattr(example.train, "TRANSFORMER", config)
        monkeypatch.setattr(example.train, "STAGES", {"single": stage, "long": stage})
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)

        def train(*words: str) -> None:
            arguments = ["--photographs", str(tmp_path / "photographs.npz"), "--output", str(tmp_path), *words]
            monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
            example.train.main()

        train("--stages", "single:0.01", "long:0.01")
        train("--stages", "long:0.01", "--resume", str(tmp_path / "single.pt"))
        train("--stages", "long:0.01", "--weights", str(tmp_path / "weights-single"))
        assert capsys.readouterr().out.count("long done") == 3
        assert example.packing.load_packed(tmp_path / "weights-long").config.num_frames == 17
        with pytest.raises(SystemExit):
            train("--stages", "medium:1")
        assert "expected one of single, long, got medium" in capsys.readouterr().err

    def test_patch_embedding_equals_the_convolution(self, example: Any, config: dict[str, Any]) -> None:
        embedding = example.train.Trainer(config, "cpu").model.patch_embedding
        clips = torch.randn(2, config["in_channels"], 3, 16, 24)
        torch.testing.assert_close(embedding.forward(clips), type(embedding).forward(embedding, clips))

    @pytest.mark.parametrize("shape", [(3, 8, 8), (2, 6, 12), (2, 12, 6)])
    def test_patch_embedding_is_orthogonal(self, example: Any, shape: tuple[int, int, int]) -> None:
        matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(example.train.orthogonal(matrices))
        assert values.min() > 0.3
        assert values.max() < 1.3


class TestPacking:
    def test_error_is_at_most_half_a_scale(self, example: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        tensors = {
            "matrix": torch.randn(7, 33, generator=generator),
            "kernel": torch.randn(5, 3, 1, 2, 2, generator=generator),
            "bias": torch.randn(9, generator=generator),
            "empty": torch.zeros(2, 4),
        }
        packed = example.packing.pack_tensors(tensors)
        assert packed["matrix"].dtype == packed["kernel"].dtype == torch.int8
        unpacked = example.packing.unpack_tensors(packed)
        assert unpacked.keys() == tensors.keys()
        for name in ("matrix", "kernel", "empty"):
            scale = tensors[name].flatten(1).abs().amax(1) / 127
            error = (unpacked[name] - tensors[name]).flatten(1).abs().amax(1)
            assert (error <= 0.5001 * scale).all()
        torch.testing.assert_close(unpacked["bias"], tensors["bias"], rtol=2**-11, atol=0)

    def test_parts_and_pipeline(self, example: Any, pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(example.packing, "PART_BYTES", 40_000)
        paths = example.packing.save_packed(pipe.transformer, tmp_path, shift=3.0, **SIZES)
        assert len(paths) > 2
        loaded = example.packing.load_packed(tmp_path)
        loaded.set_progress_bar_config(disable=True)
        assert loaded.scheduler.config.shift == 3.0
        np.testing.assert_allclose(frames_of(loaded), frames_of(pipe), atol=0.05)

    def test_without_weights(self, example: Any, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="expected packed weights"):
            example.packing.load_packed(tmp_path)


@pytest.fixture(scope="module")
def predicted_frames(example: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two frames (3, H, W) in [-1, 1] that the trained model predicts from noise."""
    trained = example.packing.load_packed(FOLDER / "weights")  # strict loading: no key may be missing
    captions = (
        "a red gravel square moves right over the rocket, the camera stays",
        "a green gravel triangle moves left over the rocket, the camera stays",
    )
    words = torch.tensor([example.pipeline.slot_indices(caption) for caption in captions])
    noise = torch.randn(1, 3, 1, 256, 256, generator=torch.Generator().manual_seed(0)).expand(2, -1, -1, -1, -1)
    with torch.no_grad():
        frames = trained._clean(noise, torch.tensor(1000.0), example.pipeline.one_hot_tokens(words))[:, :, 0]
    return frames[0], frames[1]


class TestWeights:
    """The output depends on every word. At the start of a clip, the shape is 64 pixels left or right of the center."""

    def test_file_sizes(self) -> None:
        assert all(path.stat().st_size < 15 * 2**20 for path in (FOLDER / "weights").iterdir())

    def test_color_and_motion(self, predicted_frames: tuple[torch.Tensor, torch.Tensor]) -> None:
        square, triangle = predicted_frames
        inside = slice(112, 144)
        assert (square[0, inside, 48:80] - square[1, inside, 48:80]).mean() > 0.5, "red on the left"
        assert (triangle[1, inside, 176:208] - triangle[0, inside, 176:208]).mean() > 0.5, "green on the right"
        sky = (square[0, inside, 176:208] - square[1, inside, 176:208]).mean()
        assert abs(sky) < 0.2

    def test_shape(self, predicted_frames: tuple[torch.Tensor, torch.Tensor]) -> None:
        """The upper corners of a square have its color; those of a triangle show the background."""
        square, triangle = (
            (frame[color] - frame[1 - color])[84:100, places].mean()
            for frame, color, places in (
                (predicted_frames[0], 0, slice(20, 36)),
                (predicted_frames[1], 1, slice(148, 164)),
            )
        )
        assert square > 0.6 > 0.3 > triangle


class TestRecordings:
    def test_recorded_parts(self, pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Recordings have the head, the queries of the third frame and the keys of the first frames, as requested."""
        from benchmarks import capture

        from sparge.evaluate import Recorder

        for name, value in {"FRAME": 20, "KEY_FRAMES": 2, "VIDEO_HEADS": {(0, 1): 1, (1, 0): 0}}.items():
            monkeypatch.setattr(capture, name, value)
        first, second = capture.video_calls(pipe, [(0, 1), (1, 0)], num_inference_steps=2)
        assert (first.layer, first.step) == ("transformer.blocks.0.attn1", 1)
        assert (second.layer, second.step) == ("transformer.blocks.1.attn1", 0)
        recorder = Recorder(layers=r"\.0\.", steps=[1])
        with recorder.recording(pipe):
            pipe(CAPTION, num_inference_steps=2, generator=torch.Generator().manual_seed(0))
        whole = recorder.calls[0]
        assert torch.equal(first.query, whole.query[:, 1:, 40:60])
        assert torch.equal(first.key, whole.key[:, 1:, :40]) and torch.equal(first.value, whole.value[:, 1:, :40])


class TestPipeline:
    def test_save_and_load(self, pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from diffusers import DiffusionPipeline

        monkeypatch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
        expected = frames_of(pipe)
        pipe.save_pretrained(tmp_path / "first")
        loaded = DiffusionPipeline.from_pretrained(tmp_path / "first", trust_remote_code=True)
        loaded.save_pretrained(tmp_path / "second")
        again = type(loaded).from_pretrained(tmp_path / "second", trust_remote_code=True)
        for copied in (loaded, again):
            copied.set_progress_bar_config(disable=True)
            move_weights(copied.transformer)
            assert type(copied) is not type(pipe)  # from the file in the folder
            assert np.array_equal(frames_of(copied), expected)
        assert json.loads((tmp_path / "second" / "model_index.json").read_text())["_class_name"][0] == "pipeline"

    def test_output_types(self, pipe: Any) -> None:
        array = frames_of(pipe, [CAPTION, ""])
        assert array.shape == (2, 3, 32, 40, 3)
        tensor = frames_of(pipe, [CAPTION, ""], output_type="pt")
        np.testing.assert_array_equal(tensor.permute(0, 1, 3, 4, 2).numpy(), array)
        images = frames_of(pipe, [CAPTION, ""], output_type="pil")
        assert [len(clip) for clip in images] == [3, 3]
        assert np.abs(np.asarray(images[1][2]) / 255 - array[1, 2]).max() <= 0.5001 / 255

    def test_output_depends_on_prompt_and_guidance(self, pipe: Any) -> None:
        first = frames_of(pipe)
        assert np.array_equal(first, frames_of(pipe))
        assert not np.array_equal(first, frames_of(pipe, "a blue disc"))
        assert not np.array_equal(first, frames_of(pipe, guidance_scale=1.0))
        np.testing.assert_array_equal(frames_of(pipe, "", guidance_scale=5.0), frames_of(pipe, "", guidance_scale=1.0))

    def test_callback(self, pipe: Any) -> None:
        seen = []

        def at_end(_: Any, step: int, timestep: torch.Tensor, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
            seen.append((step, float(timestep)))
            return {"latents": torch.zeros_like(tensors["latents"])}

        assert (frames_of(pipe, callback_on_step_end=at_end) == 0.5).all()
        assert [step for step, _ in seen] == [0, 1]
        assert seen[0][1] > seen[1][1]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"height": 36}, "height: expected a positive multiple of 8, got 36"),
            ({"width": 0}, "width: expected a positive multiple of 8, got 0"),
            ({"num_frames": 0}, "num_frames: expected a positive multiple of 1, got 0"),
            ({"output_type": "gif"}, "output_type: expected one of pil, np, pt, latent, got 'gif'"),
            ({"callback_on_step_end_tensor_inputs": ["text"]}, "expected latents, got text"),
        ],
    )
    def test_errors(self, pipe: Any, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            frames_of(pipe, **options)

    def test_sparse_attention(self, pipe: Any) -> None:
        policy = sparge.Policy(sparsity=sparge.TopK(0.5, min_blocks=1), backend="torch", dense_first_steps=0.5)
        sparge.enable(pipe, policy)
        frames_of(pipe, num_frames=2, height=128, width=128)  # 512 tokens: 4 x 8 blocks
        sparge.disable(pipe)
        layers = sparge.stats().layers
        assert {name for name in layers if name.endswith("attn1")} == {
            f"transformer.blocks.{block}.attn1" for block in range(2)
        }
        assert layers["transformer.blocks.0.attn1"].reasons == {"dense: dense step": 2, "sparse: torch": 2}

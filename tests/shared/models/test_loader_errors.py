"""A folder that cannot be served is refused with the file, the key and the limit by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.errors import CheckpointError
from shared.models.decoder import Decoder
from shared.models.loader import load_decoder
from tests.helpers.checkpoints import TinyShape, write_checkpoint

CPU = torch.device("cpu")


def load(folder: Path) -> Decoder:
    return load_decoder(folder, dtype=torch.float32, device=CPU)


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: v for key, v in values.items() if v != "absent"}))


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def test_missing_folder_names_the_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere/config.json cannot be read: No such"):
        load(tmp_path / "nowhere")


def test_config_that_is_not_json_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is not JSON"):
        load(folder)


def test_config_that_is_no_object_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config.json holds a list; it must be an object"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["Qwen4ForCausalLM"]},
            r"\['Qwen4ForCausalLM'\], .* nearest supported: Qwen3ForCausalLM; all .*: Llama",
        ),
        ({"architectures": "absent"}, r"architectures is \[\]"),
        ({"hidden_size": "absent"}, r"config.json has no hidden_size"),
        ({"hidden_size": "wide"}, r"hidden_size is 'wide'; it must be of type int"),
        ({"num_hidden_layers": True}, r"num_hidden_layers is True; it must be of type int"),
        ({"num_key_value_heads": 3}, r"num_attention_heads is 4; .* num_key_value_heads, 3"),
        ({"rope_parameters": {"rope_type": "spiral"}}, r"'spiral'; it must be one of default"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, r"partial_rotary_factor is 1.5"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"config.json has no factor"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; it must be an object"),
        ({"eos_token_id": ["x"]}, r"eos_token_id is \['x'\]; it must be a list of int"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'; it must be 'silu'"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config"),
        ({"head_dim": 7}, r"head_dim is 7; it must be even"),
    ],
)
def test_config_at_fault_is_named(folder: Path, changes: dict[str, object], message: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_folder_without_weights_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model has neither model.safetensors nor pytorch"):
        load(folder)


@pytest.mark.parametrize("num_bytes", [0, 100, 20_000])
def test_truncated_file_is_named(folder: Path, num_bytes: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        load(folder)


def test_missing_key_is_named(folder: Path) -> None:
    edit_weights(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks model.layers.1.mlp.up_proj.weight"):
        load(folder)


def test_many_missing_keys_are_counted(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=5)
    with pytest.raises(CheckpointError, match=r"lacks model.layers.3.* and 13 more"):
        load(folder)


def test_unexpected_key_is_named(folder: Path) -> None:
    edit_weights(folder, lambda t: t.update({"model.layers.0.extra.weight": torch.ones(1)}))
    with pytest.raises(CheckpointError, match=r"does not use: model.layers.0.extra.weight"):
        load(folder)


def test_wrong_shape_names_both_shapes(folder: Path) -> None:
    edit_config(folder, vocab_size=300)
    with pytest.raises(
        CheckpointError,
        match=r"safetensors: model.embed_tokens.weight has shape \[258, 32\]; .* \[300, 32\]",
    ):
        load(folder)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", max_shard_size="20KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        load(folder)


def test_index_that_names_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", max_shard_size="20KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    key = "model.norm.weight"
    index["weight_map"][key] = next(f for f in files if f != index["weight_map"][key])
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks model.norm.weight, which the index places"):
        load(folder)


def test_pickle_with_code_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": print}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin cannot be read"):
        load(folder)


def test_pickled_weights_load_like_safetensors(folder: Path) -> None:
    expected = load(folder)
    path = folder / "model.safetensors"
    torch.save(load_file(path), folder / "pytorch_model.bin")
    path.unlink()
    assert torch.equal(load(folder).embedding, expected.embedding)


def test_buffers_that_checkpoints_carry_are_tolerated(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", shape=TinyShape(tie_word_embeddings=True))
    head = torch.zeros(258, 32)
    edit_weights(
        folder,
        lambda t: t.update(
            {
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
                "lm_head.weight": head,
            }
        ),
    )
    decoder = load(folder)
    assert decoder.logits(decoder.norm(torch.ones(1, 32))).abs().max() > 0


def test_next_token_layers_of_mimo_are_left_to_the_draft(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "qwen2")
    edit_config(folder, architectures=["MiMoForCausalLM"])
    edit_weights(
        folder, lambda t: t.update({"model.mtp_layers.0.input_proj.weight": torch.ones(1)})
    )
    assert load(folder).config.has_qkv_bias


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_cast(folder: Path, dtype: torch.dtype) -> None:
    decoder = load_decoder(folder, dtype=dtype, device=CPU)
    assert decoder.dtype == decoder.norm.weight.dtype == dtype
    assert decoder.logits(torch.ones(2, 32, dtype=dtype)).dtype == torch.float32


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_on_a_terminal_when_asked(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: bool,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    capsys.readouterr()
    load(folder)
    assert capsys.readouterr().err == ""
    load_decoder(folder, dtype=torch.float32, device=CPU, show_progress=True)
    assert ("weights: 100%" in capsys.readouterr().err) is is_terminal

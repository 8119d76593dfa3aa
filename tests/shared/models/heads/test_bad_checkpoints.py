"""What is wrong with a head is said at load, with the key and the shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.errors import CheckpointError
from shared.models.heads.config import HeadKind
from shared.models.heads.loader import load_head, read_token_map
from shared.models.heads.target_tensors import TargetFolder
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.draft_heads import TinyHead, head_config, head_tensors, save_head

CPU = torch.device("cpu")
EAGLE = TinyHead()
EAGLE3 = TinyHead(kind="EAGLE3", draft_vocab_size=20)
Change = Callable[[dict[str, Any], dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetFolder:
    shape = TinyShape(vocab_size=64, num_layers=6)
    folder = write_checkpoint(tmp_path_factory.mktemp("target"), shape=shape)
    return TargetFolder(folder, dtype=torch.float32, device=CPU)


def _refusal(folder: Path, head: TinyHead, target: TargetFolder, change: Change) -> str:
    config, tensors = head_config(head), head_tensors(head)
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_head(folder, tensors)
    with pytest.raises(CheckpointError) as caught:
        load_head(folder, HeadKind(head.kind), target, dtype=torch.float32, device=CPU)
    return caught.value.message


@pytest.mark.parametrize(
    ("head", "change", "parts"),
    [
        (EAGLE3, lambda c, t: t.pop("d2t"), ["d2t is missing", "20", "64"]),
        (EAGLE3, lambda c, t: t.pop("lm_head.weight"), ["lm_head.weight is missing", "20"]),
        (EAGLE3, lambda c, t: t.update(d2t=t["d2t"][:19]), ["d2t", "[19]", "[20]"]),
        (EAGLE3, lambda c, t: t.update(d2t=t["d2t"] + 60), ["d2t", "[0, 64)"]),
        (EAGLE3, lambda c, t: c.update(draft_vocab_size=21), ["lm_head.weight", "[20, 32]", "21"]),
        (EAGLE3, lambda c, t: c.update(draft_vocab_size=65), ["draft_vocab_size is 65", "64"]),
        (EAGLE3, lambda c, t: c.update(target_hidden_size=16), ["target_hidden_size is 16", "32"]),
        (EAGLE3, lambda c, t: t.pop("midlayer.hidden_norm.weight"), ["midlayer.hidden_norm"]),
        (
            EAGLE3,
            lambda c, t: c.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 3]}),
            ["fc.weight", "[32, 96]", "[32, 64]"],
        ),
        (
            EAGLE3,
            lambda c, t: c.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 3, 9]}),
            ["[2, 3, 9]", "[0, 6]"],
        ),
        (EAGLE, lambda c, t: c.update(hidden_size=16), ["hidden_size is 16", "32"]),
        (EAGLE, lambda c, t: c.update(num_hidden_layers=2), ["num_hidden_layers is 2", "1 layer"]),
        (EAGLE, lambda c, t: t.pop("fc.weight"), ["lacks fc.weight"]),
        (
            EAGLE,
            lambda c, t: t.update({"layers.1.self_attn.q_proj.weight": torch.zeros(2)}),
            ["layers.1.self_attn.q_proj.weight", "does not use"],
        ),
        (
            EAGLE,
            lambda c, t: t.update({"embed_tokens.weight": torch.zeros(63, 32)}),
            ["embed_tokens.weight", "[63, 32]", "[64, 32]"],
        ),
        (EAGLE, lambda c, t: c.update(hidden_act="gelu"), ["gelu"]),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    head: TinyHead, change: Change, parts: list[str], tmp_path: Path, target: TargetFolder
) -> None:
    message = _refusal(tmp_path, head, target, change)
    assert [part for part in parts if part not in message] == [], message
    assert str(tmp_path) in message


def test_a_head_of_another_width_needs_its_own_embedding(
    tmp_path: Path, target: TargetFolder
) -> None:
    head = TinyHead(
        kind="EAGLE3", hidden_size=24, head_dim=6, draft_vocab_size=20, has_embedding=False
    )
    message = _refusal(tmp_path, head, target, lambda c, t: None)
    assert message.startswith(str(tmp_path))
    assert "embed_tokens.weight is missing; the target's is 32 wide" in message
    assert "hidden_size is 24" in message


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_truncated_file_is_refused(suffix: str, tmp_path: Path, target: TargetFolder) -> None:
    (tmp_path / "config.json").write_text(json.dumps(head_config(EAGLE)))
    save_head(tmp_path, head_tensors(EAGLE), suffix=suffix)
    (path,) = [path for path in tmp_path.iterdir() if path.suffix == f".{suffix}"]
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        load_head(tmp_path, HeadKind.EAGLE, target, dtype=torch.float32, device=CPU)
    assert path.name in caught.value.message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1, 2, 64]", "holds id 64; ids must be in [0, 64)"),
        ("[1, 2, 1]", "3 ids, of which 2 are distinct"),
        ("[]", "shape [0]"),
        ('{"a": 1}', "holds dict"),
        ("[1, 2", "cannot be read"),
    ],
)
def test_a_bad_token_map_is_refused(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(content)
    with pytest.raises(CheckpointError) as caught:
        read_token_map(path, 64)
    assert said in caught.value.message
    assert str(path) in caught.value.message

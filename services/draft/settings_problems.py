"""Checks a draft's settings against each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from services.draft.algorithm import Algorithm
from shared.hub import shown_name
from shared.model_options import device_problems
from shared.models.config_file import ConfigFile
from shared.models.heads.block_size import read_block_size
from shared.settings import address_problems, tls_problems
from shared.settings_field import declared_fields
from shared.tokens import TreeShape

if TYPE_CHECKING:
    from services.draft.settings import DraftSettings

DEMO = Path(__file__).parents[2] / "shared" / "demo"
DEMO_DRAFT = DEMO / "draft"
DEMO_TARGET = DEMO / "target"
DEMO_HEADS = DEMO / "heads"
_LAYER_COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_WEIGHTS_INDEX = "model.safetensors.index.json"
# Qwen3-Next's config has no key for its layers, so the weight names are checked.
_LAYER_PREFIX = "mtp.layers."


def has_next_token_layers(folder: Path) -> bool:
    """Whether a target has next-token layers (MTP); False where the folder has no config."""
    path, index = folder / "config.json", folder / _WEIGHTS_INDEX
    if not path.is_file():
        return False
    config = ConfigFile.read(path)
    for section in (config, config.nested("text_config")):
        if any(section.integer(key, 0) > 0 for key in _LAYER_COUNT_KEYS):
            return True
    weights = ConfigFile.read(index).nested("weight_map") if index.is_file() else ()
    return any(key.startswith(_LAYER_PREFIX) for key in weights)


def default_model_folder(algorithm: Algorithm, target_folder: Path) -> Path:
    """Returns the default folder of a drafter's model.

    Args:
        target_folder: folder of the target that a head belongs to.
    """
    if algorithm is Algorithm.MTP and target_folder.resolve() != DEMO_TARGET.resolve():
        # A target's next-token layers are in its own folder.
        return target_folder
    return DEMO_HEADS / algorithm.value.lower() if algorithm.reads_features else DEMO_DRAFT


MAX_TREE_DEPTH = 32
CHAIN_SHAPE = TreeShape(num_steps=3, topk=1, num_draft_tokens=4)
LLAMA_HEAD_SHAPE = TreeShape(num_steps=5, topk=4, num_draft_tokens=8)
MIMO_SHAPE = TreeShape(num_steps=1, topk=1, num_draft_tokens=2)
NGRAM_DRAFT_TOKENS = 12
_WIDE_FAMILIES = ("Llama", "Grok")

GivenShape = tuple[int | None, int | None, int | None]
"""Steps, topk and tokens; None where a setting is unset."""


def completed(given: GivenShape, default: TreeShape, *, is_block: bool) -> TreeShape:
    """Returns the shape that is set, completed as SGLang completes it.

    Args:
        given: a whole shape, nothing, or a part for which `is_completable` holds.
        default: the algorithm's default shape.
        is_block: whether it is for a DFLASH head, where tokens alone are the rows of a block.
    """
    steps, topk, tokens = given
    if is_block and tokens is not None and steps in (None, 1) and topk in (None, 1):
        return _chain(tokens - 1)
    if topk == 1 and not is_block:
        return _chain(steps or (tokens - 1 if tokens else default.num_steps))
    if steps is not None and topk is not None and tokens is not None:
        return TreeShape(steps, topk, tokens)
    return default


def is_completable(given: GivenShape, algorithm: Algorithm) -> bool:
    """Whether the given parts define one shape: all parts, none, a chain, or the tokens of NGRAM or
    DFLASH, which have other flags for the rest."""
    num_set = sum(value is not None for value in given)
    if num_set in (0, 3):
        return True
    if algorithm in (Algorithm.NGRAM, Algorithm.DFLASH):
        return given[:2] == (None, None)
    return given[1] == 1


def completed_ngram(given: GivenShape, max_trie_depth: int, max_breadth: int) -> TreeShape:
    """Returns the shape that is set, else one as deep and wide as the n-gram options allow."""
    steps, topk, tokens = given
    if steps is not None and topk is not None and tokens is not None:
        return TreeShape(steps, topk, tokens)
    return TreeShape(
        num_steps=min(max_trie_depth - 1, MAX_TREE_DEPTH),
        topk=max_breadth,
        num_draft_tokens=tokens or min(max_trie_depth, NGRAM_DRAFT_TOKENS),
    )


def _chain(num_steps: int) -> TreeShape:
    return TreeShape(num_steps, 1, num_steps + 1)


def model_shape(
    algorithm: Algorithm, model_folder: Path, target_folder: Path, *, block_size: int | None
) -> TreeShape:
    """Returns the default shape of an algorithm that has a model.

    Args:
        block_size: block size of a DFLASH head; None takes the checkpoint's.

    Raises:
        CheckpointError: a head's shape depends on a config.json that is not readable.
    """
    if algorithm is Algorithm.DFLASH:
        size = block_size or read_block_size(ConfigFile.read(model_folder / "config.json"))
        return _chain(size - 1)
    if not algorithm.reads_features:
        return CHAIN_SHAPE
    # MiMo's layer was trained for one step.
    if algorithm is Algorithm.MTP and _is_of_family(target_folder, ("MiMo",)):
        return MIMO_SHAPE
    is_wide = _is_of_family(target_folder, _WIDE_FAMILIES)
    return LLAMA_HEAD_SHAPE if is_wide else CHAIN_SHAPE


def _is_of_family(folder: Path, families: tuple[str, ...]) -> bool:
    names = ConfigFile.read(folder / "config.json").texts("architectures")
    return any(name.startswith(families) for name in names)


_MODEL_SETTINGS = frozenset(
    {
        "speculative_draft_model_path",
        "speculative_draft_load_format",
        "speculative_draft_model_quantization",
        "speculative_attention_mode",
        "speculative_draft_attention_backend",
        "speculative_draft_window_size",
        "tp_size",
    }
)


def settings_problems(settings: DraftSettings) -> Iterator[str]:
    """Yields a line for each problem."""
    if not is_completable(settings.given_shape, settings.algorithm):
        yield (
            "a tree needs all of --speculative-num-steps, --speculative-eagle-topk and "
            "--speculative-num-draft-tokens, for example 3, 4 and 16; a chain needs "
            "--speculative-eagle-topk 1 and perhaps one of the others; none of them: automatic"
        )
    if settings.speculative_algorithm is Algorithm.NGRAM:
        yield from _ngram_problems(settings)
    yield from _head_problems(settings)
    window, context = settings.speculative_draft_window_size, settings.context_length
    if window is not None and context is not None and window > context:
        yield (
            f"--speculative-draft-window-size is {window}; it must not exceed --context-length, "
            f"{context}"
        )
    yield from device_problems(settings.device)
    yield from address_problems("--target", settings.target)
    if not settings.target or len(set(settings.target)) < len(settings.target):
        yield "--target: give at least one address, and none twice"
    yield from tls_problems(settings)


def _ngram_problems(settings: DraftSettings) -> Iterator[str]:
    low = settings.speculative_ngram_min_bfs_breadth
    high = settings.speculative_ngram_max_bfs_breadth
    if low > high:
        yield (
            f"--speculative-ngram-min-bfs-breadth is {low}; it must not exceed "
            f"--speculative-ngram-max-bfs-breadth, {high}"
        )
    for field in declared_fields(type(settings)):
        if field.name in _MODEL_SETTINGS and getattr(settings, field.name) != field.default:
            yield f"{field.flag}: NGRAM has no model"


def _head_problems(settings: DraftSettings) -> Iterator[str]:
    algorithm, name = settings.algorithm, settings.speculative_algorithm.value
    if settings.speculative_token_map is not None and not algorithm.takes_token_map:
        yield f"--speculative-token-map: {name} has no head to confine; EAGLE has"
    if settings.target_model_path is not None and not algorithm.reads_features:
        yield f"--target-model-path: {name} reads nothing of the target; EAGLE does"
    block_size = settings.speculative_dflash_block_size
    if block_size is not None and algorithm is not Algorithm.DFLASH:
        yield f"--speculative-dflash-block-size: {name} drafts no blocks; DFLASH does"
    if block_size is not None and algorithm is Algorithm.DFLASH:
        yield from block_problems(settings, block_size)
    if settings.enable_cuda_graph and not algorithm.takes_cuda_graphs:
        yield (
            f"--enable-cuda-graph: {name} runs without graphs; STANDALONE, EAGLE, EAGLE3 and MTP "
            f"have them"
        )
    if settings.tp_size > 1 and algorithm.reads_features:
        yield (
            f"--tp-size is {settings.tp_size}; {name} drafts by a head of a few layers, which one "
            f"GPU reads faster than several add up its parts; STANDALONE models can be cut"
        )


def block_problems(settings: DraftSettings, block_size: int) -> Iterator[str]:
    """Yields a line for each part of the set shape that does not fit blocks of this size."""
    steps, topk, tokens = settings.given_shape
    if steps is not None and steps >= block_size:
        yield (
            f"--speculative-num-steps is {steps}; a block of {block_size} rows drafts "
            f"{block_size - 1} tokens"
        )
    if topk == 1 and tokens is not None and tokens > block_size:
        yield (
            f"--speculative-num-draft-tokens is {tokens}; a chain over a block has {block_size} "
            f"rows; for a tree set --speculative-eagle-topk above 1"
        )


def missing_model(settings: DraftSettings) -> Iterator[str]:
    """Yields a line if a head is needed and the settings, whose paths are local, name none."""
    algorithm = settings.algorithm
    is_named = settings.speculative_draft_model_path is not None or settings.is_of_demo
    if not is_named and algorithm.reads_features and algorithm is not Algorithm.MTP:
        name, target = settings.speculative_algorithm.value, shown_name(settings.target_folder)
        yield (
            f"--speculative-draft-model-path: {name} needs a head that was trained for {target}, "
            f"which has no next-token layers of its own, and the demo's heads fit the demo model "
            f"alone; --speculative-algorithm NGRAM needs no model"
        )

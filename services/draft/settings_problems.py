"""Checks a draft's settings against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.draft.algorithm import Algorithm
from services.draft.shapes import is_completable
from shared.addresses import address_problems
from shared.hub import shown_name
from shared.model_options import device_problems
from shared.service_settings import tls_problems
from shared.settings_field import declared_fields

if TYPE_CHECKING:
    from services.draft.settings import DraftSettings

_OF_A_MODEL = frozenset(
    {
        "speculative_draft_model_path",
        "speculative_draft_load_format",
        "speculative_draft_model_quantization",
        "speculative_attention_mode",
        "speculative_draft_attention_backend",
        "speculative_draft_window_size",
        "enable_torch_compile",
        "tp_size",
    }
)


def settings_problems(settings: DraftSettings) -> tuple[str, ...]:
    """Returns a line for each thing that is wrong, none when all is well."""
    return (
        *_shape_problems(settings),
        *_ngram_problems(settings),
        *_head_problems(settings),
        *_compile_problems(settings),
        *_tp_problems(settings),
        *_window_problems(settings),
        *device_problems(settings.device),
        *_target_problems(settings),
        *tls_problems(settings),
    )


def _shape_problems(settings: DraftSettings) -> tuple[str, ...]:
    if is_completable(settings.given_shape, settings.algorithm):
        return ()
    return (
        "a tree needs all of --speculative-num-steps, --speculative-eagle-topk and "
        "--speculative-num-draft-tokens, for example 3, 4 and 16; a chain needs "
        "--speculative-eagle-topk 1 and perhaps one of the others; none of them: automatic",
    )


def _ngram_problems(settings: DraftSettings) -> tuple[str, ...]:
    if settings.speculative_algorithm is not Algorithm.NGRAM:
        return ()
    low = settings.speculative_ngram_min_bfs_breadth
    high = settings.speculative_ngram_max_bfs_breadth
    problems = []
    if low > high:
        problems.append(
            f"--speculative-ngram-min-bfs-breadth is {low}; it must not exceed "
            f"--speculative-ngram-max-bfs-breadth, {high}"
        )
    problems += [
        f"{field.flag}: NGRAM has no model"
        for field in declared_fields(type(settings))
        if field.name in _OF_A_MODEL and getattr(settings, field.name) != field.default
    ]
    return tuple(problems)


def _head_problems(settings: DraftSettings) -> tuple[str, ...]:
    algorithm, name = settings.algorithm, settings.speculative_algorithm.value
    problems = []
    # EAGLE3 heads ignore a map, and say so.
    if settings.speculative_token_map is not None and not algorithm.takes_token_map:
        problems.append(f"--speculative-token-map: {name} has no head to confine; EAGLE has")
    if settings.target_model_path is not None and not algorithm.reads_features:
        problems.append(f"--target-model-path: {name} reads nothing of the target; EAGLE does")
    block_size = settings.speculative_dflash_block_size
    if block_size is not None and algorithm is not Algorithm.DFLASH:
        problems.append(f"--speculative-dflash-block-size: {name} drafts no blocks; DFLASH does")
    if block_size is not None and algorithm is Algorithm.DFLASH:
        problems += block_problems(settings, block_size)
    return tuple(problems)


def block_problems(settings: DraftSettings, block_size: int) -> tuple[str, ...]:
    """Returns what is wrong with the shape that is set, if any is, for blocks of this size."""
    steps, topk, tokens = settings.given_shape
    problems = []
    if steps is not None and steps >= block_size:
        problems.append(
            f"--speculative-num-steps is {steps}; a block of {block_size} rows drafts "
            f"{block_size - 1} tokens"
        )
    if topk == 1 and tokens is not None and tokens > block_size:
        problems.append(
            f"--speculative-num-draft-tokens is {tokens}; a chain over a block has {block_size} "
            f"rows; for a tree set --speculative-eagle-topk above 1"
        )
    return tuple(problems)


def missing_model(settings: DraftSettings) -> tuple[str, ...]:
    """Returns a line if a head is needed that nothing names. Paths are local by now."""
    algorithm = settings.algorithm
    is_named = settings.speculative_draft_model_path is not None or settings.is_of_demo
    if is_named or not algorithm.reads_features or algorithm is Algorithm.MTP:
        return ()
    name, target = settings.speculative_algorithm.value, shown_name(settings.target_folder)
    return (
        f"--speculative-draft-model-path: {name} needs a head that was trained for {target}, which "
        f"has no next-token layers of its own, and the demo's heads fit the demo model alone; "
        f"--speculative-algorithm NGRAM needs no model",
    )


def _compile_problems(settings: DraftSettings) -> tuple[str, ...]:
    problems = []
    if settings.torch_compile_max_bs is not None and not settings.enable_torch_compile:
        problems.append("--torch-compile-max-bs: set --enable-torch-compile, too, or neither")
    if settings.enable_cuda_graph and not settings.algorithm.takes_cuda_graphs:
        name = settings.speculative_algorithm.value
        problems.append(
            f"--enable-cuda-graph: {name} runs without graphs; STANDALONE, EAGLE, EAGLE3 and MTP "
            f"have them"
        )
    if settings.enable_cuda_graph and settings.enable_torch_compile:
        problems.append("--enable-cuda-graph: graphs hold what is not compiled; set one")
    return tuple(problems)


def _tp_problems(settings: DraftSettings) -> tuple[str, ...]:
    size, algorithm = settings.tp_size, settings.algorithm
    if size == 1:
        return ()
    problems = []
    if algorithm.reads_features:
        problems.append(
            f"--tp-size is {size}; {settings.speculative_algorithm.value} drafts by a head of a "
            f"few layers, which one GPU reads faster than several add up its parts; STANDALONE "
            f"models can be cut"
        )
    if settings.enable_torch_compile:
        problems.append(
            f"--enable-torch-compile needs the model on one device; --tp-size is {size}"
        )
    return tuple(problems)


def _window_problems(settings: DraftSettings) -> tuple[str, ...]:
    window, context = settings.speculative_draft_window_size, settings.context_length
    if window is None or context is None or window <= context:
        return ()
    return (
        f"--speculative-draft-window-size is {window}; it must not exceed --context-length, "
        f"{context}",
    )


def _target_problems(settings: DraftSettings) -> tuple[str, ...]:
    problems = address_problems("--target", settings.target)
    if not settings.target or len(set(settings.target)) < len(settings.target):
        problems += ("--target: give at least one address, and none twice",)
    return problems

"""Commands of the trainer."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from services.draft.training.acceptance import Acceptance, measure_acceptance
from services.draft.training.block_head import BlockHead
from services.draft.training.documents import (
    Documents,
    Source,
    TextReader,
    Windows,
    frequent_tokens,
    write_token_map,
)
from services.draft.training.frozen_target import FrozenTarget, HeadSizes
from services.draft.training.generation import end_token_ids, own_documents, write_answers
from services.draft.training.head_shape import Algorithm
from services.draft.training.heads import (
    Head,
    begin_from_target,
    build_head,
    load_head,
    save_head,
)
from services.draft.training.objectives import (
    BlockObjective,
    LossTerms,
    Objective,
    RecurrentObjective,
)
from services.draft.training.optimisers import Optimisers, averaged
from services.draft.training.trainer import LOG_FILE, Ranks, Trainer, TrainingPlan, joined
from services.draft.training.training_log import draw_curves, read_log
from shared.errors import CheckpointError
from shared.models.heads.loader import read_token_map

UNROLL = {Algorithm.EAGLE: 1, Algorithm.EAGLE3: 5, Algorithm.MTP: 3}


def tokenize(arguments: argparse.Namespace) -> None:
    """Writes an archive of the texts."""
    reader = TextReader(arguments.target)
    rows = [row for path in arguments.texts for row in reader.documents(path)]
    _save(Documents.of(rows), arguments.out)


def generate(arguments: argparse.Namespace) -> None:
    """Writes an archive of prompts with the target's answers."""
    reader = TextReader(arguments.target)
    prompts = [row for path in arguments.prompts for row in reader.prompts(path)]
    with tqdm(total=len(prompts), disable=None, unit="prompt") as bar:
        documents = own_documents(
            _target(arguments, arguments.device),
            prompts,
            max_new_tokens=arguments.max_new_tokens,
            temperatures=arguments.temperatures,
            batch_size=arguments.batch_size,
            seed=arguments.seed,
            progress=bar.update,
        )
    _save(documents, arguments.out)


def make_token_map(arguments: argparse.Namespace) -> None:
    """Writes the frequent tokens of the data, those that end an answer among them."""
    target = FrozenTarget.load(arguments.target, device=torch.device("cpu"), dtype=torch.bfloat16)
    sources = [Documents.load(path) for path, _ in arguments.data]
    token_ids, covered = frequent_tokens(
        sources,
        size=arguments.size,
        vocab_size=len(target.embedding),
        always=end_token_ids(target),
    )
    write_token_map(token_ids, arguments.out)
    print(f"{len(token_ids)} tokens cover {covered:.2%} of the text")


def train(arguments: argparse.Namespace) -> None:
    """Trains a head and draws its curves."""
    with joined(arguments.device) as ranks:
        target = _target(arguments, ranks.device)
        objective = _objective(arguments, target, _head(arguments, target))
        plan = _plan(arguments)
        trainer = Trainer(
            plan,
            objective,
            target,
            _windows(arguments),
            Optimisers(
                objective.head,
                arguments.optimiser,
                rate=arguments.rate,
                decay=arguments.weight_decay,
            ),
            ranks,
        )
        if arguments.resume:
            trainer.resume()
        trainer.run()
        if ranks.is_first:
            _report(arguments.algorithm, plan, ranks)


def average(arguments: argparse.Namespace) -> None:
    """Writes the mean of heads."""
    folders, shares = zip(*arguments.head, strict=True)
    save_head(averaged([load_head(folder) for folder in folders], shares), arguments.out)


def evaluate(arguments: argparse.Namespace) -> None:
    """Prints, and writes if asked, the accepted length of every head on the same answers."""
    target = _target(arguments, arguments.device)
    prompts = TextReader(arguments.target).prompts(arguments.prompts)[: arguments.limit]
    answers: list[list[int]] = []
    for begin in range(0, len(prompts), arguments.batch_size):
        answers += write_answers(
            target,
            prompts[begin : begin + arguments.batch_size],
            max_new_tokens=arguments.max_new_tokens,
            temperature=0.0,
        )
    report = {}
    for folder in arguments.head:
        head = load_head(folder).to(target.device)
        found = measure_acceptance(head, target, prompts, answers, num_steps=arguments.steps)
        report[str(folder)] = _figures(found, head)
        print(json.dumps({str(folder): report[str(folder)]}))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def draw(arguments: argparse.Namespace) -> None:
    """Draws the curves of a log."""
    for path in draw_curves(read_log(arguments.log), arguments.out, arguments.title):
        print(path)


def _target(arguments: argparse.Namespace, device: torch.device) -> FrozenTarget:
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    return FrozenTarget.load(arguments.target, device=device, dtype=dtype)


def _head(arguments: argparse.Namespace, target: FrozenTarget) -> Head:
    if arguments.init:
        return _trained_head(arguments).to(target.device)
    algorithm: Algorithm = arguments.algorithm
    token_ids = None
    if algorithm is Algorithm.EAGLE3 and arguments.token_map:
        vocab_size = target.model.config.vocab_size
        token_ids = read_token_map(arguments.token_map, vocab_size).tolist()
    layers = arguments.feature_layers
    sizes = HeadSizes(
        intermediate_size=arguments.intermediate_size,
        num_heads=arguments.num_heads,
        num_kv_heads=arguments.num_kv_heads,
        head_dim=arguments.head_dim,
        draft_vocab_size=None if token_ids is None else len(token_ids),
        feature_layers=None if layers is None else tuple(layers),
        num_layers=arguments.num_layers,
        block_size=arguments.block_size,
        mask_token_id=arguments.mask_token_id,
    )
    torch.manual_seed(arguments.seed)
    head = build_head(target.head_shape(algorithm, sizes), token_ids)
    begin_from_target(head, target)
    return head.to(target.device)


def _trained_head(arguments: argparse.Namespace) -> Head:
    head = load_head(arguments.init).train()
    if head.shape.algorithm is not arguments.algorithm:
        raise CheckpointError(
            f"{arguments.init} holds a head of {head.shape.algorithm.value}; "
            f"--algorithm is {arguments.algorithm.value}"
        )
    return head


def _objective(arguments: argparse.Namespace, target: FrozenTarget, head: Head) -> Objective[Any]:
    is_eagle = arguments.algorithm is Algorithm.EAGLE
    terms = LossTerms(
        hard=arguments.hard,
        regression=_given(arguments.regression, 1.0 if is_eagle else 0.0),
        noise=_given(arguments.noise, 0.1 if is_eagle else 0.0),
        decay=arguments.decay,
    )
    if isinstance(head, BlockHead):
        if arguments.window < head.shape.block_size:
            raise CheckpointError(
                f"a window of {arguments.window} tokens is shorter than a block of "
                f"{head.shape.block_size}"
            )
        return BlockObjective(
            head, target, terms, num_anchors=arguments.anchors, is_compiled=arguments.compile
        )
    num_steps = _given(arguments.unroll, UNROLL[arguments.algorithm])
    return RecurrentObjective(
        head, target, terms, num_steps=num_steps, is_compiled=arguments.compile
    )


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _windows(arguments: argparse.Namespace) -> Windows:
    sources = [Source(Documents.load(path), share) for path, share in arguments.data]
    return Windows(sources, window=arguments.window, seed=arguments.seed)


def _plan(arguments: argparse.Namespace) -> TrainingPlan:
    return TrainingPlan(
        out=arguments.out,
        num_steps=arguments.steps,
        seconds=arguments.seconds,
        batch_size=arguments.batch_size,
        log_every=arguments.log_every,
        save_every=arguments.save_every,
        seed=arguments.seed,
    )


def _report(algorithm: Algorithm, plan: TrainingPlan, ranks: Ranks) -> None:
    rows = read_log(plan.folder / LOG_FILE)
    if not rows:
        return
    last = rows[-1]
    print(
        f"{algorithm.value}: {last.step} steps on {ranks.size} processes, {last.tokens:,} tokens "
        f"in {last.seconds:.0f} s; loss {last.loss:.3f}, accepted {last.accepted_length:.2f}"
    )
    try:
        draw_curves(rows, plan.folder, algorithm.value)
    except ImportError:
        print("no pictures: matplotlib is not installed")


def _figures(found: Acceptance, head: Head) -> dict[str, Any]:
    return {
        "algorithm": head.shape.algorithm.value,
        "accepted_length_with_bonus": round(found.mean_length, 4),
        **dataclasses.asdict(found),
    }


def _save(documents: Documents, path: Path) -> None:
    documents.save(path)
    print(f"{path}: {len(documents)} documents, {len(documents.tokens):,} tokens")

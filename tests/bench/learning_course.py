"""What a learner makes of another domain by settings of its lessons, without serving.

``python -m tests.bench.learning_course --out DIR`` is `tests.bench.domain_shift` in one process:
the demo target answers the same questions, the learner hears of the answers a hundred at a time and
gives a lesson each time, and the trainer goes over the same answers offline. Prints tokens a round
on questions held out, and their share of the offline head's. Minutes on a GPU, hours on a CPU.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional as F

from services.draft.learner.learner import Learner
from services.draft.learner.settings import LearnerSettings
from services.draft.learner.student import HeadStudent, State
from services.draft.learner.traffic import Example, Traffic
from services.draft.settings_problems import DEMO_HEADS, DEMO_TARGET
from services.draft.training.documents import Documents
from services.draft.training.frozen_target import FrozenTarget, write_answers
from tests.bench.domain_shift import LESSON_REQUESTS, MAX_NEW_TOKENS, questions, train

_STEPS = 5
_BATCH = 64
_LESSON_BATCH = 16


@dataclass(frozen=True, slots=True)
class Domain:
    """Prompts and what the target answers at temperature 0."""

    prompts: Sequence[list[int]]
    answers: Sequence[list[int]]

    def examples(self, target: FrozenTarget, student: HeadStudent) -> list[Example]:
        """Returns what a target would tell the student of each."""
        return [
            self._example(target, student, *each)
            for each in zip(self.prompts, self.answers, strict=True)
        ]

    @torch.no_grad()
    def _example(
        self, target: FrozenTarget, student: HeadStudent, prompt: list[int], answer: list[int]
    ) -> Example:
        ids = [*prompt, *answer]
        read = target.read(torch.tensor([ids], device=target.device), student.feature_layers)
        rows, projection = read.features[0], student.projection
        rows = rows if projection is None else F.linear(rows, projection)
        return Example(tuple(ids), rows[:-1].cpu(), len(prompt))


def answered(target: FrozenTarget, prompts: Sequence[list[int]]) -> Domain:
    """Has the target answer all."""
    found: list[tuple[list[int], list[int]]] = []
    for begin in range(0, len(prompts), _BATCH):
        part = prompts[begin : begin + _BATCH]
        answers = write_answers(target, part, max_new_tokens=MAX_NEW_TOKENS, temperature=0.0)
        found += zip(part, answers, strict=True)
    return Domain([prompt for prompt, _ in found], [answer for _, answer in found])


def taught(
    student: HeadStudent,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    settings: LearnerSettings,
) -> tuple[float, float]:
    """Returns tokens a round at the end, of the weights that serve and of those learnt since."""
    clock = itertools.count(1.0).__next__
    traffic = Traffic(clock)
    learner = Learner(student, traffic, settings, lambda folder, version: None, clock)

    def measured(state: State) -> float:
        with student.with_weights(state):
            return student.measure(held_out, num_steps=_STEPS).mean_length

    for begin in range(0, len(examples), LESSON_REQUESTS):
        for each in examples[begin : begin + LESSON_REQUESTS]:
            traffic.add(Example(each.token_ids, each.rows, each.num_prompt_tokens, clock()))
        learner.step()
        learner.watch()
    return measured(learner.served_state), measured(student.state())


def main() -> None:
    """Prints a line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.HelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for heads and texts")
    parser.add_argument("--algorithm", default="EAGLE3", choices=("EAGLE", "EAGLE3", "MTP"))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument(
        "--held-out", type=int, default=640, help="questions; of 160 one in 40 is luck"
    )
    parser.add_argument("--updates", type=int, nargs="+", default=[25, 50, 100, 200])
    parser.add_argument("--offline-steps", type=int, default=600)
    arguments = parser.parse_args()
    out, start = arguments.out.resolve(), DEMO_HEADS / arguments.algorithm.lower()
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = FrozenTarget.load(DEMO_TARGET, device=device, dtype=torch.float32)
    domain = answered(target, questions(arguments.requests + arguments.held_out, seed=7))
    texts = [[*p, *a] for p, a in zip(domain.prompts, domain.answers, strict=True)]
    Documents.of(texts[: arguments.requests]).save(out / "answers.npz")
    train(arguments.algorithm, arguments.offline_steps, start, out / "answers.npz", out / "offline")

    settings = LearnerSettings(target=("127.0.0.1:1",), batch_size=_LESSON_BATCH, lesson_tokens=1)
    student = HeadStudent(start, target, settings)
    examples = domain.examples(target, student)
    seen, held_out = examples[: arguments.requests], examples[arguments.requests :]
    begun = student.measure(held_out, num_steps=_STEPS).mean_length
    trained = HeadStudent(out / "offline", target, settings)
    # Its fc is another one, and so are the rows that it reads.
    own = domain.examples(target, trained)[arguments.requests :]
    offline = trained.measure(own, num_steps=_STEPS).mean_length
    print(f"tokens a round: {begun:.3f} at the start, {offline:.3f} trained offline", flush=True)
    for updates in arguments.updates:
        student = HeadStudent(start, target, settings)
        lessons = replace(settings, out=out / f"updates-{updates}", lesson_updates=updates)
        served, learnt = taught(student, seen, held_out, lessons)
        print(
            f"{updates:4d} updates a lesson: {served:.3f} served, {served / offline:.1%}; "
            f"{learnt:.3f} learnt, {learnt / offline:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()

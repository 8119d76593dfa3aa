"""A draft whose candidates come twice and in no order, as a careless network would bring them."""

from __future__ import annotations

import random
from dataclasses import replace

from services.draft import attach_client
from services.draft.events import CandidatesReady, Output
from services.draft.link_codec import request_from_output
from shared.candidate_columns import CandidateColumns
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.tokens import Candidate


class Disorder:
    """While it is on, each message holds its candidates and those of the message before, shuffled:
    so every one comes twice, and the second time behind newer ones."""

    def __init__(self, seed: int = 0) -> None:
        self._source = random.Random(seed)
        self._is_on = False
        self._before: list[Candidate] = []

    def turn(self, *, is_on: bool) -> None:
        self._is_on = is_on

    def install(self) -> None:
        """Has the draft of this process say what this says."""
        attach_client.request_from_output = self.request  # type: ignore[attr-defined]

    def request(self, output: Output) -> pb.SpeculateRequest:
        """Returns the message for an output of the draft's engine."""
        if self._is_on and isinstance(output, CandidatesReady):
            candidates = list(output.candidates)
            shuffled = [*candidates, *self._before]
            self._source.shuffle(shuffled)
            output = replace(output, candidates=CandidateColumns.of(shuffled))
            self._before = candidates
        return request_from_output(output)

"""`instructor`: typed output, by a forced call and by a JSON schema, whole and in parts."""

from __future__ import annotations

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict


class City(BaseModel):
    """What is asked for, and nothing else: a model this small would not come to an end."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["capital", "village"]


def main() -> None:
    client = OpenAI(base_url=os.environ["OUTRIDER_URL"] + "/v1", api_key="none")
    asked = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is Paris?"}],
        "max_tokens": 160,
        "temperature": 0.0,
    }
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        typed = instructor.from_openai(client, mode=mode)
        assert typed.create(response_model=City, **asked).kind in ("capital", "village")
        *_, last = typed.create_partial(response_model=City, **asked)
        assert last.kind in ("capital", "village")
    print("two modes, whole and in parts")


if __name__ == "__main__":
    main()

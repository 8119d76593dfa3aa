"""Prints what an image installs: `requirements.py EXTRA...` reads ./pyproject.toml.

Lets a Dockerfile install dependencies in a layer of their own, before the code is copied in.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    requirements: list[str] = list(project["dependencies"])
    for extra in sys.argv[1:]:
        requirements += project["optional-dependencies"][extra]
    print("\n".join(requirements))


if __name__ == "__main__":
    main()

"""`make bench`: the wide engine where there is a GPU, else the demo through the serving path.

Flags belong to the serving path, `python -m tests.bench`, so any of them chooses it.
"""

from __future__ import annotations

import sys

import torch


def main() -> int:
    if torch.cuda.is_available() and not sys.argv[1:]:
        from tests.bench import wide

        return wide.main()
    from tests.bench import __main__ as serving

    return serving.main()


if __name__ == "__main__":
    sys.exit(main())

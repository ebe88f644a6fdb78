"""One idiom as a script of its own: `[zftune run --] torchrun --standalone idiom.py NAME DS_CONFIG`.

It prints the norm of all that it reads, and of the weights that it ends with. NAME is a row of the README's table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from compatibility.idioms.listing import idiom
from compatibility.idioms.script import Script
from compatibility.idioms.sides import DeepSpeed


def main(name: str, config: str) -> None:
    """Run it with a ds_config."""
    script = Script(DeepSpeed(json.loads(Path(config).read_text(encoding="utf-8"))))
    for what, tensor in script.run(idiom(name)):
        print(f"{what}: {float(tensor.double().norm()):.7g}")


if __name__ == "__main__":
    main(*sys.argv[1:])

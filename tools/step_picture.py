"""Draws docs/assets/step-light.svg and step-dark.svg: what GPU, link and CPU do in the time of one ZeRO-Offload step.

python tools/step_picture.py         # profiles three systems on an emulated machine, and draws

Each lane is the timeline of a `zftune profile --json` document, not of an artist.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets"
RIG = "llama2-7b-4xa100"
SYSTEMS = {
    "ZeRO-Offload": ["--topk-ratio", "0", "--update-interval", "1", "--no-overlap-step", "--pipeline", "none"],
    "no offloading": ["--offload-ratio", "0"],
    "zenflow": [],
}
LANES = {"GPU": ("compute",), "link": ("d2h", "h2d"), "CPU": ("host",)}
_LEFT, _RIGHT, _TOP, _LANE, _GAP, _WIDTH = 176, 20, 64, 18, 22, 900
_MERGED_MS = 12.0
"""Spans with less between them are drawn as one."""


@dataclass(frozen=True, slots=True)
class Colours:
    """Of one picture; the meaning of a colour is the same in both."""

    text: str
    faint: str
    lane: str
    compute: str
    link: str
    host: str


THEMES = {
    "light": Colours("#1f2328", "#59636e", "#eff1f4", "#2f6fdd", "#e08a00", "#8250df"),
    "dark": Colours("#e6edf3", "#9198a1", "#21262d", "#4c8dff", "#f0a732", "#a371f7"),
}


def main() -> None:
    """Profile and draw."""
    profiles = {name: _profile(flags) for name, flags in SYSTEMS.items()}
    ASSETS.mkdir(exist_ok=True)
    for theme, colours in THEMES.items():
        (ASSETS / f"step-{theme}.svg").write_text(draw(profiles, colours), encoding="utf-8")


def _profile(flags: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        command = ["profile", "--rig", RIG, "--no-baselines", *flags, "--json", str(path)]
        subprocess.run(
            [sys.executable, "-c", "from zftune.cli.main import main; main()", *command], check=True, stdout=sys.stderr
        )
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return document


def draw(profiles: Mapping[str, Mapping[str, Any]], colours: Colours) -> str:
    """The picture as SVG.

    Args:
        profiles: documents `zftune.profile/1` with a timeline, by the system's name; the slowest sets the time axis.
        colours: of the theme.
    """
    span_ms = max(document["step_ms"]["mean"] for document in profiles.values()) * 1.005
    scale = (_WIDTH - _LEFT - _RIGHT) / span_ms
    parts, y = list(_legend(colours)), _TOP
    for name, document in profiles.items():
        step_ms = document["step_ms"]["mean"]
        height = len(LANES) * (_LANE + 2)
        parts += [
            _text(12, y + 20, name, colours.text, 15, weight=600),
            _text(12, y + 40, f"{step_ms / 1e3:.1f} s a step", colours.faint),
        ]
        for lane, names in LANES.items():
            parts.append(_text(_LEFT - 8, y + 13, lane, colours.faint, 11, anchor="end"))
            parts.append(_rectangle(_LEFT, y, span_ms * scale, _LANE, colours.lane))
            for which in names:
                fill = {"compute": colours.compute, "host": colours.host}.get(which, colours.link)
                for begin, end in _spans(document, which, span_ms):
                    parts.append(_rectangle(_LEFT + begin * scale, y, max(1.0, (end - begin) * scale), _LANE, fill))
            y += _LANE + 2
        for end_ms in _step_ends(document, span_ms):
            x = _LEFT + end_ms * scale
            parts.append(f'<path d="M{x:.1f} {y - height - 3}V{y + 1}" stroke="{colours.text}" stroke-width="1.5"/>')
        y += _GAP
    seconds = range(int(span_ms / 1e3) + 1)
    parts += [
        _text(_LEFT + 1e3 * second * scale, y, f"{second} s", colours.faint, 11, anchor="middle") for second in seconds
    ]
    title = "; ".join(f"{name} {document['step_ms']['mean'] / 1e3:.1f} s a step" for name, document in profiles.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 10}" role="img"'
        f' font-family="system-ui, sans-serif">\n'
        f"<title>{title}</title>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _legend(colours: Colours) -> Iterator[str]:
    entries = [("forward and backward", colours.compute), ("gradients down, weights up", colours.link)]
    entries.append(("optimizer on the CPU", colours.host))
    yield _text(12, 24, "The same fine-tuning step, emulated: Llama-2-7B on four A100", colours.text, 15, weight=600)
    x: float = _LEFT
    for label, fill in entries:
        yield _rectangle(x, 38, 12, 12, fill)
        yield _text(x + 18, 49, label, colours.faint)
        x += 44 + 6.6 * len(label)
    yield f'<path d="M{x + 6:.1f} 37V51" stroke="{colours.text}" stroke-width="1.5"/>'
    yield _text(x + 18, 49, "end of a step", colours.faint)


def _step_ends(document: Mapping[str, Any], span_ms: float) -> Iterator[float]:
    rows = document["per_step"]
    first = rows[0]["begin_ms"]
    for row in rows[: document["timeline"]["steps"]]:
        end = row["begin_ms"] - first + row["step_ms"]
        if 0 < end <= span_ms:
            yield end


def _spans(document: Mapping[str, Any], lane: str, span_ms: float) -> Iterator[tuple[float, float]]:
    """Begin and end in the drawing, with small gaps closed."""
    merged: list[list[float]] = []
    for begin, until, _ in document["timeline"]["lanes"].get(lane, ()):
        if begin >= span_ms:
            break
        end = min(until, span_ms)
        if merged and begin - merged[-1][1] < _MERGED_MS:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([begin, end])
    yield from ((begin, end) for begin, end in merged)


def _rectangle(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" rx="2" fill="{fill}"/>'


def _text(x: float, y: float, text: str, fill: str, size: int = 13, *, weight: int = 400, anchor: str = "start") -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}"'
    return f'<text x="{x:.1f}" y="{y}" {style}>{text}</text>'


if __name__ == "__main__":
    main()

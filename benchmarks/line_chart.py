"""Line charts as SVG text, without a plotting library: one panel beside the other."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

WIDTH, HEIGHT, MARGIN, LEGEND_LINE = 560, 320, 56, 16
COLORS = ("#0072b2", "#d55e00", "#009e73")  # distinct for most eyes; then the same, dashed
DASHES = ("", "6 3", "2 3", "8 2 2 2")


@dataclass(slots=True, kw_only=True)
class Panel:
    """One chart. The x axis is logarithmic, the y axis begins at 0."""

    title: str
    x: str
    y: str
    lines: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, line: str, x: float, y: float) -> None:
        """Add a point to a line."""
        self.lines.setdefault(line, []).append((x, y))


def line_charts(panels: list[Panel]) -> str:
    """Return the SVG of all panels, the legend below."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    width, height = WIDTH * len(panels), HEIGHT + LEGEND_LINE * (len(names) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, panel in enumerate(panels):
        parts.append(f'<g transform="translate({i * WIDTH} 0)">{_chart(panel, names)}</g>')
    for i, name in enumerate(names):
        y = HEIGHT + LEGEND_LINE * (i + 0.5)
        parts.append(
            f'<path d="M{MARGIN} {y}h28" {_style(i, names)}/>'
            f'<text x="{MARGIN + 36}" y="{y + 4}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _chart(panel: Panel, names: list[str]) -> str:
    points = [point for line in panel.lines.values() for point in line]
    low = math.log10(min(x for x, _ in points))
    high = math.log10(max(x for x, _ in points))
    top = max(y for _, y in points) * 1.05

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - low) / ((high - low) or 1.0)
        return (
            MARGIN + across * (WIDTH - 1.5 * MARGIN),
            HEIGHT - MARGIN - y / top * (HEIGHT - 2 * MARGIN),
        )

    parts = [
        f'<text x="{WIDTH / 2}" y="20" text-anchor="middle" font-size="13">'
        f"{escape(panel.title)}</text>",
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(panel.x)}</text>',
        f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {HEIGHT / 2})">{escape(panel.y)}</text>',
    ]
    for x in sorted({x for x, _ in points}):
        across, bottom = place(x, 0.0)
        parts.append(
            f'<path d="M{across:.1f} {MARGIN}V{bottom:.1f}" stroke="#ddd"/>'
            f'<text x="{across:.1f}" y="{bottom + 14:.1f}" text-anchor="middle">{x:g}</text>'
        )
    step = 10 ** math.floor(math.log10(top)) / 2
    for i in range(int(top / step) + 1):
        left, up = place(10**low, i * step)
        parts.append(
            f'<path d="M{left:.1f} {up:.1f}H{WIDTH - MARGIN / 2}" stroke="#ddd"/>'
            f'<text x="{left - 4:.1f}" y="{up + 4:.1f}" text-anchor="end">{i * step:g}</text>'
        )
    for name, line in panel.lines.items():
        path = "L".join("{:.1f} {:.1f}".format(*place(x, y)) for x, y in sorted(line))
        parts.append(f'<path d="M{path}" {_style(names.index(name), names)}/>')
    return "".join(parts)


def _style(i: int, names: list[str]) -> str:
    """Lines of one family (the text before a colon) have one color and differ in their dashes."""
    families = list(dict.fromkeys(name.partition(":")[0] for name in names))
    family = names[i].partition(":")[0]
    siblings = [name for name in names if name.partition(":")[0] == family]
    color = COLORS[families.index(family) % len(COLORS)]
    dash = DASHES[siblings.index(names[i]) % len(DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'fill="none" stroke="{color}" stroke-width="1.8"{dashed}'

"""Draw docs/families.svg: how each family makes a Transformer wide or deep.

    python benchmarks/families_picture.py

The file is written as text, so that the same picture has the same bytes on every machine.
"""

from pathlib import Path

from hf_deepwide.durable import write_whole

PICTURE = Path(__file__).parents[1] / "docs" / "families.svg"
WIDTH, HEIGHT, GROUND = 760, 346, 262  # GROUND: the y of the bottom of every stack
BLOCK, TALL, GAP = 30, 14, 5  # width and height of a block, space between blocks
COLOURS = {
    "vanilla_transformer": "#6b7280",
    "latent_depth": "#7c3aed",
    "depthwise_lstm": "#0f766e",
    "mat": "#b45309",
    "multipath_transformer": "#1d4ed8",
}


def picture() -> str:
    """The picture: width grows to the right, depth grows upwards, and each family is a stack of blocks."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13" role="img" aria-label="Five families by width and depth">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        arrow(40, GROUND + 6, 40, 14),
        arrow(40, GROUND + 6, WIDTH - 16, GROUND + 6),
        '<text x="26" y="150" text-anchor="middle" transform="rotate(-90 26 150)">depth: layers</text>',
        f'<text x="{WIDTH - 16}" y="{HEIGHT - 8}" text-anchor="end">width: branches, paths</text>',
        *stack(80, "vanilla_transformer", [[True]] * 6),
        *caption(80, 1, "vanilla_transformer", "the baseline"),
        *stack(190, "latent_depth", [[layer not in (3, 6, 7, 10)] for layer in range(12)]),
        *caption(190, 1, "latent_depth", "learns which", "layers to use"),
        *stack(305, "depthwise_lstm", [[True]] * 12),
        *cells(305, 12),
        *caption(305, 1, "depthwise_lstm", "an LSTM joins", "the layers"),
        *stack(412, "mat", [[(layer + branch) % 4 > 0 for branch in range(3)] for layer in range(6)]),
        *caption(412, 3, "mat", "parallel branches, some", "dropped in training"),
        *stack(560, "multipath_transformer", [[True] * 4] * 4, space=GAP + 12),
        *joints(560, 4, 4),
        *caption(560, 4, "multipath_transformer", "parallel paths, combined", "and weighted"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def stack(left: int, family: str, layers: list[list[bool]], space: int = GAP) -> list[str]:
    """The blocks of a stack, one row for each layer. A block that is False is left out: only its outline is drawn."""
    colour, parts = COLOURS[family], []
    for row, blocks in enumerate(layers):
        for column, used in enumerate(blocks):
            x, y = left + column * (BLOCK + GAP), GROUND - TALL - row * (TALL + space)
            look = f'fill="{colour}"' if used else f'fill="none" stroke="{colour}" stroke-dasharray="3 3"'
            parts.append(f'<rect x="{x}" y="{y}" width="{BLOCK}" height="{TALL}" rx="3" {look}/>')
    return parts


def cells(left: int, layers: int) -> list[str]:
    """The LSTM beside a stack: a vertical line with one cell for each layer."""
    x, colour = left + BLOCK + 14, COLOURS["depthwise_lstm"]
    rows = [GROUND - TALL / 2 - row * (TALL + GAP) for row in range(layers)]
    line = f'<line x1="{x}" y1="{rows[0]:g}" x2="{x}" y2="{rows[-1]:g}" stroke="{colour}" stroke-width="2"/>'
    return [line, *(f'<circle cx="{x}" cy="{y:g}" r="4" fill="white" stroke="{colour}"/>' for y in rows)]


def joints(left: int, layers: int, paths: int) -> list[str]:
    """A bar above each row of paths. All paths of the row lead into the bar."""
    parts, colour = [], COLOURS["multipath_transformer"]
    for row in range(layers):
        bottom = GROUND - TALL - row * (TALL + GAP + 12)
        middles = [left + BLOCK / 2 + column * (BLOCK + GAP) for column in range(paths)]
        parts += [f'<line x1="{x:g}" y1="{bottom}" x2="{x:g}" y2="{bottom - 8}" stroke="{colour}"/>' for x in middles]
        parts.append(
            f'<line x1="{middles[0]:g}" y1="{bottom - 8}" x2="{middles[-1]:g}" y2="{bottom - 8}" stroke="{colour}" '
            'stroke-width="3"/>'
        )
    return parts


def caption(left: int, columns: int, family: str, *lines: str) -> list[str]:
    """The text below a stack: the family's name in its colour, and `lines` that describe the family."""
    x = left + (columns * (BLOCK + GAP) - GAP) / 2
    name = f'<text x="{x:g}" y="{GROUND + 24}" text-anchor="middle" font-weight="bold" font-size="12"'
    parts = [f'{name} fill="{COLOURS[family]}">{family}</text>']
    for number, line in enumerate(lines):
        parts.append(
            f'<text x="{x:g}" y="{GROUND + 40 + 15 * number}" text-anchor="middle" font-size="11">{line}</text>'
        )
    return parts


def arrow(x1: int, y1: int, x2: int, y2: int) -> str:
    """An axis with an arrowhead."""
    head = (
        f"{x2 - 4},{y2 + 8} {x2},{y2} {x2 + 4},{y2 + 8}"
        if x1 == x2
        else f"{x2 - 8},{y2 - 4} {x2},{y2} {x2 - 8},{y2 + 4}"
    )
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="black"/>'
        f'<polyline points="{head}" fill="none" stroke="black"/>'
    )


if __name__ == "__main__":
    write_whole(PICTURE, picture())

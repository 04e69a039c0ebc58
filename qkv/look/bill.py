"""A model's cost as people read it: tables for a terminal."""

from __future__ import annotations

from qkv.look.cost import Cost


def human(number: float, unit: str = "") -> str:
    """Three digits and a prefix: 60.5 M, 1.84 MFLOP, 242 MB."""
    prefix = ""
    for larger in "kMGTPE":
        if abs(number) < 999.5:
            break
        number, prefix = number / 1000, larger
    digits = 0 if not prefix and float(number).is_integer() else max(0, 3 - len(str(int(abs(number)))))
    return f"{number:.{digits}f} {prefix}{unit}".rstrip()


def render(c: Cost) -> str:
    """The cost as text for a terminal: parts, attentions, compute, memory."""
    lengths = f"M = {c.source_length} source and N = {c.target_length} target tokens"
    title = f"{c.family}: {human(c.parameters['total'])} parameters, forward FLOP for {lengths}"
    head = ["attention", "scores + mix, a layer", "k", "a layer", "layers", "all layers", "projections"]
    attentions = [
        [a.name, a.formula, str(a.width), human(a.layer), str(a.layers), human(a.total), a.projections or "–"]
        for a in c.attentions
    ]
    middle = [_table([head, *attentions], left=(0, 1, 6))] if attentions else []
    return "\n\n".join([title, _table(_part_rows(c)), *middle, _table(_sums(c))])


def _table(rows: list[list[str]], left: tuple[int, ...] = (0,)) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if i in left else ">" for i in range(len(widths))]
    lines = ["  ".join(f"{c:{s}{w}}" for c, s, w in zip(row, sides, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:]])


def _part_rows(c: Cost) -> list[list[str]]:
    columns = [c.parameters, c.linear, c.attention, c.source_token, c.target_token]
    rows = [[part, *(human(column.get(part, 0)) for column in columns)] for part in c.parameters if part != "total"]
    total = [c.parameters["total"], *(sum(column.values()) for column in columns[1:])]
    head = ["part", "parameters", "linear", "scores + mix", "a source token", "a target token"]
    return [[cell if cell != "0" else "–" for cell in row] for row in [head, *rows, ["total", *map(human, total)]]]


def _sums(c: Cost) -> list[list[str]]:
    flops = {"forward, a pair": c.forward_pair, "training, a pair (× 3)": c.training_pair}
    flops["training, a token"] = round(c.training_token)
    if c.run is not None:
        flops[f"training, {c.steps:,} steps of {c.batch_tokens:,} tokens"] = round(c.run)
    if c.source_length and c.target_length:
        flops["the same source into a second language"] = c.second_target
    held = {f"memory: {name}": size for name, size in c.memory.items()}
    held |= {f"decoding keeps, a {name}": size for name, size in c.cache.items() if size}
    rows = [[name, human(n, "FLOP")] for name, n in flops.items()] + [[name, human(n, "B")] for name, n in held.items()]
    return [["compute, and memory in float32", ""], *rows]

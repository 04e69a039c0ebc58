"""Tables of a model's cost for a terminal."""

from __future__ import annotations

from qkv.analysis.cost import AttentionCost, Cost


def format_quantity(number: float, unit: str = "") -> str:
    """Format a number with three digits and a prefix: 60.5 M, 1.84 MFLOP, 242 MB."""
    prefix = ""
    for next_prefix in "kMGTPE":
        if abs(number) < 999.5:
            break
        number, prefix = number / 1000, next_prefix
    digits = 0 if not prefix and float(number).is_integer() else max(0, 3 - len(str(int(abs(number)))))
    return f"{number:.{digits}f} {prefix}{unit}".rstrip()


def render_cost_table(c: Cost) -> str:
    """Return the cost as text: modules, attentions, compute, memory."""
    lengths = f"M = {c.source_length} source and N = {c.target_length} target tokens"
    lengths += f" after P = {c.memory_length} of memory" if c.memory_length else ""
    title = f"{c.family}: {format_quantity(c.parameters['total'])} parameters, forward FLOP for {lengths}"
    header = ["attention", "scores + mean, per layer", "k", "per layer", "layers", "all layers", "projections"]
    attentions = [_attention_row(attention) for attention in c.attentions]
    attention_tables = [_table([header, *attentions], left_aligned=(0, 1, 6))] if attentions else []
    return "\n\n".join([title, _table(_module_rows(c)), *attention_tables, _table(_total_rows(c))])


def _attention_row(a: AttentionCost) -> list[str]:
    flops = [format_quantity(a.flops_per_layer), str(a.num_layers), format_quantity(a.total_flops)]
    return [a.name, a.formula, str(a.query_dim), *flops, a.projection_formula or "–"]


def _table(rows: list[list[str]], left_aligned: tuple[int, ...] = (0,)) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if i in left_aligned else ">" for i in range(len(widths))]
    lines = ["  ".join(f"{c:{s}{w}}" for c, s, w in zip(row, sides, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:]])


def _module_rows(c: Cost) -> list[list[str]]:
    columns = [c.parameters, c.linear_flops, c.attention_flops, c.flops_per_source_token, c.flops_per_target_token]
    rows = [
        [module, *(format_quantity(column.get(module, 0)) for column in columns)]
        for module in c.parameters
        if module != "total"
    ]
    total = [c.parameters["total"], *(sum(column.values()) for column in columns[1:])]
    header = ["module", "parameters", "linear", "scores + mean", "per source token", "per target token"]
    return [
        [cell if cell != "0" else "–" for cell in row]
        for row in [header, *rows, ["total", *map(format_quantity, total)]]
    ]


def _total_rows(c: Cost) -> list[list[str]]:
    flops = {"forward, per pair": c.forward_flops, "training, per pair (× 3)": c.training_flops}
    flops["training, per token"] = round(c.train_flops_per_token)
    if c.total_training_flops is not None:
        flops[f"training, {c.steps:,} steps of {c.batch_tokens:,} tokens"] = round(c.total_training_flops)
    if c.source_length and c.target_length:
        flops["the same source into a second language"] = c.second_target_flops
    memory = {f"memory: {name}": size for name, size in c.memory.items()}
    memory |= {f"decoding cache, per {name}": size for name, size in c.cache.items() if size}
    rows = [[name, format_quantity(n, "FLOP")] for name, n in flops.items()] + [
        [name, format_quantity(n, "B")] for name, n in memory.items()
    ]
    return [["compute, and memory in float32", ""], *rows]

"""Write the fixture of Transformer-XL with the last release of transformers that has it.

Run in a throw-away environment:

    pip install --target /tmp/old --no-deps transformers==4.30.2 tokenizers==0.13.3 huggingface_hub==0.16.4
    PYTHONPATH=/tmp/old python tests/parity/make_transformer_xl_fixture.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "fixtures" / "transformer_xl"
VOCAB_SIZE, SEGMENT_LENGTH, NUM_SEGMENTS, BATCH_SIZE = 50, 7, 4, 2

# as the released checkpoints (narrower clusters, shared projections, a window), one table of another width, plain
CASES: dict[str, dict[str, Any]] = {
    "clusters": {"cutoffs": [10, 20], "div_val": 2, "d_embed": 16, "same_length": True, "clamp_len": 5},
    "one_table": {"cutoffs": [10, 20], "div_val": 1, "d_embed": 12, "same_length": False, "clamp_len": -1},
    "pre_norm": {"cutoffs": [10], "div_val": 1, "d_embed": 16, "same_length": False, "pre_lnorm": True},
    "shared_biases": {"cutoffs": [10], "div_val": 1, "d_embed": 16, "same_length": False, "untie_r": False},
}


def main() -> None:
    """Write a folder per case: config.json, pytorch_model.bin and the outputs of four segments."""
    from transformers import TransfoXLConfig, TransfoXLLMHeadModel

    for name, settings in CASES.items():
        torch.manual_seed(0)
        sizes = {"d_model": 16, "n_head": 2, "d_head": 6, "d_inner": 20, "n_layer": 2, "mem_len": 6}
        config = TransfoXLConfig(vocab_size=VOCAB_SIZE, **sizes, **settings)
        model = TransfoXLLMHeadModel(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.3)
            for key, parameter in model.named_parameters():
                if "layer_norm.weight" in key:
                    parameter.add_(1.0)
        folder = FOLDER / name
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
        tokens = torch.randint(0, VOCAB_SIZE, (NUM_SEGMENTS, BATCH_SIZE, SEGMENT_LENGTH))
        save_file(outputs(model, tokens), folder / "outputs.safetensors")


@torch.no_grad()
def outputs(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the log-probabilities of each segment and the memory after it.

    The reference starts from a memory of zeros and attends to them. Here the first segment has an empty memory.
    """
    result = {"tokens": tokens}
    memory = [torch.zeros(0, BATCH_SIZE, model.config.d_model) for _ in range(model.config.n_layer)]
    for number, segment in enumerate(tokens):
        output = model(segment, mems=memory)
        memory = output.mems
        result[f"log_probs.{number}"] = output.prediction_scores.contiguous()
        result[f"memory.{number}"] = torch.stack(list(memory)).permute(2, 0, 1, 3).contiguous()  # [B, layers, M, width]
    return result


if __name__ == "__main__":
    main()

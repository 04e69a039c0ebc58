"""A tiny random Hugging Face model and the qkv model with its weights, for the parity tests of all families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from qkv import checkpoints, families
from qkv.analysis.capture import capture_attention
from qkv.checkpoints.state import unique_state_dict
from qkv.families.hf.convert import to_hf
from qkv.nn import Decoder, Encoder, Ragged

LENGTHS, TARGET_LENGTHS = [4, 9, 1, 6], [3, 1, 8, 5]
NEAR = 1e-4


def randomised(model: nn.Module, spread: float = 0.15) -> nn.Module:
    """Draw all parameters, large enough that logits differ; biases of 0 and gains of 1 would hide errors."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn_like(parameter) * spread + (parameter.mean().round() if parameter.dim() == 1 else 0)
            )
    return model.eval()


def ids(lengths: list[int], vocabulary: int, seed: int, least: int = 3) -> Ragged:
    """Return random tokens except the first few ids, which are special in many models."""
    drawn = torch.randint(least, vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return Ragged.from_lengths(drawn, lengths)


@dataclass
class Both:
    """Both models. `call` returns the output of transformers for padded inputs, `read` the logits in that output."""

    theirs: Any
    folder: Path
    ours: checkpoints.ModelBundle = field(init=False)

    def __post_init__(self) -> None:
        self.theirs.save_pretrained(self.folder)
        self.ours = checkpoints.load(self.folder)

    @property
    def vocabulary(self) -> int:
        return int(self.theirs.config.vocab_size)

    def source(self) -> Ragged:
        return ids(LENGTHS, self.vocabulary, 1)

    def target(self) -> Ragged:
        return ids(TARGET_LENGTHS, self.vocabulary, 2)

    def their_output(self, **options: Any) -> Any:
        """Return the output of transformers for padded inputs with a mask."""
        source, target = self.source(), self.target()
        given = {"input_ids": source.to_padded().long(), "attention_mask": source.layout.valid_mask().long()}
        if self.theirs.config.is_encoder_decoder and not isinstance(self.ours.model, Encoder):
            given["decoder_input_ids"] = target.to_padded().long()
        return self.theirs(**(given | options))

    def our_logits(self) -> Tensor:
        model = self.ours.model
        return model(self.source()) if isinstance(model, Encoder | Decoder) else model(self.source(), self.target())

    def their_logits(self, **options: Any) -> Tensor:
        """Return the logits of transformers as qkv's: real tokens only, start and end of an answer in one tensor."""
        found = self.their_output(**options)
        logits = torch.stack([found.start_logits, found.end_logits], -1) if "start_logits" in found else None
        if logits is None:
            logits = found.logits if "logits" in found else found.last_hidden_state
        layout = (self.source() if isinstance(self.ours.model, Encoder | Decoder) else self.target()).layout
        return logits[layout.valid_mask()] if logits.dim() == 3 else logits


def check_logits(both: Both) -> None:
    ours, theirs = both.our_logits().detach(), both.their_logits().detach()
    assert ours.shape == theirs.shape
    assert float(theirs.abs().max()) > 0.1, "the models say next to nothing: nothing would be compared"
    assert float((ours - theirs).abs().max()) <= NEAR


def check_gradients(
    both: Both, ours: Callable[[], Tensor] | None = None, theirs: Callable[[], Tensor] | None = None
) -> None:
    """Compare the gradients of one loss by relative norm, parameter by parameter, under Hugging Face names."""
    for logits in ((ours or both.our_logits)(), (theirs or both.their_logits)()):
        weighted = torch.linspace(-1, 1, logits.numel()).view(logits.shape)
        (torch.sin(logits) * weighted).sum().backward()
    found = their_names(both, {n: t.grad for n, t in unique_state_dict(both.ours.model).items() if t.grad is not None})
    wanted = {name: p.grad for name, p in both.theirs.named_parameters() if p.grad is not None and p.grad.any()}
    assert wanted
    largest = max(float(g.norm()) for g in wanted.values())
    for name, gradient in wanted.items():
        apart = float((found[name] - gradient).norm())
        assert apart <= NEAR * max(float(gradient.norm()), 1e-3 * largest), name


def their_names(both: Both, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return qkv's tensors under the parameter names of transformers."""
    form = families.by_model_type(both.theirs.config.model_type, "test").HF_FORMAT
    architecture = form.architectures[type(both.theirs).__name__]
    named = to_hf(form.rules(architecture.head, both.ours.model.spec), tensors)
    return {(k.removeprefix(form.prefix) if architecture.no_prefix else k): t for k, t in named.items()}


def check_round_trip(both: Both, folder: Path) -> None:
    """Check that export and import give equal bytes, and that transformers finds no missing and no unexpected key."""
    checkpoints.save(both.ours, folder, "huggingface")
    before, after = load_file(both.folder / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again, info = type(both.theirs).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    labels = ("id2label", "label2id") if not both.ours.model.spec.head or not both.ours.model.spec.head.labels else ()
    for key, value in both.theirs.config.to_dict().items():
        if value is not None and key not in ("transformers_version", "_name_or_path", "dtype", *labels):
            assert again.config.to_dict()[key] == value, key
    both.theirs = again.eval()
    check_logits(both)


def check_own_round_trip(both: Both, folder: Path) -> None:
    """Check that saving and loading in qkv's own format keeps spec and bytes."""
    checkpoints.save(both.ours, folder)
    again = checkpoints.load(folder)
    assert again.model.spec == both.ours.model.spec
    theirs, ours = unique_state_dict(both.ours.model), unique_state_dict(again.model)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def check_maps(both: Both, **kinds: str) -> None:
    """Compare captured maps with transformers' eager attention; `kinds`: its field -> our names, `{i}` a layer."""
    both.theirs.set_attn_implementation("eager")
    with torch.no_grad():
        found = both.their_output(output_attentions=True)
        with capture_attention(both.ours.model) as maps:
            both.our_logits()
    for name, pattern in kinds.items():
        layers = found[name]
        assert layers, f"they return no {name}"
        for number, theirs in enumerate(layers):  # [B, H, N, M]
            for ours, padded in zip(maps[pattern.format(i=number)], theirs, strict=True):
                cut = padded[:, : ours.shape[1], : ours.shape[2]]
                torch.testing.assert_close(ours, cut, atol=1e-5, rtol=1e-4)

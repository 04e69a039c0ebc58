"""The peers of bench/generate.py: models with random weights of real sizes, and generation of forced lengths."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

Call = Callable[[], list[int]]  # generates and returns the number of tokens of each output


def make_peer(name: str) -> Any:
    """Return a model of transformers with random weights."""
    torch.manual_seed(0)
    if name.startswith("gpt2"):
        sizes = {} if name == "gpt2" else {"n_embd": 1600, "n_layer": 48, "n_head": 25}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    if name == "marian":
        sizes = {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "vocab_size": 58101}
        heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
        widths = {"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "max_position_embeddings": 512}
        ids = {"pad_token_id": 58100, "decoder_start_token_id": 58100, "eos_token_id": 0, "scale_embedding": True}
        more = {"static_position_embeddings": True, "forced_eos_token_id": None, "activation_function": "swish"}
        return transformers.MarianMTModel(transformers.MarianConfig(**sizes, **heads, **widths, **ids, **more)).eval()
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=512, d_ff=2048, num_layers=6, num_heads=8, decoder_start_token_id=0)
    ).eval()


def transformers_call(model: Any, ids: torch.Tensor, new_tokens: int, num_beams: int, **options: Any) -> Call:
    """Return a call of `generate` of transformers."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    forced = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    num_before = ids.shape[1] if not model.config.is_encoder_decoder else 1

    def call() -> list[int]:
        output = model.generate(**inputs, **forced, num_beams=num_beams, **options)
        return [output.shape[1] - num_before] * len(output)

    return call


def ctranslate2_call(
    name: str, folder: Path, ids: torch.Tensor, new_tokens: int, num_beams: int, compute_type: str
) -> Call:
    """Return a call of CTranslate2 with the weights of a model of transformers.

    It runs in a process of its own, which sleeps between calls: once its threads exist in a process, those of torch
    there lose a fifth of their speed.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = name, folder, ids.tolist(), new_tokens, num_beams, compute_type, torch.get_num_threads()
    context.Process(target=_serve, args=(theirs, *arguments), daemon=True).start()
    assert ours.recv() == "ready"

    def call() -> list[int]:
        ours.send("generate")
        lengths: list[int] = ours.recv()
        return lengths

    return call


def _serve(
    connection: Any,
    name: str,
    folder: Path,
    ids: list[list[int]],
    new_tokens: int,
    num_beams: int,
    compute_type: str,
    num_threads: int,
) -> None:
    """Generate once for each message."""
    import ctranslate2

    model = make_peer(name)
    target = folder / f"ctranslate2-{compute_type}"
    _convert(model, folder / f"source-{compute_type}", target, compute_type)
    options = {"device": "cpu", "compute_type": compute_type, "inter_threads": 1, "intra_threads": num_threads}
    names = [[_token_name(model, i) for i in row] for row in ids]
    if model.config.is_encoder_decoder:
        translator = ctranslate2.Translator(str(target), **options)
        limits = {"min_decoding_length": new_tokens, "max_decoding_length": new_tokens, "max_batch_size": 0}
    else:
        generator = ctranslate2.Generator(str(target), **options)
        limits = {
            "min_length": new_tokens,
            "max_length": new_tokens,
            "end_token": [],
            "include_prompt_in_result": False,
        }
    connection.send("ready")
    while connection.recv() == "generate":
        if model.config.is_encoder_decoder:
            outputs = [r.hypotheses[0] for r in translator.translate_batch(names, beam_size=num_beams, **limits)]
        else:
            outputs = [r.sequences_ids[0] for r in generator.generate_batch(names, beam_size=num_beams, **limits)]
        connection.send([len(output) for output in outputs])


def _token_name(model: Any, token_id: int) -> str:
    config = model.config
    special = {config.eos_token_id: "</s>", getattr(config, "pad_token_id", None): "<pad>", 2: "<unk>"}
    return special.get(token_id, f"t{token_id}")


def _convert(model: Any, source: Path, target: Path, compute_type: str) -> None:
    """Convert a model with a tokenizer of invented names: the converter wants one, of any class."""
    import ctranslate2
    from tokenizers import Tokenizer, models

    model.save_pretrained(source)
    vocab = {_token_name(model, i): i for i in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    names = {"eos_token": "</s>", "bos_token": "</s>", "unk_token": "<unk>"}
    if model.config.pad_token_id is not None:
        names["pad_token"] = "<pad>"
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.save_pretrained(source)
    original = transformers.AutoTokenizer.from_pretrained
    transformers.AutoTokenizer.from_pretrained = lambda *_, **__: fast
    try:
        quantization = None if compute_type == "float32" else compute_type
        ctranslate2.converters.TransformersConverter(str(source)).convert(str(target), quantization=quantization)
    finally:
        transformers.AutoTokenizer.from_pretrained = original

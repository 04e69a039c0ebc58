from __future__ import annotations

import pytest
import torch

from qkv import InputError, families
from qkv.families.hf.convert import from_hf, to_hf
from qkv.families.hf.rules import Drop, ExportDuplicate, Rename, Split, TensorRule, Tie, Transpose, find_rule

RULES = (
    Rename("layer.{i}.norm.{p}", "blocks.{i}.norm.{p}"),
    Transpose("layer.{i}.out.{p}", "blocks.{i}.o.{p}"),
    Split("layer.{i}.in.{p}", ("blocks.{i}.q.{p}", "blocks.{i}.k.{p}"), transposed=True),
    Tie("again.weight", "layer.0.norm.weight"),
    Drop("mask"),
)


def theirs() -> dict[str, torch.Tensor]:
    found = {"mask": torch.ones(2)}
    for i in (0, 11):
        found |= {f"layer.{i}.norm.weight": torch.randn(3), f"layer.{i}.norm.bias": torch.randn(3)}
        found |= {f"layer.{i}.out.weight": torch.randn(3, 5), f"layer.{i}.out.bias": torch.randn(5)}
        found |= {f"layer.{i}.in.weight": torch.randn(3, 8), f"layer.{i}.in.bias": torch.randn(8)}
    return found


def test_out_is_the_inverse_of_in() -> None:
    before = theirs()
    after = to_hf(RULES, from_hf(RULES, before, "here"))
    assert after.keys() == before.keys() - {"mask"}
    assert all(torch.equal(after[name], before[name]) for name in after)


def test_a_split_gives_the_parts_of_the_outputs_in_order() -> None:
    given = theirs()
    found = from_hf(RULES, given, "here")
    whole = given["layer.11.in.weight"].T
    assert torch.equal(torch.cat([found["blocks.11.q.weight"], found["blocks.11.k.weight"]]), whole)


def test_nothing_is_copied_on_the_way_in() -> None:
    given = theirs()
    found = from_hf(RULES, given, "here")
    kept = {tensor.untyped_storage().data_ptr() for tensor in given.values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in found.values()} <= kept


def test_a_key_that_no_rule_takes_is_named() -> None:
    with pytest.raises(InputError, match=r"here: holds 'layer\.x\.norm\.weight'"):
        from_hf(RULES, theirs() | {"layer.x.norm.weight": torch.zeros(3)}, "here")


def test_a_part_of_ours_that_has_no_name_of_theirs_is_named() -> None:
    with pytest.raises(InputError, match=r"'head\.extra'"):
        to_hf(RULES, from_hf(RULES, theirs(), "here") | {"head.extra": torch.zeros(1)})


def test_half_of_what_they_keep_in_one_tensor_is_refused() -> None:
    ours = from_hf(RULES, theirs(), "here")
    del ours["blocks.0.k.bias"]
    with pytest.raises(InputError, match=r"blocks\.0\.k\.bias"):
        to_hf(RULES, ours)


def test_a_tensor_that_does_not_divide_is_named() -> None:
    with pytest.raises(InputError, match=r"'layer\.0\.in\.bias'.*does not divide into 2"):
        from_hf(RULES, {"layer.0.in.bias": torch.zeros(7)}, "here")


def test_a_tied_copy_that_differs_is_refused() -> None:
    given = theirs()
    from_hf(RULES, given | {"again.weight": given["layer.0.norm.weight"].clone()}, "here")
    with pytest.raises(InputError, match="are one tensor"):
        from_hf(RULES, given | {"again.weight": given["layer.0.norm.weight"] + 1}, "here")


def test_a_copy_is_written_and_never_read() -> None:
    rules = (Rename("inner", "ours"), ExportDuplicate("outer", "inner"))
    assert from_hf(rules, {"inner": torch.ones(2), "outer": torch.zeros(2)}, "here").keys() == {"ours"}
    found = to_hf(rules, {"ours": torch.ones(2)})
    assert torch.equal(found["outer"], found["inner"])


FORMS = [f.HF_FORMAT for f in map(families.get_family, families.names()) if hasattr(f, "HF_FORMAT")]


@pytest.mark.parametrize("form", FORMS, ids=[form.model_type for form in FORMS])
def test_each_key_of_a_family_meets_exactly_one_rule(form: object) -> None:
    for head in {architecture.head for architecture in form.architectures.values()}:  # type: ignore[attr-defined]
        for table in (form.head_rules, form.untied_head_rules):  # type: ignore[attr-defined]
            rules = (*form.backbone_rules, *table.get(head, ()))  # type: ignore[attr-defined]
            keys = [rule.hf.replace("{i}", "3").replace("{p}", "weight") for rule in rules]
            for rule, key in zip(rules, keys, strict=True):
                takers = [other for other in rules if find_rule([other], key)]
                assert takers == [rule], f"{key} under {head}: {takers}"
            ours = [name for rule in rules if isinstance(rule, TensorRule) for name in rule.qkv_names]
            assert len(ours) == len(set(ours)), f"two rules fill one parameter under {head}"

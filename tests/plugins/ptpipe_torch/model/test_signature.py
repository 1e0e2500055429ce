"""Named inputs and outputs: their JSON, and what a network returns by name."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ptpipe import StageError
from ptpipe_torch import BATCH, Signature, TensorSpec
from ptpipe_torch.model.example_inputs import copies, zeros
from ptpipe_torch.model.outputs import named_outputs, tensors_of
from ptpipe_torch.model.signature import DTYPES, describe_meanings

TOKENS = TensorSpec("tokens", "int64", (BATCH, "length"))
MASK = TensorSpec("mask", "bool", (BATCH, "length"))
LOGITS = TensorSpec("logits", "float32", (BATCH, 3))
STATES = TensorSpec("states", "float32", (BATCH, "length", 8))

NAMES = st.text("abc_", min_size=1, max_size=5)
SPECS = st.builds(
    lambda name, dtype, shape: TensorSpec(name, dtype, (BATCH, *shape)),
    NAMES,
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 10**6) | NAMES, max_size=4),
)


@given(st.lists(SPECS, min_size=2, max_size=6, unique_by=lambda spec: spec.name), st.data())
def test_json_round_trip(specs: list[TensorSpec], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(specs) - 1))
    signature = Signature(tuple(specs[:cut]), tuple(specs[cut:]))
    assert Signature.from_json(json.loads(json.dumps(signature.to_json()))) == signature


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), st.lists, max_leaves=5))
def test_any_other_shape_is_an_error(shape: object) -> None:
    content = {"name": "x", "dtype": "float32", "shape": shape}
    is_shape = isinstance(shape, list) and shape[:1] == ["batch"]
    if not is_shape:
        with pytest.raises(ValueError, match="no tensor's name, dtype and shape"):
            TensorSpec.from_json(content)


@pytest.mark.parametrize("size", [0, -1, True, 1.5, None, "", "two words", [2]])
def test_sizes_are_positive_integers_or_symbols(size: object) -> None:
    with pytest.raises(ValueError, match="no tensor's name"):
        TensorSpec.from_json({"name": "x", "dtype": "float32", "shape": ["batch", size]})


def test_a_signature_with_the_sizes_of_a_data_set() -> None:
    image = TensorSpec("images", "float32", (BATCH, 3, "8*height", "8*width"))
    mask = TensorSpec("logits", "float32", (BATCH, 4, "2*height", "width", "logits_4"))
    signature = Signature((image, TOKENS), (mask, STATES), {"logits": ("a", "b")})
    found = signature.with_sizes_of((TensorSpec("images", "float32", (BATCH, 3, 16, 40)), TOKENS))
    assert [spec.shape for spec in found.inputs] == [(BATCH, 3, 16, 40), TOKENS.shape]
    assert [spec.shape for spec in found.outputs] == [(BATCH, 4, 4, 5, "logits_4"), STATES.shape]
    assert found.meanings == signature.meanings


def test_two_tensors_of_one_name_are_an_error() -> None:
    content = Signature((TOKENS,), (LOGITS,)).to_json()
    with pytest.raises(ValueError, match="a name of its own"):
        Signature.from_json({**content, "outputs": content["inputs"]})


def test_meanings_are_stored_and_belong_to_tensors() -> None:
    signature = Signature((TOKENS,), (LOGITS,), {"logits": ("ham", "spam", "other")})
    assert Signature.from_json(json.loads(json.dumps(signature.to_json()))).meanings == signature.meanings
    assert Signature.from_json({"inputs": signature.to_json()["inputs"], "outputs": [LOGITS.to_json()]}).meanings == {}
    for wrong in ({"else": ["a"]}, {"logits": "ab"}, {"logits": [1]}, [], None):
        with pytest.raises(ValueError, match=r"meanings (are words for each tensor|of its own tensors)"):
            Signature.from_json({**signature.to_json(), "meanings": wrong})


def test_different_meanings_in_words() -> None:
    assert describe_meanings(("ham", "spam"), ("spam", "ham")) == ("[ham, spam]", "[spam, ham]")
    one, other = (("tokenizer " + digit * 64, f"{digit}000 tokens") for digit in "12")
    assert describe_meanings(one, other)[1] == f"[tokenizer {'2' * 12}, 2000 tokens]"
    many = [f"class {number}" for number in range(40)]
    swapped = [*many[:30], "cat", *many[31:]]
    assert describe_meanings(many, swapped) == ("[class 30 as number 30]", "[cat as number 30]")
    assert describe_meanings(many, many[:3])[0].endswith("class 9, and 30 more]")


def test_text_names_every_axis() -> None:
    assert str(Signature((TOKENS, MASK), (LOGITS,))) == (
        "tokens (batch, length) int64, mask (batch, length) bool -> logits (batch, 3) float32"
    )


def test_example_inputs_have_one_size_for_each_symbol() -> None:
    tokens, mask, states = zeros((TOKENS, MASK, STATES), 5)
    assert (tokens.dtype, mask.dtype, states.dtype) == (torch.int64, torch.bool, torch.float32)
    assert tokens.shape == mask.shape == states.shape[:2] and states.shape[2] == 8 and len(tokens) == 5


def test_an_input_that_no_memory_holds_is_refused() -> None:
    with pytest.raises(StageError, match=r"images \(batch, 65536, 65536\) float32 is too large"):
        zeros((TensorSpec("images", "float32", (BATCH, 1 << 16, 1 << 16)),), 2)


def test_copies_are_tensors_of_their_own() -> None:
    inputs = zeros((STATES,), 2)
    copies(inputs)[0].add_(1)
    assert not inputs[0].any()


def test_outputs_by_name_and_by_position() -> None:
    logits, states = torch.ones(2, 3), torch.ones(2, 7, 8)
    for returned in ((logits, states), [logits, states], OrderedDict(states=states, logits=logits)):
        named = named_outputs(returned, (LOGITS, STATES))
        assert named["logits"] is logits and named["states"] is states
    assert named_outputs(logits, (LOGITS,)) == {"logits": logits}
    assert len(tensors_of({"a": logits, "b": (states, None)})) == 2


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (torch.ones(2, 4), r"logits of shape \(2, 4\)"),
        (torch.ones(2), r"logits of shape \(2,\)"),
        (None, "a NoneType"),
        ({"out": torch.ones(2, 3)}, "a dict of out"),
        ((torch.ones(2, 3), torch.ones(1)), "a tuple of 2 values"),
        ([3.0], r"a list of 1 values \(float\)"),
    ],
)
def test_other_outputs_are_named(returned: object, found: str) -> None:
    with pytest.raises(StageError, match=rf"the network returns {found}; it must return logits \(batch, 3\) float32"):
        named_outputs(returned, (LOGITS,))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("my logits", "float32", (BATCH, 3)), "'my logits' is no name of a tensor: use letters, digits and _"),
        (
            ("logits", "float16", (BATCH, 3)),
            "logits has the dtype 'float16': it must be one of float32, float64, int64",
        ),
        (("logits", "float32", (8, 3)), r"logits has the shape \(8, 3\), whose first axis must be 'batch'"),
    ],
)
def test_a_wrong_spec_says_what_a_right_one_is(fields: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        TensorSpec(*fields)
